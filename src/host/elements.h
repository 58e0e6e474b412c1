// Single elements of the tensors that are no rows of a head: float32 matrices and scalars, selections, cache scales.
#pragma once

#include <cstdint>

#include "api/stages.h"

namespace openmsa::host {

// An element of a float32 matrix (lse, index_lse, share, best), or of a float32 tensor of rank 0 (kl, d_kl).
inline float& element(const Tensor& matrix, int64_t row, int64_t column) {
  return static_cast<float*>(matrix.data)[row * matrix.strides[0] + column * matrix.strides[1]];
}
inline float& element(const Tensor& scalar) { return *static_cast<float*>(scalar.data); }

// Entry `slot` of (index head, query) in a tensor [Hi, Tq, topk] of int32 or int64.
inline int64_t load_index(const Tensor& indices, int64_t index_head, int64_t query, int64_t slot) {
  const int64_t at = index_head * indices.strides[0] + query * indices.strides[1] + slot * indices.strides[2];
  if (indices.dtype == OPENMSA_INT64) return static_cast<const int64_t*>(indices.data)[at];
  return static_cast<const int32_t*>(indices.data)[at];
}
inline void store_index(const Tensor& indices, int64_t index_head, int64_t query, int64_t slot, int64_t block) {
  const int64_t at = index_head * indices.strides[0] + query * indices.strides[1] + slot * indices.strides[2];
  if (indices.dtype == OPENMSA_INT64) {
    static_cast<int64_t*>(indices.data)[at] = block;
  } else {
    static_cast<int32_t*>(indices.data)[at] = static_cast<int32_t>(block);
  }
}

// The factor of a float8 cache. A number counts as float32, so that it means the same as a tensor that holds it.
inline float factor_of(const CacheScale& scale) {
  return scale.device_value != nullptr ? *scale.device_value : static_cast<float>(scale.value);
}

}  // namespace openmsa::host
