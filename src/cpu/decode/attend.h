// Attention for sequences and requests of few queries, which long tiles would leave to one thread.
#pragma once

#include <vector>

#include "cpu/attend/tile.h"

namespace openmsa::cpu {

// Up to so many queries of a sequence, every index head's blocks are cut into parts that are merged afterwards. By the
// sequence alone: its results do not depend on what else is in the call, nor on threads.
inline constexpr int64_t kFewQueries = 16;

void attend_few_queries(AttendCall& call, const std::vector<QueryTile>& tiles);

}  // namespace openmsa::cpu
