// What the vector code of captured_mass is given: query rows of one KV head and one key block.
#pragma once

#include <cstdint>

#include "cpu/common/rows.h"
#include "cpu/common/running_sum.h"

namespace openmsa::cpu {

struct MassBlock {
  const float* queries;  // [rows][D], worth the scale
  int64_t rows;
  StoredRows k;
  int64_t keys;             // the most that any row sees
  const int64_t* row_keys;  // [rows] how many of them each row sees, 0 at least
  float* panels;            // scratch, mass_panels(...)
  float* scores;            // scratch [rows][mass_score_stride(keys)]
  RunningSum* sums;         // out: the block's own, of row r at sums[r * sums_stride]
  int64_t sums_stride;
};

// Floats of scratch for blocks of `keys` keys.
int64_t mass_score_stride(int64_t keys);
inline int64_t mass_panels(int64_t dim, int64_t score_stride) { return dim * score_stride; }

void mass_queries(const StoredRows& rows, int64_t count, float* queries);
void mass_block(const MassBlock& block);

}  // namespace openmsa::cpu
