// Plan: constants, what an item is, the kernels' arguments.
#pragma once

#include <cstdint>

#include "api/stages.h"

namespace openmsa::cuda::sm90 {

inline constexpr int kPlanThreads = 256;

// An item is one entry of a row's selection, packed into 32 bits (item.cuh): its slot, its index head, its query
// counted from the chunk's first, and the keys of the block that the query sees.
inline constexpr int kItemSlotBits = 6;
inline constexpr int kItemHeadBits = 4;
inline constexpr int kItemTokenBits = 15;
inline constexpr int kItemLimitBits = 7;
static_assert(kItemSlotBits + kItemHeadBits + kItemTokenBits + kItemLimitBits == 32);

// A chunk of queries is planned at a time: at most this many queries, and about this many items, so that the sort's
// four arrays (32 MB) and the rows that the items name stay in L2.
inline constexpr int64_t kPlanTokens = int64_t{1} << kItemTokenBits;
inline constexpr int64_t kPlanItems = int64_t{1} << 21;

// The owner of a row that belongs to no sequence.
inline constexpr uint32_t kNoOwner = ~uint32_t{0};

// A caller's selection: [Hi, Tq, topk] int32 or int64, any strides, any values.
struct IndexView {
  const void* data;
  int64_t stride_head, stride_token, stride_slot;
  bool is_int64;
};

struct OwnerArguments {
  SequenceLayout layout;
  int64_t block_size;
  int64_t first, end;  // the rows
  uint32_t* owners;    // [end - first], all kNoOwner before
};

// Items of a chunk in the order (query, head, slot), each with the place of its block. Places number the rows (paged:
// pages) of each index key head one head after the other.
struct ListArguments {
  SequenceLayout layout;
  int64_t block_size;
  IndexView indices;
  uint32_t heads, topk;
  uint32_t heads_per_key_head;
  uint32_t places_per_head;
  uint32_t no_place;  // of an entry that names no visible block, or one named before
  int64_t first_token;
  uint32_t count;
  const uint32_t* owners;  // by query of the chunk; null: one sequence
  uint32_t* places;
  uint32_t* items;
};

}  // namespace openmsa::cuda::sm90
