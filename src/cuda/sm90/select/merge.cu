// The lists of tiles that several units shared, merged and written. One warp, or all of a thread block, per row.
#include "cuda/sm90/select/merge.h"
#include "cuda/sm90/select/partial.cuh"
#include "cuda/sm90/select/sequences.cuh"
#include "cuda/sm90/select/tile_row.cuh"

namespace openmsa::cuda::sm90 {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kSharedMergeRows = 2;  // per thread block of the grid: with more, a row per warp
constexpr unsigned kWholeWarp = 0xffffffffu;

// A list across a warp, best first: lane l holds entries l and, with kSlots 2, l + 32.
template <int kSlots>
struct WarpList {
  PartialEntry entries[kSlots] = {};

  // Merges another list, given backwards: `reversed[s]` of lane l is its entry 32 kSlots - 1 - (l + 32 s).
  __device__ void merge(const PartialEntry (&reversed)[kSlots], int lane) {
    bool better = false;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) better |= reversed[s] > entries[s];
    if (__ballot_sync(kWholeWarp, better) == 0) return;
      // The better half of a falling and a rising sequence is bitonic.
#pragma unroll
    for (int s = 0; s < kSlots; ++s) entries[s] = max(entries[s], reversed[s]);
    sort_bitonic(lane);
  }

  __device__ void sort_bitonic(int lane) {
    if constexpr (kSlots == 2) {
      const PartialEntry high = max(entries[0], entries[1]);
      entries[1] = min(entries[0], entries[1]);
      entries[0] = high;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
      for (PartialEntry& entry : entries) {
        const PartialEntry other = __shfl_xor_sync(kWholeWarp, entry, step);
        entry = (lane & step) == 0 ? max(entry, other) : min(entry, other);
      }
    }
  }

  // How many entries of the list are above this lane's `entry`.
  __device__ int rank(PartialEntry entry, PartialEntry without_mark) const {
    int above = 0;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      for (int source = 0; source < 32; ++source) {
        above += (__shfl_sync(kWholeWarp, entries[s], source) & without_mark) > entry ? 1 : 0;
      }
    }
    return above;
  }
};

template <int kSlots>
__device__ void write_merged(const SelectArguments& args, const WorkUnit& tile, WarpList<kSlots>& list, int32_t token,
                             int32_t head, int lane) {
  const Pages pages(args.layout, tile.sequence);
  const LocalWindow window = local_window(args, pages, visible_keys(token, tile.diagonal));
  const IndexRow row(args, head, token);
  int32_t used = 0;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    if (lane + 32 * s >= window.capacity) list.entries[s] = 0;
    used += __popc(__ballot_sync(kWholeWarp, list.entries[s] != 0));
  }
  // Forced entries came first to get their slots; in the row they stand among the others by their score.
  const PartialEntry without_mark = ~kForcedEntry;
  const bool any_forced = __ballot_sync(kWholeWarp, (list.entries[0] & kForcedEntry) != 0) != 0;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const PartialEntry entry = list.entries[s] & without_mark;
    const int slot = any_forced ? list.rank(entry, without_mark) : lane + 32 * s;
    if (entry != 0) row.write(slot, partial_block(entry));
  }
  if (lane == 0) row.write_rest(used, window, pages);
}

template <int kSlots>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeArguments merge) {
  const SelectArguments& args = merge.select;
  __shared__ PartialEntry lists[kWarps][32 * kSlots];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t splits = args.header->splits;
  // Few rows: all warps of a thread block share one. Many: a row per warp.
  const bool together = static_cast<int64_t>(splits) * merge.tile_rows <= int64_t{kSharedMergeRows} * gridDim.x;
  const int32_t rows_per_item = together ? 1 : kWarps;
  const int64_t items = static_cast<int64_t>(splits) * (merge.tile_rows / rows_per_item);
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t first = item * rows_per_item;
    const WorkUnit tile = args.splits[first / merge.tile_rows];
    const int32_t rows = tile.tokens * args.heads;
    const int32_t number = static_cast<int32_t>(first % merge.tile_rows) + (together ? 0 : warp);
    if (together && number >= rows) continue;
    const int32_t place = number / args.heads, place_head = number % args.heads;
    const int32_t map_place = args.q_tokens.backwards ? args.tile_tokens - 1 - place : place;
    const int32_t map_head = args.q_heads.backwards ? args.heads - 1 - place_head : place_head;
    const int32_t position = tile_position(map_place * args.heads + map_head);
    const int64_t piece_entries = static_cast<int64_t>(merge.tile_rows) * args.topk;
    const PartialEntry* const from = args.partials + tile.partial * piece_entries + position * args.topk;

    WarpList<kSlots> list;
    const auto load = [&](const PartialEntry* entries, int32_t count, PartialEntry(&reversed)[kSlots]) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const int at = 32 * kSlots - 1 - (lane + 32 * s);
        reversed[s] = at < count ? entries[at] : 0;
      }
    };
    const int32_t step = together ? kWarps : 1;
    const int32_t pieces = number < rows ? tile.pieces : 0;
    int32_t piece = together ? warp : 0;
    PartialEntry next[kSlots] = {};
    if (piece < pieces) load(from + piece * piece_entries, args.topk, next);
    while (piece < pieces) {
      PartialEntry current[kSlots];
#pragma unroll
      for (int s = 0; s < kSlots; ++s) current[s] = next[s];
      piece += step;
      if (piece < pieces) load(from + piece * piece_entries, args.topk, next);  // under the merge of the one before
      list.merge(current, lane);
    }
    if (together) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) lists[warp][lane + 32 * s] = list.entries[s];
      __syncthreads();
      if (warp == 0) {
        for (int other = 1; other < kWarps; ++other) {
          load(lists[other], 32 * kSlots, next);
          list.merge(next, lane);
        }
      }
    }
    if (number < rows && (!together || warp == 0)) {
      write_merged(args, tile, list, tile.first_token + place, tile.key_head * args.heads + place_head, lane);
    }
    if (together) __syncthreads();  // the lists are free
  }
}

}  // namespace

const void* merge_kernel_entry(int64_t topk) {
  return topk <= 32 ? reinterpret_cast<const void*>(&merge_kernel<1>) : reinterpret_cast<const void*>(&merge_kernel<2>);
}
int merge_threads() { return kThreads; }

}  // namespace openmsa::cuda::sm90
