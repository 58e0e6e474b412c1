// The vector code of append.
#pragma once

#include <cstdint>

#include "cpu/common/rows.h"

namespace openmsa::cpu {

// to[i] = from[i] / divisor in float8 e4m3, for the columns of one row.
void append_quotients(const StoredRows& from, float divisor, uint8_t* to);

}  // namespace openmsa::cpu
