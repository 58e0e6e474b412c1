// index_lse: constants, the kernels' arguments, their shared memory. docs/kernels/index_lse.md has the schedules.
#pragma once

#include <cstdint>

#include "api/stages.h"
#include "cuda/common/staged_rows.h"

namespace openmsa::cuda::sm90::lse {

// Rows of Di elements lie in shared memory as StagedRows: float8 widens to float16 on the way, exactly, for the tensor
// cores' float8 sums are too coarse for a sum of exponentials.

// A score in units of log 2, in which exponentials are taken: score * factor. Where the scale lies outside float32's
// comfortable range, scores are scaled in float64 first and the factor is log2(e) alone.
struct LseScale {
  double scale;
  float factor;
  bool in_double;
};

// ---- Selected blocks -------------------------------------------------------------------------------------------

// One producer warpgroup fills a ring of query tiles, gathered row by row, for three consumer warpgroups that multiply
// 64 rows by a block each. A ring slot belongs to one consumer, so that it waits for every phase of its barriers. Three
// slots each keep 144 KB of gathers and their latency away from the products; a fourth does not fit.
inline constexpr int kPartialConsumers = 3;
inline constexpr int kPartialThreads = (kPartialConsumers + 1) * 128;
inline constexpr int kPartialRows = 64;
inline constexpr int kPartialSlots = 3 * kPartialConsumers;
inline constexpr int kPartialKeyBuffers = 2;
inline constexpr int kPartialSegment = 1024;  // items that the producer reads at a time
inline constexpr int kPartialConsumerRegisters = 144, kPartialProducerRegisters = 72;
static_assert(128 * (kPartialConsumers * kPartialConsumerRegisters + kPartialProducerRegisters) <= 65536);

// Rows that share a block. 0 ends its consumer's work, -1 the last one's.
struct PartialTile {
  int32_t rows;
  int32_t key_buffer;
  uint32_t items[kPartialRows];
};

template <int kHeadDim, int kBlock>
struct PartialShared {
  StagedRows<kHeadDim, kBlock> keys[kPartialKeyBuffers];
  StagedRows<kHeadDim, kPartialRows> queries[kPartialSlots];
  PartialTile tiles[kPartialSlots];
  uint32_t places[kPartialSegment], items[kPartialSegment];
  uint64_t full[kPartialSlots], empty[kPartialSlots];
};
static_assert(sizeof(PartialShared<128, 128>) <= 227 * 1024);

struct PartialArguments {
  const void* index_q;  // the chunk's first query
  int64_t q_stride_token, q_stride_head;
  const void* index_k;
  int64_t k_stride_place, k_stride_token, k_stride_head;  // place: a row, or a page
  int64_t rows_end;  // rows of index_k that exist from place 0 on; paged: no limit but the page
  LseScale scale;
  const uint32_t* places;  // see plan/launch.h
  const uint32_t* items;
  uint32_t places_per_head, no_place;
  uint32_t count;
  uint32_t heads, topk;
  float* partials;  // [query of the chunk, head, slot]: log2 of the block's sum of 2^score
};

inline constexpr int kMergeThreads = 128;

struct MergeArguments {
  const float* partials;  // [tokens, heads, topk]
  uint32_t tokens, heads, topk;
  float* index_lse;  // the chunk's first query
  int64_t stride_head, stride_token;
};

// ---- Whole prefixes --------------------------------------------------------------------------------------------

// Two consumer warpgroups of two 64-row products each, and one that fills the ring of key tiles. The index heads of a
// key head are rows beside each other: a tile is kPrefixRows / (Hi / Hik) queries.
inline constexpr int kPrefixConsumers = 2;
inline constexpr int kPrefixThreads = (kPrefixConsumers + 1) * 128;
inline constexpr int kPrefixRows = kPrefixConsumers * 2 * 64;
inline constexpr int kPrefixKeys = 128;
inline constexpr int kPrefixStages = 4;
// 65,536 registers: the consumers hold 128 sums each, the producer addresses.
inline constexpr int kPrefixConsumerRegisters = 224, kPrefixProducerRegisters = 56;
static_assert(128 * (kPrefixConsumers * kPrefixConsumerRegisters + kPrefixProducerRegisters) <= 65536);

template <int kHeadDim>
struct PrefixShared {
  StagedRows<kHeadDim, kPrefixRows> queries;
  StagedRows<kHeadDim, kPrefixKeys> keys[kPrefixStages];
  uint64_t full[kPrefixStages], empty[kPrefixStages];
};
static_assert(sizeof(PrefixShared<128>) <= 227 * 1024);

struct PrefixArguments {
  SequenceLayout layout;
  const uint32_t* owners;  // by query; null: one sequence
  const void* index_q;
  int64_t q_stride_token, q_stride_head;
  const void* index_k;
  int64_t k_stride_token, k_stride_head;
  int32_t key_heads, heads_per_key_head;
  int64_t tiles;  // of one key head
  LseScale scale;
  float* index_lse;
  int64_t lse_stride_head, lse_stride_token;
};

}  // namespace openmsa::cuda::sm90::lse
