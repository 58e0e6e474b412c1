// Plan of tiles: for some tokens beside each other and one index head, the distinct blocks that they selected and which
// of them did. A row's own blocks keep their ascending order within each of the three kinds of blocks below.
#pragma once

#include <cstdint>

#include "cuda/common/sequences.cuh"
#include "cuda/sm90/plan/index_view.cuh"
#include "cuda/sm90/plan/item.cuh"
#include "cuda/sm90/plan/tile_config.h"

namespace openmsa::cuda::sm90 {

// Entries are sorted as numbers: contiguous, (row of the first key, token, slot); paged, (block, page, token, slot),
// since one request may name a page twice, and requests may share pages.
inline constexpr int kSlotBits = 6, kTokenBits = 7, kPageBits = 25, kBlockBits = 25;
inline constexpr int kBelowBlock = kTokenBits + kSlotBits;
static_assert(kBelowBlock + kPageBits + kBlockBits < 64);
inline constexpr uint64_t kNoEntry = ~uint64_t{0};
static_assert(kMostTileTokens <= 1 << kTokenBits);

// Blocks that only the first half of a tile's tokens selected, only the second, and both; and the rest.
inline constexpr int kKinds = 3, kRest = 3;

inline constexpr uint8_t kNoKind = 0xff;

struct TileToken {
  uint32_t sequence;
  int32_t k_begin;  // 0 when paged
  int32_t visible;
};

struct TileScratch {
  TileToken tokens[kMostTileTokens];
  unsigned long long rest_slots[kMostTileTokens];
  int32_t totals[kKinds + 1], distinct;
  int32_t warp_totals[kTileThreads / 32][kKinds + 1];
};

__device__ inline TileToken token_of(const TileArguments& args, int64_t query) {
  TileToken token{0, 0, 0};
  if (query >= args.layout.tokens_q) return token;
  const uint32_t owner = args.owners != nullptr ? args.owners[query - args.first_token] : 0;
  if (owner >= args.layout.batch) return token;
  const Sequence sequence = read_sequence(args.layout, args.block_size, owner);
  if (query < sequence.q_begin || query >= sequence.q_end) return token;
  token.sequence = owner;
  token.k_begin = static_cast<int32_t>(sequence.k_begin);
  token.visible = static_cast<int32_t>(sequence.visible(query));
  return token;
}

__device__ inline uint64_t entry_of(const TileArguments& args, const TileToken& token, int64_t block, int number,
                                    int slot) {
  // Divided, for entries times the block's size may be anything.
  if (block < 0 || block >= (token.visible + args.block_size - 1) / args.block_size) return kNoEntry;
  if (!args.layout.paged) {
    return (static_cast<uint64_t>(token.k_begin + block * args.block_size) << kTokenBits | number) << kSlotBits | slot;
  }
  const int64_t page = args.layout.block_table[token.sequence * args.layout.block_table_stride + block];
  if (page < 0 || page >= args.layout.pages) return kNoEntry;
  return ((static_cast<uint64_t>(block) << kPageBits | page) << kTokenBits | number) << kSlotBits | slot;
}

__device__ inline void sort_entries(uint64_t* entries, int count) {
  for (int run = 2; run <= count; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int pair = static_cast<int>(threadIdx.x); pair < count / 2; pair += kTileThreads) {
        const int low = pair / distance * 2 * distance + pair % distance;
        const int high = low + distance;
        const uint64_t a = entries[low], b = entries[high];
        if ((a > b) == ((low & run) == 0)) {
          entries[low] = b;
          entries[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

// The members of a block whose entries begin at `at`.
struct Members {
  uint64_t low, high;  // tokens 0 to 63, and the rest
  uint32_t keys;       // that some member sees
  bool whole;          // every member sees every key

  __device__ int count() const { return __popcll(low) + __popcll(high); }
  __device__ uint32_t halves(int tile_tokens) const {
    const int half = tile_tokens / 2;
    const uint64_t first = half == 64 ? low : low & ((uint64_t{1} << half) - 1);
    const uint64_t second = half == 64 ? high : low >> half;
    return (first != 0 ? 1u : 0u) | (second != 0 ? 2u : 0u);
  }
};

__device__ inline int32_t base_of(const TileArguments& args, uint64_t entry) {
  return args.layout.paged ? static_cast<int32_t>((entry >> (kBelowBlock + kPageBits)) * args.block_size)
                           : static_cast<int32_t>(entry >> kBelowBlock);
}

__device__ inline int32_t page_of(uint64_t entry) {
  return static_cast<int32_t>(entry >> kBelowBlock & ((uint64_t{1} << kPageBits) - 1));
}

__device__ inline int token_of(uint64_t entry) {
  return static_cast<int>(entry >> kSlotBits & ((1u << kTokenBits) - 1));
}

__device__ inline Members members_of(const TileArguments& args, const TileScratch& scratch, const uint64_t* entries,
                                     int at) {
  const uint64_t block = entries[at] >> kBelowBlock;
  const int32_t base = base_of(args, entries[at]);
  Members members{};
  int32_t seen = 0;
  members.whole = true;
  for (; at < args.sorted && entries[at] >> kBelowBlock == block; ++at) {
    const int number = token_of(entries[at]);
    (number < 64 ? members.low : members.high) |= uint64_t{1} << (number % 64);
    const TileToken& token = scratch.tokens[number];
    const int32_t sees = token.k_begin + token.visible - base;
    seen = max(seen, sees);
    members.whole &= sees >= args.block_size;
  }
  members.keys = static_cast<uint32_t>(min(seen, static_cast<int32_t>(args.block_size)));
  return members;
}

// Items of three kinds spread evenly over one list: item i of n stands at (2i + 1) / 2n of it, one of the third kind at
// (i + 1) / n, so that one of these ends the list. The place of an item is the number of items before it; of those at
// one point the lower kind comes first.
__device__ inline int32_t place_in_list(const int32_t* totals, int kind, int32_t number) {
  const uint32_t own = 2 * totals[kind];
  const uint32_t point = 2 * number + (kind == kKinds - 1 ? 2 : 1);
  int32_t place = number;
#pragma unroll
  for (int other = 0; other < kKinds; ++other) {
    if (other == kind || totals[other] == 0) continue;
    // Items at odd (third kind: even) 2j + 1 (2j + 2) <= limit.
    const uint32_t scaled = point * 2 * totals[other];
    const uint32_t limit = other < kind ? scaled / own : (scaled - 1) / own;
    const uint32_t before = other == kKinds - 1 ? limit / 2 : (limit + 1) / 2;
    place += static_cast<int32_t>(min(before, static_cast<uint32_t>(totals[other])));
  }
  return place;
}

__device__ inline void write_block(const TileArguments& args, int64_t at, uint64_t entry, const Members& members,
                                   uint32_t halves, uint32_t last) {
  TileBlock block;
  block.base = base_of(args, entry);
  block.page = args.layout.paged ? page_of(entry) : 0;
  block.info = members.keys | halves << kTileActiveBit | last << kTileLastBit;
  block.members = static_cast<uint32_t>(members.low);
  args.blocks[at] = block;
  const int words = args.more_words;
  if (words > 0) args.more_members[at * words] = static_cast<uint32_t>(members.low >> 32);
  if (words > 1) {
    args.more_members[at * words + 1] = static_cast<uint32_t>(members.high);
    args.more_members[at * words + 2] = static_cast<uint32_t>(members.high >> 32);
  }
}

// The numbers of this thread's item among those of its kind, over `rounds` of kTileThreads items in order.
__device__ inline int32_t number_in_kind(TileScratch& scratch, int kind, int32_t (&before)[kKinds + 1]) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int32_t number = 0;
  __syncthreads();  // the totals of the round before are read
#pragma unroll
  for (int k = 0; k <= kRest; ++k) {
    const unsigned same = __ballot_sync(~0u, kind == k);
    if (lane == 0) scratch.warp_totals[warp][k] = __popc(same);
    if (kind == k) number = __popc(same & ((1u << lane) - 1));
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k <= kRest; ++k) {
    if (kind == k) number += before[k];
#pragma unroll
    for (int w = 0; w < kTileThreads / 32; ++w) {
      const int32_t total = scratch.warp_totals[w][k];
      if (kind == k && w < warp) number += total;
      before[k] += total;
    }
  }
  return number;
}

// The members of a rest block, for those who gather them block by block.
__device__ inline void list_rest(const TileArguments& args, TileScratch& scratch, const uint64_t* entries, int at,
                                 int64_t first, int64_t head) {
  const uint64_t block = entries[at] >> kBelowBlock;
  const auto place = static_cast<uint32_t>(args.layout.paged ? page_of(entries[at]) : base_of(args, entries[at]));
  int before = -1;
  for (; at < args.sorted && entries[at] >> kBelowBlock == block; ++at) {
    const int number = token_of(entries[at]);
    if (number == before) continue;  // named twice
    before = number;
    const auto slot = static_cast<uint32_t>(entries[at] & ((1u << kSlotBits) - 1));
    const int64_t to = ((first + number) * args.heads + head) * args.topk + slot;
    args.places[to] = place;
    args.items[to] = pack_item({slot, static_cast<uint32_t>(head), static_cast<uint32_t>(first + number),
                                static_cast<uint32_t>(args.block_size)});
    atomicOr(&scratch.rest_slots[number], 1ull << slot);
  }
}

__device__ inline void plan_tile(const TileArguments& args, TileScratch& scratch, uint64_t* entries, uint8_t* kinds,
                                 int64_t work) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t head = work / args.tiles, tile = work % args.tiles;
  const int64_t in_chunk = tile * args.tile_tokens;  // of the tile's first token
  const int64_t first = args.first_token + in_chunk;
  __syncthreads();  // the tile before is done
  if (thread < args.tile_tokens) {
    const TileToken token = token_of(args, first + thread);
    scratch.tokens[thread] = token;
    scratch.rest_slots[thread] = 0;
    if (head == 0) args.reaches[in_chunk + thread] = token.k_begin + token.visible;
  }
  if (thread <= kRest) scratch.totals[thread] = 0;
  if (thread == 0) scratch.distinct = 0;
  __syncthreads();
  for (int i = thread; i < args.sorted; i += kTileThreads) {
    const int number = i / args.topk, slot = i % args.topk;
    uint64_t entry = kNoEntry;
    if (number < args.tile_tokens && scratch.tokens[number].visible > 0) {
      const int64_t block = read_index(args.indices, args.first_head + head, first + number, slot);
      entry = entry_of(args, scratch.tokens[number], block, number, slot);
    }
    entries[i] = entry;
    if (args.least_members > 0 && number < args.tile_tokens && first + number < args.layout.tokens_q) {
      args.places[((in_chunk + number) * args.heads + head) * args.topk + slot] = args.no_place;
    }
  }
  sort_entries(entries, args.sorted);

  const auto begins_block = [&](int i) {
    return entries[i] != kNoEntry && (i == 0 || entries[i - 1] >> kBelowBlock != entries[i] >> kBelowBlock);
  };
  if (args.least_members > 0) {
    int distinct = 0;
    for (int i = thread; i < args.sorted; i += kTileThreads) distinct += begins_block(i) ? 1 : 0;
    if (distinct > 0) atomicAdd(&scratch.distinct, distinct);
    __syncthreads();
  }
  const bool has_rest = args.least_members > 0 && scratch.distinct > args.most_alone;
  for (int i = thread; i < args.sorted; i += kTileThreads) {
    kinds[i] = kNoKind;
    if (!begins_block(i)) continue;
    const Members members = members_of(args, scratch, entries, i);
    const bool is_rest = has_rest && members.count() < args.least_members && members.whole;
    kinds[i] = static_cast<uint8_t>(is_rest ? kRest : members.halves(args.tile_tokens) - 1);
    if (is_rest) list_rest(args, scratch, entries, i, in_chunk, head);
    atomicAdd(&scratch.totals[kinds[i]], 1);
  }
  __syncthreads();
  const int32_t* const totals = scratch.totals;
  const int32_t listed = totals[0] + totals[1] + totals[2];
  int32_t before[kKinds + 1] = {};
  for (int round = 0; round < args.sorted; round += kTileThreads) {
    const int i = round + thread;
    const int kind = i < args.sorted ? kinds[i] : kNoKind;
    const int32_t number = number_in_kind(scratch, kind, before);
    if (kind == kNoKind) continue;
    const uint32_t active = kind == kRest ? 0 : static_cast<uint32_t>(kind) + 1;
    const bool ends = number + 1 == totals[kind] && (kind == kKinds - 1 || totals[kKinds - 1] == 0);
    const int32_t place = kind == kRest ? listed + number : place_in_list(totals, kind, number);
    write_block(args, work * args.tile_tokens * args.topk + place, entries[i], members_of(args, scratch, entries, i),
                active, ends ? active : 0);
  }
  if (thread == 0) {
    args.counts[work] = listed;
    args.all_counts[work] = listed + totals[kRest];
    args.suspects[work] = 0;
  }
  if (args.least_members > 0 && thread < args.tile_tokens && first + thread < args.layout.tokens_q) {
    args.rest_slots[(in_chunk + thread) * args.heads + head] = scratch.rest_slots[thread];
  }
}

__global__ void __launch_bounds__(kTileThreads) plan_tiles(const __grid_constant__ TileArguments args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ TileScratch scratch;
  auto* const entries = reinterpret_cast<uint64_t*>(shared_bytes);
  auto* const kinds = reinterpret_cast<uint8_t*>(entries + args.sorted);
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.header = {args.first_next, 0};
  for (int64_t work = blockIdx.x; work < args.tiles * args.heads; work += gridDim.x) {
    plan_tile(args, scratch, entries, kinds, work);
  }
}

}  // namespace openmsa::cuda::sm90
