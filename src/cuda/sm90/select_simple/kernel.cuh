// Select, the simple form: one thread block scores a tile of packed query rows of one index head against the keys of
// their sequences, block after block, and keeps each row's best blocks in a sorted list.
//
// A score is one chain of float32 fused multiply-adds over ascending dimensions, whatever the tile, batch, split or
// layout: its bits depend on its query and its key alone. docs/kernels/select.md has the schedule.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/sm90/select/config.h"
#include "cuda/sm90/select/keys.cuh"

namespace openmsa::cuda::sm90 {

inline constexpr unsigned kWholeWarp = 0xffffffffu;

// ---- A list entry: 64 bits that order like (score descending, block ascending). 0 is an empty slot.
// ------------------

__device__ inline uint64_t make_entry(float score, int32_t block) {
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 becomes +0
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return (static_cast<uint64_t>(ordered) << 32) | ~static_cast<uint32_t>(block);
}

__device__ inline uint32_t entry_block(uint64_t entry) { return ~static_cast<uint32_t>(entry); }

__device__ inline float entry_score(uint64_t entry) {
  const uint32_t ordered = static_cast<uint32_t>(entry >> 32);
  return __uint_as_float((ordered & 0x80000000u) != 0 ? ordered & 0x7fffffffu : ~ordered);
}

// The index of the last set bit of {high, low}, or -1.
__device__ inline int last_bit(unsigned low, unsigned high) {
  return high != 0 ? 63 - __clz(static_cast<int>(high)) : 31 - __clz(static_cast<int>(low));
}

// Puts `entry` into a sorted list of `capacity` slots; the worst entry that is not forced (of a block from init_blocks
// on; an empty slot too) leaves. Returns the list's new threshold. The whole warp calls it; `sums` may be null.
__device__ inline uint64_t insert_entry(uint64_t* list, float* sums, int capacity, uint32_t init_blocks, uint64_t entry,
                                        float sum, int lane) {
  const int slots[2] = {lane, lane + 32};
  uint64_t old[2];
  float old_sum[2] = {};
  unsigned better[2], replaceable[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool in_list = slots[half] < capacity;
    old[half] = in_list ? list[slots[half]] : 0;
    if (sums != nullptr && in_list) old_sum[half] = sums[slots[half]];
    better[half] = __ballot_sync(kWholeWarp, in_list && old[half] > entry);
    replaceable[half] = __ballot_sync(kWholeWarp, in_list && entry_block(old[half]) >= init_blocks);
  }
  const int at = __popc(better[0]) + __popc(better[1]);
  const int leaves = last_bit(replaceable[0], replaceable[1]);

  uint64_t above[2];
  float above_sum[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    above[half] = __shfl_up_sync(kWholeWarp, old[half], 1);
    above_sum[half] = __shfl_up_sync(kWholeWarp, old_sum[half], 1);
  }
  const uint64_t slot31 = __shfl_sync(kWholeWarp, old[0], 31);
  const float slot31_sum = __shfl_sync(kWholeWarp, old_sum[0], 31);
  if (lane == 0) {
    above[1] = slot31;
    above_sum[1] = slot31_sum;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int slot = slots[half];
    if (slot == at) {
      old[half] = entry;
      old_sum[half] = sum;
    } else if (slot > at && slot <= leaves) {
      old[half] = above[half];
      old_sum[half] = above_sum[half];
    }
    if (slot >= at && slot <= leaves) {
      list[slot] = old[half];
      if (sums != nullptr) sums[slot] = old_sum[half];
    }
    replaceable[half] = __ballot_sync(kWholeWarp, slot < capacity && entry_block(old[half]) >= init_blocks);
  }
  const int worst = last_bit(replaceable[0], replaceable[1]);
  const uint64_t low = __shfl_sync(kWholeWarp, old[0], worst & 31);
  const uint64_t high = __shfl_sync(kWholeWarp, old[1], worst & 31);
  __syncwarp();  // the list is written before another lane reads it
  return worst < 0 ? ~uint64_t{0} : worst < 32 ? low : high;
}

// ---- Log-sum-exp as (maximum, sum of exp(z - maximum))
// ---------------------------------------------------------------

// exp(z - max); 1 for z == max, so that infinite maxima give infinite results and no NaN. NaN stays NaN.
__device__ inline float shifted_exp(float z, float max) { return z == max ? 1.0f : expf(z - max); }

// In double: scale and score may each be outside float32 where their product is not.
__device__ inline float scaled(double scale, float score) {
  return static_cast<float>(scale * static_cast<double>(score));
}

__device__ inline void merge_sum(float* max, float* sum, float other_max, float other_sum) {
  const float both = fmaxf(*max, other_max);
  *sum = *sum * shifted_exp(*max, both) + other_sum * shifted_exp(other_max, both);
  *max = both;
}

// ---- Stages of the kernel
// --------------------------------------------------------------------------------------------

// Widens kRows rows of kHeadDim elements to shared memory; row(r) is null for a row that is to be zero.
template <typename Element, int kHeadDim, int kRows, int kRowFloats, typename RowPointer>
__device__ inline void stage_rows(float (&to)[kRows][kRowFloats], const RowPointer& row) {
  constexpr int kChunk = kVector<Element>;
  constexpr int kChunks = kHeadDim / kChunk;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kSelectThreads) {
    const int r = i / kChunks;
    const int column = i % kChunks * kChunk;
    const Element* from = row(r);
    float values[kChunk] = {};
    if (from != nullptr) load_widened(from + column, values);
#pragma unroll
    for (int c = 0; c < kChunk; c += 4) {
      *reinterpret_cast<float4*>(&to[r][column + c]) =
          make_float4(values[c], values[c + 1], values[c + 2], values[c + 3]);
    }
  }
}

// The first sequence from `number` on with rows in [begin, end), or args.batch. The whole thread block calls it. It
// reads every sequence on the way: offsets need not ascend, so a binary search could miss one.
__device__ inline int64_t find_sequence(const SelectArguments& args, int64_t number, int64_t begin, int64_t end,
                                        int64_t* shared_result) {
  for (; number < args.batch; number += kSelectThreads) {
    if (threadIdx.x == 0) *shared_result = args.batch;
    __syncthreads();
    const int64_t mine = number + threadIdx.x;
    if (mine < args.batch) {
      int64_t q_begin, q_end;
      query_range(args, mine, &q_begin, &q_end);
      if (q_begin < q_end && q_begin < end && q_end > begin) {
        atomicMin(reinterpret_cast<unsigned long long*>(shared_result), static_cast<unsigned long long>(mine));
      }
    }
    __syncthreads();
    const int64_t found = *shared_result;
    __syncthreads();  // read by all before the next round resets it
    if (found < args.batch) return found;
  }
  return args.batch;
}

// Slots of one row before its keys come.
template <int kBlock, typename Keys>
__device__ inline SelectRow start_row(const SelectArguments& args, const Keys& keys, int64_t visible) {
  SelectRow row{};
  row.visible = visible;
  row.local_max = -INFINITY;
  const int32_t own = visible > 0 ? static_cast<int32_t>((visible - 1) / kBlock) : -1;
  row.local_first = own >= args.local_blocks ? own - args.local_blocks + 1 : 0;
  row.local_kept = own + 1;
  row.capacity = args.topk;
  // The nearest local blocks take slots first.
  for (int32_t block = own; block >= row.local_first && row.capacity > 0; --block) {
    if (!keys.has_block(block)) continue;
    row.local_kept = block;
    --row.capacity;
  }
  row.threshold = row.capacity > 0 ? 0 : ~uint64_t{0};
  return row;
}

__device__ inline void write_index(const SelectArguments& args, int64_t offset, int64_t block) {
  if (args.indices_are_int64) {
    static_cast<int64_t*>(args.indices)[offset] = block;
  } else {
    static_cast<int32_t*>(args.indices)[offset] = static_cast<int32_t>(block);
  }
}

// A row that sees no key. One warp.
__device__ inline void write_empty_row(const SelectArguments& args, int head, int64_t token, int lane) {
  const int64_t base = head * args.indices_stride_head + token * args.indices_stride_token;
  for (int slot = lane; slot < args.topk; slot += 32) write_index(args, base + slot * args.indices_stride_slot, -1);
  if (args.index_lse != nullptr && lane == 0) {
    args.index_lse[head * args.lse_stride_head + token * args.lse_stride_token] = -INFINITY;
  }
}

// A finished row: its list, its kept local blocks ascending, -1. One warp.
template <int kBlock, typename Keys>
__device__ inline void write_row(const SelectArguments& args, const Keys& keys, const SelectRow& row,
                                 const uint64_t* list, const float* sums, int head, int64_t token, int lane) {
  const int64_t base = head * args.indices_stride_head + token * args.indices_stride_token;
  int used = 0;
  float max = -INFINITY, sum = 0.0f;
  if (lane == 0) {
    max = row.local_max;
    sum = row.local_sum;
  }
  for (int first = 0; first < row.capacity; first += 32) {
    const int slot = first + lane;
    const uint64_t entry = slot < row.capacity ? list[slot] : 0;
    used += __popc(__ballot_sync(kWholeWarp, entry != 0));
    if (entry == 0) continue;
    write_index(args, base + slot * args.indices_stride_slot, entry_block(entry));
    if (sums != nullptr) merge_sum(&max, &sum, scaled(args.scale, entry_score(entry)), sums[slot]);
  }
  const int64_t own = row.visible > 0 ? (row.visible - 1) / kBlock : -1;
  for (int64_t first = row.local_kept; first <= own; first += 32) {
    const int64_t block = first + lane;
    const bool kept = block <= own && keys.has_block(block);
    const unsigned all = __ballot_sync(kWholeWarp, kept);
    const int slot = used + __popc(all & ((1u << lane) - 1));
    if (kept) write_index(args, base + slot * args.indices_stride_slot, block);
    used += __popc(all);
  }
  for (int slot = used + lane; slot < args.topk; slot += 32) {
    write_index(args, base + slot * args.indices_stride_slot, -1);
  }
  if (sums == nullptr) return;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other_max = __shfl_down_sync(kWholeWarp, max, step);
    const float other_sum = __shfl_down_sync(kWholeWarp, sum, step);
    merge_sum(&max, &sum, other_max, other_sum);
  }
  if (lane == 0) args.index_lse[head * args.lse_stride_head + token * args.lse_stride_token] = max + logf(sum);
}

// Scores of a thread's rows against its keys of the staged block.
template <int kHeadDim, int kBlock>
__device__ inline void score_block(const SelectShared<kHeadDim, kBlock>& shared, int first_row, int first_key,
                                   float (&scores)[kRowsPerThread][kBlock / kKeyLanes]) {
  constexpr int kKeys = kBlock / kKeyLanes;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < kKeys; ++j) scores[i][j] = 0.0f;
  }
#pragma unroll 2
  for (int d = 0; d < kHeadDim; d += 4) {
    float4 query[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      query[i] = *reinterpret_cast<const float4*>(&shared.queries[first_row + i][d]);
    }
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const float4 key = *reinterpret_cast<const float4*>(&shared.keys[first_key + j * kKeyLanes][d]);
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
        float s = scores[i][j];
        s = fmaf(query[i].x, key.x, s);
        s = fmaf(query[i].y, key.y, s);
        s = fmaf(query[i].z, key.z, s);
        scores[i][j] = fmaf(query[i].w, key.w, s);
      }
    }
  }
}

// Offers block `block` to the eight rows of a warp, whose scores its lanes hold.
template <int kBlock>
__device__ inline void offer_block(const SelectArguments& args, SelectRow* rows, uint64_t* lists, float* sums,
                                   int warp_row, int32_t block, int lane,
                                   float (&scores)[kRowsPerThread][kBlock / kKeyLanes]) {
  constexpr int kKeys = kBlock / kKeyLanes;
  const int64_t block_start = static_cast<int64_t>(block) * kBlock;
  const int key_lane = lane % kKeyLanes;
  const int half = lane / kKeyLanes;  // the lane's rows: warp_row + half * kRowsPerThread + i
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int64_t left = rows[warp_row + half * kRowsPerThread + i].visible - block_start;
    float best = -INFINITY;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      if (key_lane + j * kKeyLanes >= left) scores[i][j] = -INFINITY;
      best = fmaxf(best, scores[i][j]);  // drops NaN
    }
#pragma unroll
    for (int step = kKeyLanes / 2; step > 0; step /= 2) best = fmaxf(best, __shfl_xor_sync(kWholeWarp, best, step));

    // Scaled sums of both halves' rows, only where a list or a local window may take the block.
    const auto wants = [&](const SelectRow& row, float score) {
      if (row.visible <= block_start) return false;
      if (block >= row.local_first) return sums != nullptr && block >= row.local_kept;
      return make_entry(score, block) > row.threshold;
    };
    const bool wanted = wants(rows[warp_row + half * kRowsPerThread + i], best);
    if (__ballot_sync(kWholeWarp, wanted) == 0) continue;
    const float max = scaled(args.scale, best);
    float sum = 0.0f;
    if (sums != nullptr) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        if (key_lane + j * kKeyLanes < left) sum += shifted_exp(scaled(args.scale, scores[i][j]), max);
      }
#pragma unroll
      for (int step = kKeyLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, step);
    }
    for (int h = 0; h < 2; ++h) {
      const int source = h * kKeyLanes;
      if (__shfl_sync(kWholeWarp, static_cast<int>(wanted), source) == 0) continue;
      const int r = warp_row + h * kRowsPerThread + i;
      const float row_best = __shfl_sync(kWholeWarp, best, source);
      const float row_sum = __shfl_sync(kWholeWarp, sum, source);
      SelectRow& row = rows[r];
      if (block >= row.local_first) {
        const float row_max = scaled(args.scale, row_best);
        if (lane == 0) merge_sum(&row.local_max, &row.local_sum, row_max, row_sum);
      } else {
        const int64_t list = static_cast<int64_t>(r) * args.topk;
        const uint64_t threshold =
            insert_entry(lists + list, sums != nullptr ? sums + list : nullptr, row.capacity,
                         static_cast<uint32_t>(args.init_blocks), make_entry(row_best, block), row_sum, lane);
        if (lane == 0) row.threshold = threshold;
      }
      __syncwarp();
    }
  }
}

template <typename Keys, int kHeadDim, int kBlock>
__global__ void __launch_bounds__(kSelectThreads, 2) select_kernel(const __grid_constant__ SelectArguments args) {
  using Element = typename Keys::Element;
  using Shared = SelectShared<kHeadDim, kBlock>;
  constexpr int kKeys = kBlock / kKeyLanes;
  static_assert(kHeadDim % kVector<Element> == 0 && kBlock % kKeyLanes == 0);
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  uint64_t* const lists = reinterpret_cast<uint64_t*>(shared_bytes + sizeof(Shared));
  float* const sums = args.index_lse != nullptr ? reinterpret_cast<float*>(lists + kTileRows * args.topk) : nullptr;

  const int head = static_cast<int>(blockIdx.y);
  const int key_head = head / args.index_heads_per_key_head;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp * kRowsPerWarp;

  const int64_t tiles = (args.tokens_q + args.tile_rows - 1) / args.tile_rows;
  for (int64_t step = blockIdx.x; step < tiles; step += gridDim.x) {
    const int64_t tile_begin = (tiles - 1 - step) * args.tile_rows;  // the last rows see most: longest first
    const int64_t tile_end = min(tile_begin + args.tile_rows, args.tokens_q);
    const int tile_rows = static_cast<int>(tile_end - tile_begin);
    const uint64_t all_rows = ~uint64_t{0} >> (64 - tile_rows);

    const Element* const queries = static_cast<const Element*>(args.index_q) + head * args.q_stride_head;
    stage_rows<Element, kHeadDim>(shared.queries, [&](int r) {
      return r < tile_rows ? queries + (tile_begin + r) * args.q_stride_token : nullptr;
    });

    // A tile may hold rows of many sequences. A row that offsets out of order give to several belongs to the first.
    uint64_t covered = 0;
    for (int64_t number = 0; covered != all_rows; ++number) {
      number = find_sequence(args, number, tile_begin, tile_end, &shared.next_sequence);
      if (number >= args.batch) break;
      const Sequence sequence = Keys::sequence(args, number);
      const Keys keys(args, number, sequence, key_head);
      const int first = static_cast<int>(max(sequence.q_begin - tile_begin, int64_t{0}));
      const int last = static_cast<int>(min(sequence.q_end - tile_begin, static_cast<int64_t>(tile_rows))) - 1;
      const uint64_t mine = (~uint64_t{0} >> (63 - last)) & (~uint64_t{0} << first) & ~covered;
      covered |= mine;

      if (threadIdx.x < kTileRows) {
        const int r = static_cast<int>(threadIdx.x);
        const bool in_sequence = ((mine >> r) & 1) != 0;
        shared.rows[r] = start_row<kBlock>(args, keys, in_sequence ? sequence.visible(tile_begin + r) : 0);
      }
      for (int i = static_cast<int>(threadIdx.x); i < kTileRows * args.topk; i += kSelectThreads) lists[i] = 0;
      __syncthreads();

      const int64_t tile_keys = sequence.visible(tile_begin + last);
      int64_t warp_keys = 0;
      for (int r = 0; r < kRowsPerWarp; ++r) warp_keys = max(warp_keys, shared.rows[warp_row + r].visible);

      const int32_t blocks = static_cast<int32_t>((tile_keys + kBlock - 1) / kBlock);
      for (int32_t block = 0; block < blocks; ++block) {
        if (!keys.has_block(block)) continue;
        const int64_t block_start = static_cast<int64_t>(block) * kBlock;
        const Element* const block_keys = keys.block(block);
        // Rows that no query of the tile sees are not read: they may lie outside the tensor, and hold anything.
        stage_rows<Element, kHeadDim>(shared.keys, [&](int r) {
          return block_start + r < tile_keys ? block_keys + r * keys.stride_token : nullptr;
        });
        __syncthreads();
        if (block_start < warp_keys) {
          float scores[kRowsPerThread][kKeys];
          score_block(shared, warp_row + lane / kKeyLanes * kRowsPerThread, lane % kKeyLanes, scores);
          offer_block<kBlock>(args, shared.rows, lists, sums, warp_row, block, lane, scores);
        }
        __syncthreads();  // the staged keys are free
      }

      for (int r = warp_row; r < warp_row + kRowsPerWarp; ++r) {
        if (((mine >> r) & 1) == 0) continue;
        const float* const row_sums = sums != nullptr ? sums + r * args.topk : nullptr;
        write_row<kBlock>(args, keys, shared.rows[r], lists + r * args.topk, row_sums, head, tile_begin + r, lane);
      }
      __syncthreads();  // rows and lists are free
    }

    for (int r = warp_row; r < warp_row + kRowsPerWarp; ++r) {
      if (r < tile_rows && ((covered >> r) & 1) == 0) write_empty_row(args, head, tile_begin + r, lane);
    }
    __syncthreads();  // the staged queries are free
  }
}

}  // namespace openmsa::cuda::sm90
