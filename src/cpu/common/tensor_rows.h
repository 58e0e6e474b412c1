// The rows of a head in a tensor of any strides.
#pragma once

#include <cstdint>

#include "api/dtype.h"
#include "cpu/common/rows.h"

namespace openmsa::cpu {

// The same rows, `elements` further on.
inline StoredRows rows_at(StoredRows rows, int64_t elements) {
  rows.data = static_cast<const char*>(rows.data) + elements * dtype_size(rows.dtype);
  return rows;
}
inline OutputRows rows_at(OutputRows rows, int64_t elements) {
  rows.data = static_cast<char*>(rows.data) + elements * dtype_size(rows.dtype);
  return rows;
}

// Where one head's row of a token begins in [tokens, heads, dim] or in a paged [pages, page size, heads, dim], where
// tokens count through the pages.
inline int64_t token_offset(const Tensor& tensor, int64_t token, int64_t head) {
  const int64_t* strides = tensor.strides;
  if (tensor.rank == 3) return token * strides[0] + head * strides[1];
  const int64_t page_size = tensor.shape[1];
  return token / page_size * strides[0] + token % page_size * strides[1] + head * strides[2];
}

// From `token` on, one head's row of each token; of a paged tensor as far as its page goes.
inline StoredRows token_rows(const Tensor& tensor, int64_t token, int64_t head, float factor = 1.0F) {
  const int64_t stride = tensor.strides[tensor.rank - 3], columns = tensor.shape[tensor.rank - 1];
  return rows_at(StoredRows{tensor.data, stride, columns, static_cast<DataType>(tensor.dtype), factor},
                 token_offset(tensor, token, head));
}
inline OutputRows output_token_rows(const Tensor& tensor, int64_t token, int64_t head) {
  const int64_t stride = tensor.strides[tensor.rank - 3], columns = tensor.shape[tensor.rank - 1];
  return rows_at(OutputRows{tensor.data, stride, columns, static_cast<DataType>(tensor.dtype)},
                 token_offset(tensor, token, head));
}

// From `head` on, each head's row of one token of [tokens, heads, dim].
inline StoredRows head_rows(const Tensor& tensor, int64_t token, int64_t head, float factor = 1.0F) {
  return rows_at({tensor.data, tensor.strides[1], tensor.shape[2], static_cast<DataType>(tensor.dtype), factor},
                 token * tensor.strides[0] + head * tensor.strides[1]);
}
inline OutputRows output_head_rows(const Tensor& tensor, int64_t token, int64_t head) {
  return rows_at(OutputRows{tensor.data, tensor.strides[1], tensor.shape[2], static_cast<DataType>(tensor.dtype)},
                 token * tensor.strides[0] + head * tensor.strides[1]);
}

}  // namespace openmsa::cpu
