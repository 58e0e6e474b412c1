// What the vector code of combine is given: all heads of one query.
#pragma once

#include <cstdint>

#include "cpu/common/rows.h"

namespace openmsa::cpu {

struct CombineToken {
  int64_t splits, heads;
  StoredRows outs;       // the heads of split 0
  int64_t split_stride;  // elements between splits
  const float* lses;     // of split 0 and head 0
  int64_t lse_split_stride, lse_head_stride;
  OutputRows out;  // the heads, of the same type
  float* lse;
  int64_t out_lse_stride;  // between heads
  float* weights;          // scratch, combine_weights(splits, heads)
};

// Floats of scratch for one token.
int64_t combine_weights(int64_t splits, int64_t heads);

void combine_token(const CombineToken& token);

}  // namespace openmsa::cpu
