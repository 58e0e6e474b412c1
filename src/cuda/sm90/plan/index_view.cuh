// Entries of a caller's selection.
#pragma once

#include <cstdint>

#include "cuda/sm90/plan/config.h"

namespace openmsa::cuda::sm90 {

__device__ inline int64_t read_index(const IndexView& indices, int64_t head, int64_t query, int64_t slot) {
  const int64_t at = head * indices.stride_head + query * indices.stride_token + slot * indices.stride_slot;
  return indices.is_int64 ? static_cast<const int64_t*>(indices.data)[at]
                          : static_cast<const int32_t*>(indices.data)[at];
}

}  // namespace openmsa::cuda::sm90
