// The work units of a call, from the offsets and lengths on the device: one thread block lists them, dearest first.
#include "cuda/sm90/select/schedule.h"
#include "cuda/sm90/select/sequences.cuh"

namespace openmsa::cuda::sm90 {
namespace {

constexpr int kThreads = 1024;
constexpr int kBuckets = 128;

struct Shared {
  bool out_of_order;
  unsigned long long total;  // blocks to score, over all tiles
  int32_t longest;           // blocks of one tile
  int32_t piece_blocks;
  int32_t splits, pieces;
  int32_t bucket_units[kBuckets];
  int32_t bucket_begin[kBuckets];
};

// Rows [begin, end) of one owner.
struct Tile {
  int32_t sequence, begin, end;
};

__device__ int32_t query_offset(const SelectLayout& layout, int32_t number) {
  return clamp_offset(layout.cu_seqlens_q[number], layout.tokens_q);
}

// Offsets that do not fall: the tiles of a sequence start at its first row. A share of the threads serves a sequence.
template <typename Visit>
__device__ void visit_ordered_tiles(const ScheduleArguments& args, const Visit& visit) {
  const SelectLayout& layout = args.layout;
  int32_t share = kThreads;
  while (share > 1 && kThreads / share < layout.batch) share /= 2;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  for (int32_t number = thread / share; number < layout.batch; number += kThreads / share) {
    const Sequence s = sequence_of(layout, number);
    const int32_t tiles = s.q_end > s.q_begin ? (s.q_end - s.q_begin - 1) / args.tile_tokens + 1 : 0;
    for (int32_t tile = thread % share; tile < tiles; tile += share) {
      const int32_t begin = s.q_begin + tile * args.tile_tokens;
      visit(Tile{number, begin, min(s.q_end - begin, args.tile_tokens) + begin}, s);
    }
  }
  if (layout.cu_seqlens_q == nullptr) return;
  // Rows before and after all sequences.
  const int32_t bounds[2][2] = {{0, query_offset(layout, 0)}, {query_offset(layout, layout.batch), layout.tokens_q}};
#pragma unroll
  for (int gap = 0; gap < 2; ++gap) {
    for (int64_t begin = bounds[gap][0] + static_cast<int64_t>(thread) * args.tile_tokens; begin < bounds[gap][1];
         begin += static_cast<int64_t>(kThreads) * args.tile_tokens) {
      const int32_t first = static_cast<int32_t>(begin);
      visit(Tile{kNoSequence, first, min(bounds[gap][1] - first, args.tile_tokens) + first}, Sequence{});
    }
  }
}

// Offsets that fall somewhere: a row that they give to several sequences belongs to the first. Owners change at offsets
// only, so a tile starts at each multiple of the tile size and at each distinct offset, and ends where the next starts.
template <typename Visit>
__device__ void visit_disordered_tiles(const ScheduleArguments& args, const Visit& visit) {
  const SelectLayout& layout = args.layout;
  const int64_t multiples = (static_cast<int64_t>(layout.tokens_q) + args.tile_tokens - 1) / args.tile_tokens;
  const int64_t candidates = multiples + layout.batch + 1;
  for (int64_t candidate = threadIdx.x; candidate < candidates; candidate += kThreads) {
    const bool is_offset = candidate >= multiples;
    const int32_t begin = is_offset ? query_offset(layout, static_cast<int32_t>(candidate - multiples))
                                    : static_cast<int32_t>(candidate * args.tile_tokens);
    if (begin >= layout.tokens_q || (is_offset && begin % args.tile_tokens == 0)) continue;
    int64_t end = min(static_cast<int64_t>(begin / args.tile_tokens + 1) * args.tile_tokens,
                      static_cast<int64_t>(layout.tokens_q));
    int32_t owner = kNoSequence;
    bool duplicate = false;
    int32_t previous = 0;
    for (int32_t number = 0; number <= layout.batch; ++number) {
      const int32_t offset = query_offset(layout, number);
      if (number > 0 && owner == kNoSequence && previous <= begin && begin < offset) owner = number - 1;
      if (offset > begin && offset < end) end = offset;
      duplicate |= is_offset && offset == begin && number < candidate - multiples;
      previous = offset;
    }
    if (duplicate) continue;
    visit(Tile{owner, begin, static_cast<int32_t>(end)}, owner >= 0 ? sequence_of(layout, owner) : Sequence{});
  }
}

// Blocks that some row of the tile has to score.
__device__ int32_t scored_blocks(const ScheduleArguments& args, const Tile& tile, const Sequence& s) {
  if (tile.sequence == kNoSequence) return 0;
  const int32_t visible = visible_keys(tile.end - 1, s.diagonal());
  if (visible == 0) return 0;
  const int32_t own = (visible - 1) / args.layout.block_size;
  return own >= args.local_blocks ? own - args.local_blocks + 1 : 0;
}

// Pieces of a tile: near equal, whole batches. Below 2^32: blocks are fewer than 2^25, piece_blocks at most 2^30.
__device__ int32_t pieces_of(int32_t blocks, int32_t piece_blocks) {
  return blocks <= piece_blocks ? 1 : static_cast<int32_t>((2u * blocks + piece_blocks) / (2u * piece_blocks));
}

__device__ int32_t bucket_of(int32_t blocks, int32_t longest) {
  return longest == 0 ? 0 : static_cast<int32_t>((kBuckets - 1) * (1 - static_cast<float>(blocks) / longest));
}

__global__ void __launch_bounds__(kThreads) schedule_kernel(const __grid_constant__ ScheduleArguments args) {
  __shared__ Shared shared;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  if (thread == 0) {
    shared.out_of_order = false;
    shared.total = 0;
    shared.longest = 0;
    shared.splits = 0;
    shared.pieces = 0;
  }
  for (int i = thread; i < kBuckets; i += kThreads) shared.bucket_units[i] = 0;
  __syncthreads();

  const SelectLayout& layout = args.layout;
  if (layout.cu_seqlens_q != nullptr) {
    for (int32_t number = thread; number < layout.batch; number += kThreads) {
      if (query_offset(layout, number) > query_offset(layout, number + 1)) shared.out_of_order = true;
    }
  }
  __syncthreads();
  const bool out_of_order = shared.out_of_order;
  const auto visit_tiles = [&](const auto& visit) {
    if (out_of_order) {
      visit_disordered_tiles(args, visit);
    } else {
      visit_ordered_tiles(args, visit);
    }
  };

  // How much there is, so how long a piece may be.
  unsigned long long total = 0;
  int32_t longest = 0;
  visit_tiles([&](const Tile& tile, const Sequence& s) {
    const int32_t blocks = scored_blocks(args, tile, s);
    total += static_cast<unsigned long long>(blocks) * args.key_heads;
    longest = max(longest, blocks);
  });
  atomicAdd(&shared.total, total);
  atomicMax(&shared.longest, longest);
  __syncthreads();
  if (thread == 0) {
    const unsigned long long even = (shared.total + kTargetPieces - 1) / kTargetPieces;
    int32_t piece = max(static_cast<int32_t>(min(even, 1ull << 30)), kLeastPieceBlocks);
    // Forced init blocks stay in the first piece; more of them than a list holds stay in one.
    if (args.init_blocks > args.topk) {
      piece = 1 << 30;
    } else {
      piece = max(piece, 2 * args.init_blocks);
    }
    shared.piece_blocks = piece;
  }
  __syncthreads();
  const int32_t piece_blocks = shared.piece_blocks;
  longest = min(shared.longest, piece_blocks + piece_blocks / 2);

  // visit_unit(unit, pieces of its tile, number of the piece)
  const auto visit_units = [&](const auto& visit_unit) {
    visit_tiles([&](const Tile& tile, const Sequence& s) {
      WorkUnit unit{};
      unit.sequence = tile.sequence;
      unit.first_token = tile.begin;
      unit.tokens = tile.end - tile.begin;
      unit.k_begin = s.k_begin;
      unit.diagonal = tile.sequence == kNoSequence ? -layout.tokens_q : s.diagonal();
      unit.block_end = scored_blocks(args, tile, s);
      unit.partial = kWhole;
      unit.pieces = pieces_of(unit.block_end, piece_blocks);
      for (unit.key_head = 0; unit.key_head < args.key_heads; ++unit.key_head) visit_unit(unit);
    });
  };
  const auto piece_length = [&](const WorkUnit& unit) {
    const int32_t even = (unit.block_end - 1) / unit.pieces + 1;
    return (even + kBatchBlocks - 1) / kBatchBlocks * kBatchBlocks;
  };

  // Counting sort by cost, dearest first.
  visit_units([&](const WorkUnit& unit) {
    const int32_t length = unit.pieces > 1 ? piece_length(unit) : unit.block_end;
    const int32_t units = unit.pieces > 1 ? (unit.block_end + length - 1) / length : 1;
    atomicAdd(&shared.bucket_units[bucket_of(min(length, longest), longest)], units);
  });
  __syncthreads();
  if (thread < 32) {
    int32_t begin = 0;
    for (int first = 0; first < kBuckets; first += 32) {
      const int32_t mine = shared.bucket_units[first + thread];
      int32_t sum = mine;
      for (int step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(0xffffffffu, sum, step);
        if (thread >= step) sum += other;
      }
      shared.bucket_begin[first + thread] = begin + sum - mine;
      begin += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (thread == 0) {
      args.header->units = begin;
      args.header->next = args.thread_blocks;
    }
  }
  __syncthreads();
  visit_units([&](WorkUnit unit) {
    const int32_t length = unit.pieces > 1 ? piece_length(unit) : unit.block_end;
    const int32_t blocks = unit.block_end;
    unit.pieces = unit.pieces > 1 ? (blocks + length - 1) / length : 1;
    int32_t at = atomicAdd(&shared.bucket_begin[bucket_of(min(length, longest), longest)], unit.pieces);
    if (unit.pieces == 1) {
      args.units[at] = unit;
      return;
    }
    unit.partial = atomicAdd(&shared.pieces, unit.pieces);
    args.splits[atomicAdd(&shared.splits, 1)] = unit;
    for (int32_t piece = 0; piece < unit.pieces; ++piece, ++unit.partial) {
      unit.block_begin = piece * length;
      unit.block_end = min(unit.block_begin + length, blocks);
      args.units[at++] = unit;
    }
  });
  __syncthreads();
  if (thread == 0) args.header->splits = shared.splits;
}

}  // namespace

const void* schedule_kernel_entry() { return reinterpret_cast<const void*>(&schedule_kernel); }
int schedule_threads() { return kThreads; }

}  // namespace openmsa::cuda::sm90
