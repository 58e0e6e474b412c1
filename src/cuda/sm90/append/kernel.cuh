// Append: a warp brings one query's rows to the page and row of its last visible key.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/sequences.cuh"
#include "cuda/sm90/append/config.h"

namespace openmsa::cuda::sm90::append {

// One piece to the cache, 16 bytes at a time.
__device__ inline void copy_piece(const Stream& stream, float factor, const void* from, void* to) {
  const auto* const source = static_cast<const uint4*>(from);
  auto* const target = static_cast<uint4*>(to);
  if (stream.row_bytes == stream.cache_bytes) {
    target[0] = source[0];
    if (stream.row_bytes == 2) target[1] = source[1];
    return;
  }
  uint32_t words[kPieceElements / 4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float values[kPieceElements / 2];
    if (stream.is_bfloat16) {
      load_widened(reinterpret_cast<const Bfloat16*>(source + half), values);
    } else {
      load_widened(reinterpret_cast<const Float16*>(source + half), values);
    }
#pragma unroll
    for (int e = 0; e < kPieceElements / 2; e += 4) {
      words[(half * kPieceElements / 2 + e) / 4] =
          convert_f32_to_e4m3x2(values[e] / factor, values[e + 1] / factor) |
          static_cast<uint32_t>(convert_f32_to_e4m3x2(values[e + 2] / factor, values[e + 3] / factor)) << 16;
    }
  }
  target[0] = make_uint4(words[0], words[1], words[2], words[3]);
}

__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ Arguments args) {
  const SequenceLayout& layout = args.layout;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kWarps = kThreads / 32;
  for (int64_t query = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; query < layout.tokens_q;
       query += static_cast<int64_t>(gridDim.x) * kWarps) {
    const uint32_t owner = args.owners[query];
    if (owner >= layout.batch) continue;  // padding
    const int64_t position = read_sequence(layout, args.block_size, owner).visible(query) - 1;
    if (position < 0) continue;  // a row before the first key
    const int64_t page = layout.block_table[owner * layout.block_table_stride + position / args.block_size];
    if (page < 0 || page >= layout.pages) continue;
    for (const Stream& stream : args.streams) {
      const float factor = stream.device_factor != nullptr ? *stream.device_factor : stream.factor;
      for (int i = lane; i < stream.heads * stream.pieces; i += 32) {
        const int64_t head = i / stream.pieces, element = i % stream.pieces * kPieceElements;
        const int64_t row = query * stream.rows_stride_token + head * stream.rows_stride_head + element;
        const int64_t slot = page * stream.cache_stride_page + position % args.block_size * stream.cache_stride_row +
                             head * stream.cache_stride_head + element;
        copy_piece(stream, factor, static_cast<const char*>(stream.rows) + row * stream.row_bytes,
                   static_cast<char*>(stream.cache) + slot * stream.cache_bytes);
      }
    }
  }
}

}  // namespace openmsa::cuda::sm90::append
