// Where a sequence's keys lie: packed rows, or pages of a pool. Blocks count from the sequence's first key.
#pragma once

#include <cstdint>

#include "cuda/sm90/select/config.h"

namespace openmsa::cuda::sm90 {

// Packed query rows [q_begin, q_end) and their keys. Offsets clamp into their tensors and a sequence that falls is
// empty: the values behind the pointers are not trusted.
struct Sequence {
  int64_t q_begin, q_end;
  int64_t k_begin;  // contiguous only
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

__device__ inline void query_range(const SelectArguments& args, int64_t number, int64_t* begin, int64_t* end) {
  *begin = 0;
  *end = args.tokens_q;
  if (args.cu_seqlens_q == nullptr) return;
  *begin = clamp_offset(args.cu_seqlens_q[number], args.tokens_q);
  *end = clamp_offset(args.cu_seqlens_q[number + 1], args.tokens_q);
}

template <typename Type, int kBlock>
struct ContiguousKeys {
  using Element = Type;
  const Element* first;  // the sequence's key 0, the right head
  int64_t stride_token;

  __device__ static Sequence sequence(const SelectArguments& args, int64_t number) {
    Sequence s;
    query_range(args, number, &s.q_begin, &s.q_end);
    s.k_begin = args.k_starts != nullptr       ? clamp_offset(args.k_starts[number], args.tokens_k)
                : args.cu_seqlens_k != nullptr ? clamp_offset(args.cu_seqlens_k[number], args.tokens_k)
                                               : 0;
    const int64_t end =
        args.cu_seqlens_k != nullptr ? clamp_offset(args.cu_seqlens_k[number + 1], args.tokens_k) : args.tokens_k;
    s.keys = end > s.k_begin ? end - s.k_begin : 0;
    return s;
  }

  __device__ ContiguousKeys(const SelectArguments& args, int64_t /*number*/, const Sequence& sequence, int key_head)
      : first(static_cast<const Element*>(args.index_k) + sequence.k_begin * args.k_stride_token +
              key_head * args.k_stride_head),
        stride_token(args.k_stride_token) {}

  __device__ bool has_block(int64_t /*block*/) const { return true; }
  __device__ const Element* block(int64_t block) const { return first + block * kBlock * stride_token; }
};

template <typename Type, int kBlock>
struct PagedKeys {
  using Element = Type;
  const Element* pool;  // row 0 of page 0, the right head
  int64_t stride_page, stride_token;
  const int32_t* table;  // the request's pages
  int64_t pages;

  __device__ static Sequence sequence(const SelectArguments& args, int64_t number) {
    Sequence s;
    query_range(args, number, &s.q_begin, &s.q_end);
    s.k_begin = 0;
    s.keys = clamp_offset(args.seq_lens[number], args.max_pages * kBlock);
    return s;
  }

  __device__ PagedKeys(const SelectArguments& args, int64_t number, const Sequence& /*sequence*/, int key_head)
      : pool(static_cast<const Element*>(args.index_k) + key_head * args.k_stride_head),
        stride_page(args.k_stride_page),
        stride_token(args.k_stride_token),
        table(args.block_table + number * args.block_table_stride),
        pages(args.pages) {}

  // A page outside the pool is invisible. Asked for blocks with keys only, so that later entries are never read.
  __device__ bool has_block(int64_t block) const {
    const int64_t page = table[block];
    return page >= 0 && page < pages;
  }
  __device__ const Element* block(int64_t block) const { return pool + table[block] * stride_page; }
};

}  // namespace openmsa::cuda::sm90
