// Which rows a sequence has, and which blocks a row may take. Offsets clamp into their tensors and a sequence that
// falls is empty: the values behind the pointers are not trusted.
#pragma once

#include <cstdint>

#include "cuda/sm90/select/config.h"

namespace openmsa::cuda::sm90 {

__device__ inline int32_t clamp_offset(int32_t offset, int32_t total) { return min(max(offset, 0), total); }

// Packed query rows [q_begin, q_end) and their keys.
struct Sequence {
  int32_t q_begin, q_end;
  int32_t k_begin;  // contiguous only
  int32_t keys;

  // Token t of the sequence sees max(0, t + diagonal) keys: aligned at the bottom right.
  __device__ int32_t diagonal() const { return keys - q_end + 1; }
};

__device__ inline Sequence sequence_of(const SelectLayout& layout, int32_t number) {
  Sequence s{0, layout.tokens_q, 0, layout.tokens_k};
  if (layout.cu_seqlens_q != nullptr) {
    s.q_begin = clamp_offset(layout.cu_seqlens_q[number], layout.tokens_q);
    s.q_end = clamp_offset(layout.cu_seqlens_q[number + 1], layout.tokens_q);
  }
  if (layout.block_table != nullptr) {
    const int64_t most = layout.max_pages * layout.block_size;
    s.keys = static_cast<int32_t>(min(static_cast<int64_t>(max(layout.seq_lens[number], 0)), most));
  } else if (layout.cu_seqlens_k != nullptr) {
    const int32_t* const starts = layout.k_starts != nullptr ? layout.k_starts : layout.cu_seqlens_k;
    s.k_begin = clamp_offset(starts[number], layout.tokens_k);
    s.keys = max(clamp_offset(layout.cu_seqlens_k[number + 1], layout.tokens_k) - s.k_begin, 0);
  }
  return s;
}

__device__ inline int32_t visible_keys(int32_t token, int32_t diagonal) { return max(token + diagonal, 0); }

// The pages of one sequence; contiguous sequences have every block.
struct Pages {
  const int32_t* table;  // null: contiguous
  int32_t count;

  __device__ Pages(const SelectLayout& layout, int32_t sequence)
      : table(layout.block_table != nullptr ? layout.block_table + sequence * layout.block_table_stride : nullptr),
        count(layout.pages) {}

  // A page outside the pool is invisible. Asked for blocks with keys only, so that later entries are never read.
  __device__ bool has_block(int32_t block) const {
    return table == nullptr || static_cast<uint32_t>(table[block]) < static_cast<uint32_t>(count);
  }
};

// The forced local blocks of a row: [kept, own], as far as they are visible, get slots; blocks before `first` compete.
struct LocalWindow {
  int32_t own;  // -1: the row sees no key
  int32_t first;
  int32_t kept;
  int32_t capacity;  // slots left for blocks before `first`
};

__device__ inline LocalWindow local_window(const SelectArguments& args, const Pages& pages, int32_t visible) {
  LocalWindow window;
  window.own = visible > 0 ? (visible - 1) / args.layout.block_size : -1;
  window.first = window.own >= args.local_blocks ? window.own - args.local_blocks + 1 : 0;
  window.kept = window.own + 1;
  window.capacity = args.topk;
  // The nearest take slots first.
  for (int32_t block = window.own; block >= window.first && window.capacity > 0; --block) {
    if (!pages.has_block(block)) continue;
    window.kept = block;
    --window.capacity;
  }
  return window;
}

// Where a row's entries go.
struct IndexRow {
  const SelectArguments& args;
  int64_t base;

  __device__ IndexRow(const SelectArguments& arguments, int32_t head, int32_t token)
      : args(arguments), base(head * args.indices_stride_head + token * args.indices_stride_token) {}

  __device__ void write(int32_t slot, int32_t block) const {
    const int64_t at = base + slot * args.indices_stride_slot;
    if (args.indices_are_int64) {
      static_cast<int64_t*>(args.indices)[at] = block;
    } else {
      static_cast<int32_t*>(args.indices)[at] = block;
    }
  }

  // The slots from `used` on: kept local blocks ascending, then -1.
  __device__ void write_rest(int32_t used, const LocalWindow& window, const Pages& pages) const {
    for (int32_t block = window.kept; block <= window.own; ++block) {
      if (pages.has_block(block)) write(used++, block);
    }
    for (; used < args.topk; ++used) write(used, -1);
  }
};

}  // namespace openmsa::cuda::sm90
