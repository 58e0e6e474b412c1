// Select, the simple form: constants, the kernel's arguments, its shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace openmsa::cuda::sm90 {

inline constexpr int kSelectThreads = 256;
inline constexpr int kSelectWarps = kSelectThreads / 32;
// A tile of query rows against one block of keys. Half a warp owns four rows and takes every 16th key of the block, so
// that a thread keeps 4 x 8 scores: 8 rows (64 scores) would pass the 128 registers that two thread blocks per SM
// leave.
inline constexpr int kTileRows = 64;
inline constexpr int kRowsPerThread = 4;
inline constexpr int kKeyLanes = 16;
inline constexpr int kRowsPerWarp = 2 * kRowsPerThread;
static_assert(kRowsPerWarp * kSelectWarps == kTileRows);
inline constexpr int kMaxTopk = 64;  // two list entries per lane
static_assert(kMaxTopk == 2 * 32);
inline constexpr int kMaxIndexHeads = 16;

// What one launch reads and writes. Strides are in elements; token offsets and block counts are int64 everywhere.
struct SelectArguments {
  const void* index_q;  // [Tq, Hi, Di]
  int64_t q_stride_token, q_stride_head;
  const void* index_k;  // [Tk, Hik, Di], or paged [pages, block, Hik, Di]
  int64_t k_stride_page, k_stride_token, k_stride_head;
  int32_t index_heads_per_key_head;

  int64_t batch, tokens_q, tokens_k;
  const int32_t* cu_seqlens_q;  // [batch + 1], or null: one sequence
  const int32_t* cu_seqlens_k;  // [batch + 1], or null
  const int32_t* k_starts;      // [batch], or null
  const int32_t* block_table;   // [batch, max_pages], paged
  int64_t block_table_stride, max_pages, pages;
  const int32_t* seq_lens;  // [batch], paged

  int32_t topk, init_blocks, local_blocks;
  double scale;
  int32_t tile_rows;  // packed query rows of a tile, 1 to kTileRows

  void* indices;  // [Hi, Tq, topk]
  int64_t indices_stride_head, indices_stride_token, indices_stride_slot;
  bool indices_are_int64;
  float* index_lse;  // [Hi, Tq], or null
  int64_t lse_stride_head, lse_stride_token;
};

// What a query row keeps while its sequence's keys pass by.
struct SelectRow {
  int64_t visible;      // keys it sees; 0 for a row of another sequence
  uint64_t threshold;   // a candidate enters the list only above this
  int32_t local_first;  // first block of the forced local window; the blocks before it compete
  int32_t local_kept;   // first local block that got a slot
  int32_t capacity;     // slots that the local blocks left
  float local_max;      // scaled maximum over the kept local blocks
  float local_sum;      // sum of exp(z - local_max) over them
};

// Shared memory of a thread block. Rows of floats are padded by one 16-byte access, so that the 16 keys which half a
// warp reads together lie in different banks. The lists follow: scores[kTileRows][topk], then, for index_lse,
// sums[kTileRows][topk].
template <int kHeadDim, int kBlock>
struct SelectShared {
  static constexpr int kRowFloats = kHeadDim + 4;
  float queries[kTileRows][kRowFloats];
  float keys[kBlock][kRowFloats];
  SelectRow rows[kTileRows];
  int64_t next_sequence;
};

template <int kHeadDim, int kBlock>
constexpr int64_t select_shared_bytes(int64_t topk, bool with_lse) {
  const int64_t entry = static_cast<int64_t>(sizeof(uint64_t)) + (with_lse ? static_cast<int64_t>(sizeof(float)) : 0);
  return static_cast<int64_t>(sizeof(SelectShared<kHeadDim, kBlock>)) + kTileRows * topk * entry;
}

// Two thread blocks per SM (228 KB, 1 KB of it reserved per block) at M3's shape: their loads and products overlap.
static_assert(2 * (select_shared_bytes<128, 128>(16, false) + 1024) <= 228 * 1024);
// The largest request still fits.
static_assert(select_shared_bytes<128, 128>(kMaxTopk, true) <= 227 * 1024);

}  // namespace openmsa::cuda::sm90
