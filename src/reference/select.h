// Block scores as the reference ranks them, for comparing the selections of other backends.
#pragma once

#include <cstdint>
#include <vector>

#include "api/stages.h"

namespace openmsa::reference {

// One entry per block up to the query's own: the largest scaled token score among the block's visible tokens, where NaN
// counts as -inf. NaN marks a block without visible tokens (paged: its page is outside the pool).
std::vector<double> block_scores(const SelectParams& params, int64_t index_head, int64_t query);

}  // namespace openmsa::reference
