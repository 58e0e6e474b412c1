// Append: new rows of keys, values and index keys on their way into the pages of their requests.
#pragma once

#include <cstdint>

#include "api/stages.h"

namespace openmsa::cuda::sm90::append {

inline constexpr int kThreads = 256;
inline constexpr int kPieceElements = 16;  // 16 or 32 bytes; a thread moves one piece of a row at a time

struct Stream {
  const void* rows;  // [Tq, heads, dim]
  int64_t rows_stride_token, rows_stride_head;
  void* cache;  // [pages, block, heads, dim]
  int64_t cache_stride_page, cache_stride_row, cache_stride_head;
  int32_t heads;
  int32_t pieces;  // of a row: dim / kPieceElements
  // How elements change on the way.
  bool is_bfloat16;     // else float16, unless rows hold float8
  int32_t row_bytes;    // of an element in rows: 1 or 2
  int32_t cache_bytes;  // in the cache; 1 beside rows of 2: rounded to float8 after the division by the factor
  float factor;
  const float* device_factor;  // instead of `factor`; null: none
};

inline constexpr int kStreams = 3;  // k, v, index_k

struct Arguments {
  SequenceLayout layout;
  int64_t block_size;
  const uint32_t* owners;  // by query
  Stream streams[kStreams];
};

}  // namespace openmsa::cuda::sm90::append
