// The keeper warps: running lists of the tile's rows, from the maxima that the product warps send.
#pragma once

#include <cstdint>

#include "cuda/common/ring.cuh"
#include "cuda/sm90/select/lists.cuh"
#include "cuda/sm90/select/partial.cuh"
#include "cuda/sm90/select/sequences.cuh"
#include "cuda/sm90/select/shared.cuh"
#include "cuda/sm90/select/tile_row.cuh"

namespace openmsa::cuda::sm90 {

// The token and the index head of the row whose maxima stand at `position`; token -1 where the tile has no such row.
struct KeptRow {
  int32_t token, head;

  __device__ KeptRow(const SelectArguments& args, const WorkUnit& unit, int position) {
    const int row = tile_row(position);
    const int32_t place = row / args.heads, place_head = row % args.heads;
    const int32_t t = args.q_tokens.backwards ? args.tile_tokens - 1 - place : place;
    token = place < args.tile_tokens && t < unit.tokens ? unit.first_token + t : -1;
    head = unit.key_head * args.heads + (args.q_heads.backwards ? args.heads - 1 - place_head : place_head);
  }
};

// Blocks from here on do not compete for a slot of the token's rows.
__device__ inline int32_t competing_blocks(const SelectArguments& args, const WorkUnit& unit, int32_t token) {
  const int32_t visible = visible_keys(token, unit.diagonal);
  const int32_t own = visible > 0 ? (visible - 1) / args.layout.block_size : -1;
  return own >= args.local_blocks ? min(own - args.local_blocks + 1, unit.block_end) : 0;
}

// A thread's rows of a tile: one each, and a few lanes of each warp one of the rest.
template <typename Config>
struct KeeperRows {
  static constexpr int kRows = 2;
  static constexpr int kThreads = 32 * Config::kKeeperWarps;
  static constexpr int kRest = Config::kTileRows - kThreads;
  static constexpr int kRestLanes = (kRest + Config::kKeeperWarps - 1) / Config::kKeeperWarps;
  static_assert(kRest >= 0 && kRestLanes <= 32);
  static constexpr int32_t kAbsent = -1;
  int32_t limit[kRows];       // blocks from here on do not compete; kAbsent: no such row
  uint32_t threshold[kRows];  // a score enters a full list only above this
  int32_t worst_slot[kRows];  // and takes this slot

  // kTileRows: this thread has no such row.
  __device__ static int position(int i) {
    const int thread = static_cast<int>(threadIdx.x) - (Config::kThreads - kThreads);
    if (i == 0) return thread;
    const int lane = thread % 32, rest = thread / 32 * kRestLanes + lane;
    return lane < kRestLanes && rest < kRest ? kThreads + rest : Config::kTileRows;
  }

  __device__ KeeperRows(const SelectArguments& args, const WorkUnit& unit) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t token = position(i) < Config::kTileRows ? KeptRow(args, unit, position(i)).token : -1;
      limit[i] = token >= 0 ? competing_blocks(args, unit, token) : kAbsent;
      threshold[i] = UINT32_MAX;
      worst_slot[i] = 0;
    }
  }
};

inline constexpr int kChunk = 8;  // slots that a search for the worst entry loads at a time

template <typename Config>
__device__ inline List<Config::kTileRows> list_of(SelectShared<Config>& shared, int position) {
  return {&shared.scores[0][position], &shared.blocks[0][position]};
}

// How full a tile's lists are: the same for all rows, except that a row without a slot or beyond its limit left slots
// empty. Forced init blocks come first.
struct ListFill {
  int32_t forced, filled;
};

// Init blocks of a batch, which enter whatever their score as long as their list has a slot left. Bits of `present` are
// the batch's visible blocks; those of init blocks are cleared.
template <typename Config>
__device__ inline void keep_forced(const SelectArguments& args, SelectShared<Config>& shared, const WorkUnit& unit,
                                   const Pages& pages, ListFill& fill, int slot, int32_t first, uint32_t& present) {
  for (int place = 0; place < kBatchBlocks && first + place < args.init_blocks; ++place) {
    if ((present >> place & 1) == 0) continue;
    present &= ~(1u << place);
    if (fill.forced >= args.topk) continue;
#pragma unroll 1
    for (int i = 0; i < KeeperRows<Config>::kRows; ++i) {
      const int position = KeeperRows<Config>::position(i);
      if (position >= Config::kTileRows) continue;
      const int32_t token = KeptRow(args, unit, position).token;
      if (token < 0 || first + place >= competing_blocks(args, unit, token)) continue;
      if (fill.forced >= local_window(args, pages, visible_keys(token, unit.diagonal)).capacity) continue;
      list_of(shared, position).set(fill.forced, shared.maxima[slot][place][position], first + place);
    }
    ++fill.forced;
  }
  fill.filled = fill.forced;
}

// Blocks of a batch that find an empty slot.
template <typename Config>
__device__ inline void fill_lists(const SelectArguments& args, SelectShared<Config>& shared, KeeperRows<Config>& rows,
                                  ListFill& fill, int slot, int32_t first, uint32_t& present) {
  for (int place = 0; place < kBatchBlocks && fill.filled < args.topk; ++place) {
    if ((present >> place & 1) == 0) continue;
    present &= ~(1u << place);
#pragma unroll
    for (int i = 0; i < KeeperRows<Config>::kRows; ++i) {
      const int position = rows.position(i);
      if (first + place >= rows.limit[i]) continue;
      list_of(shared, position).set(fill.filled, shared.maxima[slot][place][position], first + place);
    }
    ++fill.filled;
  }
  if (fill.filled < args.topk || fill.forced == args.topk) return;
#pragma unroll
  for (int i = 0; i < KeeperRows<Config>::kRows; ++i) {
    if (rows.limit[i] == KeeperRows<Config>::kAbsent) continue;
    const Worst worst = find_worst<kChunk>(list_of(shared, rows.position(i)), fill.forced, args.topk);
    rows.threshold[i] = worst.score;
    rows.worst_slot[i] = worst.slot;
  }
}

// Writes a row's list in its order: to its indices, or to its partial list.
template <typename Config>
__device__ inline void write_list(const SelectArguments& args, const WorkUnit& unit, const Pages& pages,
                                  const KeptRow& row, int position, const List<Config::kTileRows>& list,
                                  int32_t most_forced) {
  const bool partial = unit.partial != kWhole;
  const LocalWindow window = local_window(args, pages, visible_keys(row.token, unit.diagonal));
  const IndexRow indices(args, row.head, row.token);
  PartialEntry* const entries =
      args.partials + (static_cast<int64_t>(unit.partial) * Config::kTileRows + position) * args.topk;
  int32_t forced = 0;
  while (forced < most_forced && list.score(forced) != 0) ++forced;
  const int32_t others = partial ? args.topk - forced : window.capacity - forced;  // slots that forced entries left

  int32_t used = 0;
  constexpr int kTogether = 2;
  for (int32_t first = 0; first < args.topk; first += kTogether) {
    uint64_t mine[kTogether];
    int32_t above_forced[kTogether] = {}, above_others[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) mine[i] = first + i < args.topk ? list.order(first + i) : 0;
#pragma unroll 4
    for (int32_t slot = 0; slot < most_forced; ++slot) {
      const uint64_t other = list.order(slot);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) above_forced[i] += other > mine[i] ? 1 : 0;
    }
#pragma unroll 4
    for (int32_t slot = most_forced; slot < args.topk; ++slot) {
      const uint64_t other = list.order(slot);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) above_others[i] += other > mine[i] ? 1 : 0;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const bool is_forced = first + i < most_forced;
      if (mine[i] == 0 || (!is_forced && above_others[i] >= others)) continue;
      const int32_t block = static_cast<int32_t>(~static_cast<uint32_t>(mine[i]));
      ++used;
      if (partial) {
        const int32_t slot = is_forced ? above_forced[i] : forced + above_others[i];
        entries[slot] = partial_entry(is_forced, static_cast<uint32_t>(mine[i] >> 32), block);
      } else {
        indices.write(above_forced[i] + min(above_others[i], others), block);
      }
    }
  }
  if (partial) {
    for (; used < args.topk; ++used) entries[used] = 0;
  } else {
    indices.write_rest(used, window, pages);
  }
}

template <typename Config>
__device__ inline void keep_lists(const SelectArguments& args, SelectShared<Config>& shared) {
  using Rows = KeeperRows<Config>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPosition<kUnitRing> unit_ring;
  RingPosition<kRing> batch;
  for (;;) {
    unit_ring.wait_full(shared.units_full);
    const WorkUnit unit = shared.units[unit_ring.slot];
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.units_empty[unit_ring.slot]);
    unit_ring.advance();
    if (unit.sequence == kNoMoreWork) return;

    Rows rows(args, unit);
    const Pages pages(args.layout, unit.sequence);
#pragma unroll 1
    for (int i = 0; i < Rows::kRows; ++i) {
      if (rows.position(i) >= Config::kTileRows) continue;
      const auto list = list_of(shared, rows.position(i));
      for (int slot = 0; slot < args.topk; ++slot) list.score(slot) = 0;
    }
    ListFill fill{};
    // Every row takes the blocks before this one.
    const int32_t common_blocks = competing_blocks(args, unit, unit.first_token);

    for (int32_t first = unit.block_begin; first < unit.block_end; first += kBatchBlocks) {
      uint32_t present = (1u << kBatchBlocks) - 1;
      if (pages.table != nullptr) {
        const int32_t block = first + lane;
        present &= __ballot_sync(0xffffffffu, lane < kBatchBlocks && block < unit.block_end && pages.has_block(block));
      }
      batch.wait_full(shared.maxima_full);
      if (first < args.init_blocks) keep_forced(args, shared, unit, pages, fill, batch.slot, first, present);
      if (fill.filled < args.topk) fill_lists(args, shared, rows, fill, batch.slot, first, present);
      const auto& maxima = shared.maxima[batch.slot];
      const bool common = first + kBatchBlocks <= common_blocks && present == (1u << kBatchBlocks) - 1;
      uint32_t entering = 0;  // bit kRows x place + i
#pragma unroll
      for (int place = 0; place < kBatchBlocks; ++place) {
#pragma unroll
        for (int i = 0; i < Rows::kRows; ++i) {
          if (rows.position(i) >= Config::kTileRows) continue;
          const bool competes = common || (first + place < rows.limit[i] && (present >> place & 1) != 0);
          if (competes && maxima[place][rows.position(i)] > rows.threshold[i]) {
            entering |= 1u << (Rows::kRows * place + i);
          }
        }
      }
      // In ascending order of blocks. Lanes work together, whichever row and block it is.
      while (__ballot_sync(0xffffffffu, entering != 0) != 0) {
        if (entering != 0) {
          const int bit = __ffs(static_cast<int>(entering)) - 1;
          entering &= entering - 1;
          const int place = bit / Rows::kRows, which = bit % Rows::kRows;
          const int position = rows.position(which);
          uint32_t threshold = rows.threshold[0];
          int32_t slot = rows.worst_slot[0];
#pragma unroll
          for (int i = 1; i < Rows::kRows; ++i) {
            threshold = which == i ? rows.threshold[i] : threshold;
            slot = which == i ? rows.worst_slot[i] : slot;
          }
          const uint32_t score = maxima[place][position];
          if (score > threshold) {  // an earlier block of the batch may have raised it
            const auto list = list_of(shared, position);
            list.set(slot, score, first + place);
            const Worst worst = find_worst<kChunk>(list, fill.forced, args.topk);
#pragma unroll
            for (int i = 0; i < Rows::kRows; ++i) {
              rows.threshold[i] = which == i ? worst.score : rows.threshold[i];
              rows.worst_slot[i] = which == i ? worst.slot : rows.worst_slot[i];
            }
          }
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.maxima_empty[batch.slot]);
      batch.advance();
    }
#pragma unroll 1
    for (int i = 0; i < Rows::kRows; ++i) {
      const int position = rows.position(i);
      if (position >= Config::kTileRows) continue;
      const KeptRow row(args, unit, position);
      if (row.token >= 0) {
        write_list<Config>(args, unit, pages, row, position, list_of(shared, position), fill.forced);
      }
    }
  }
}

}  // namespace openmsa::cuda::sm90
