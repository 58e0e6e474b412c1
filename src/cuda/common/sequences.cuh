// Where a sequence's queries and keys lie, from offsets and lengths that hold anything: they clamp into their tensors,
// and a sequence that falls is empty.
#pragma once

#include <cstdint>

#include "api/stages.h"

namespace openmsa::cuda {

struct Sequence {
  int64_t q_begin, q_end;  // packed query rows
  int64_t k_begin;         // row of its key 0; 0 when paged
  int64_t keys;

  // Keys that packed row `row` of the sequence sees: aligned at the bottom right.
  __device__ int64_t visible(int64_t row) const {
    const int64_t count = keys - (q_end - row) + 1;
    return count > 0 ? count : 0;
  }
};

__device__ inline int64_t clamp_offset(int64_t offset, int64_t total) {
  return offset < 0 ? 0 : offset > total ? total : offset;
}

__device__ inline Sequence read_sequence(const SequenceLayout& layout, int64_t block_size, int64_t number) {
  Sequence s{0, layout.tokens_q, 0, layout.tokens_k};
  if (layout.cu_seqlens_q != nullptr) {
    s.q_begin = clamp_offset(layout.cu_seqlens_q[number], layout.tokens_q);
    s.q_end = clamp_offset(layout.cu_seqlens_q[number + 1], layout.tokens_q);
  }
  if (layout.paged) {
    s.keys = clamp_offset(layout.seq_lens[number], layout.max_pages * block_size);
    return s;
  }
  int64_t k_end = layout.tokens_k;
  if (layout.cu_seqlens_k != nullptr) {
    s.k_begin = clamp_offset(layout.cu_seqlens_k[number], layout.tokens_k);
    k_end = clamp_offset(layout.cu_seqlens_k[number + 1], layout.tokens_k);
  }
  if (layout.k_starts != nullptr) s.k_begin = clamp_offset(layout.k_starts[number], layout.tokens_k);
  s.keys = k_end > s.k_begin ? k_end - s.k_begin : 0;
  return s;
}

}  // namespace openmsa::cuda
