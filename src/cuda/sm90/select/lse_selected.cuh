// index_lse over selected blocks, block by block: the rows that chose a block meet it as matrix products, each row
// leaves the log of its sum over the block in a slot of its own, and a second kernel merges a row's slots in order. So
// a row's bits depend on its query, its keys and its selection alone.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/fence_proxy.cuh"
#include "cuda/common/instructions/mbarrier.cuh"
#include "cuda/common/instructions/named_barrier.cuh"
#include "cuda/common/instructions/register_limit.cuh"
#include "cuda/sm90/plan/sorted_items.cuh"
#include "cuda/sm90/select/lse_rows.cuh"

namespace openmsa::cuda::sm90::lse {

// Named barriers: one for the producer's threads, one for each consumer.
enum PartialBarrier : int { kSegmentRead = 1, kPartialTurn = 2 };

__device__ inline uint32_t slot_of(const PartialArguments& args, uint32_t bits) {
  const PlanItem item = unpack_item(bits);
  return (item.token * args.heads + item.head) * args.topk + item.slot;
}

// ---- Producer ----

template <typename Element, int kHeadDim, int kBlock>
class PartialProducer {
 public:
  using Shared = PartialShared<kHeadDim, kBlock>;

  __device__ PartialProducer(const PartialArguments& args, Shared* shared, int thread)
      : args_(args), shared_(*shared), thread_(thread), piece_(staged_piece<Element, kHeadDim>(thread)) {}

  __device__ void produce(Part part) {
    for (uint32_t begin = part.begin; begin < part.end; begin += kPartialSegment) {
      const int count = static_cast<int>(min(part.end - begin, static_cast<uint32_t>(kPartialSegment)));
      read_segment(begin, count);
      for (int at = 0; at < count;) {
        const uint32_t place = shared_.places[at];
        if (place != place_) stage_keys(place);
        const int rows = run_length(at, count, place);
        stage_queries(at, rows);
        at += rows;
      }
    }
    for (int consumer = 0; consumer < kPartialConsumers; ++consumer) {
      wait_for_slot();
      if (thread_ == 0) shared_.tiles[slot()].rows = consumer + 1 < kPartialConsumers ? 0 : -1;
      finish_tile();
    }
    copy_async_wait_all();
  }

 private:
  __device__ int slot() const { return static_cast<int>(tiles_ % kPartialSlots); }

  __device__ void read_segment(uint32_t begin, int count) {
    named_barrier_sync(kSegmentRead, 128);  // the one before is used up
    for (int i = thread_; i < count; i += 128) {
      shared_.places[i] = args_.places[begin + i];
      shared_.items[i] = args_.items[begin + i];
    }
    named_barrier_sync(kSegmentRead, 128);
  }

  // Items from `at` on, up to a tile, that share this place. Each warp finds out for itself.
  __device__ int run_length(int at, int count, uint32_t place) const {
    static_assert(kPartialRows == 64);
    const int low = at + thread_ % 32, high = low + 32;
    const unsigned other_low = __ballot_sync(~0u, low >= count || shared_.places[low] != place);
    const unsigned other_high = __ballot_sync(~0u, high >= count || shared_.places[high] != place);
    return other_low != 0    ? __ffs(static_cast<int>(other_low)) - 1
           : other_high != 0 ? 31 + __ffs(static_cast<int>(other_high))
                             : kPartialRows;
  }

  // Until its consumer is through with a tile.
  __device__ void wait_for_tile(uint32_t tile) {
    barrier_wait(&shared_.empty[tile % kPartialSlots], tile / kPartialSlots & 1);
  }

  __device__ void wait_for_slot() {
    if (tiles_ >= kPartialSlots) wait_for_tile(tiles_ - kPartialSlots);
  }

  // Rows of the block that lie outside the tensor become zeros; those that no row sees may hold anything.
  __device__ void stage_keys(uint32_t place) {
    static_assert(kPartialKeyBuffers == 2);
    key_buffer_ ^= 1;
    // The consumers' last tiles with the block that lies there; they take their tiles in order.
    for (uint32_t back = 1; back <= kPartialConsumers && back <= end_before_; ++back) {
      const uint32_t tile = end_before_ - back;
      if (tile + kPartialSlots >= tiles_) wait_for_tile(tile);
    }
    end_before_ = tiles_;
    const int64_t first = place % args_.places_per_head;
    const int64_t left = args_.rows_end - first;
    const Element* const keys = static_cast<const Element*>(args_.index_k) +
                                place / args_.places_per_head * args_.k_stride_head + first * args_.k_stride_place +
                                piece_ * kVector<Element>;
#pragma unroll 4
    for (int i = 0; i < kStagedRows<Element, 128, kHeadDim, kBlock>; ++i) {
      const int row = staged_row<Element, 128, kHeadDim>(thread_, i);
      const Element* const from = keys + (row < left ? row : 0) * args_.k_stride_token;
      stage_piece(&shared_.keys[key_buffer_], row, piece_, from, row < left);
    }
    place_ = place;
  }

  __device__ void stage_queries(int at, int rows) {
    wait_for_slot();
    PartialTile& tile = shared_.tiles[slot()];
    if (thread_ < kPartialRows) tile.items[thread_] = shared_.items[at + min(thread_, rows - 1)];
    if (thread_ == 0) {
      tile.rows = rows;
      tile.key_buffer = key_buffer_;
    }
    const Element* const queries = static_cast<const Element*>(args_.index_q) + piece_ * kVector<Element>;
#pragma unroll
    for (int i = 0; i < kStagedRows<Element, 128, kHeadDim, kPartialRows>; ++i) {
      const int row = staged_row<Element, 128, kHeadDim>(thread_, i);
      const PlanItem item = unpack_item(shared_.items[at + min(row, rows - 1)]);
      const Element* const from = queries + item.token * args_.q_stride_token + item.head * args_.q_stride_head;
      stage_piece(&shared_.queries[slot()], row, piece_, from, row < rows);
    }
    finish_tile();
  }

  __device__ void finish_tile() {
    arrive_when_staged(&shared_.full[slot()]);
    ++tiles_;
  }

  const PartialArguments& args_;
  Shared& shared_;
  int thread_, piece_;
  uint32_t tiles_ = 0;             // issued
  uint32_t place_ = ~uint32_t{0};  // of the latest block
  int key_buffer_ = 0;             // where it lies
  uint32_t end_before_ = 0;        // one past the last tile of the block before the latest
};

// ---- Consumers ----

// Takes turns at multiplying, so that one's exponentials run under the others' products.
template <typename Element, int kHeadDim, int kBlock>
__device__ inline void consume_tiles(const PartialArguments& args, PartialShared<kHeadDim, kBlock>* shared,
                                     int consumer, int thread) {
  const int lane = thread % 32;
  const int thread_row = thread / 32 * 16 + lane / 4;  // and the row 8 below
  const auto turn_of = [](uint32_t tile) { return kPartialTurn + static_cast<int>(tile % kPartialConsumers); };
  float sums[kBlock / 2] = {};
  for (uint32_t number = consumer;; number += kPartialConsumers) {
    const int slot = static_cast<int>(number % kPartialSlots);
    barrier_wait(&shared->full[slot], number / kPartialSlots & 1);
    const PartialTile& tile = shared->tiles[slot];
    const int rows = tile.rows;
    const uint32_t items[2] = {tile.items[thread_row], tile.items[thread_row + 8]};
    fence_proxy_async();
    if (number > 0) named_barrier_sync(turn_of(number), 256);
    if (rows > 0) {
      wgmma_fence();
      issue_product<typename ProductType<Element>::Type>(sums, shared->queries[slot], 0, shared->keys[tile.key_buffer]);
      wgmma_wait<0>();
    }
    // The last tile of all has no next.
    if (rows >= 0) named_barrier_arrive(turn_of(number + 1), 256);
    if (rows <= 0) return;
    if (lane == 0) barrier_arrive(&shared->empty[slot]);

    if (args.scale.in_double) scale_in_double(sums, args.scale.scale);
    const int limits[2] = {static_cast<int>(unpack_item(items[0]).limit),
                           static_cast<int>(unpack_item(items[1]).limit)};
    if (__any_sync(~0u, min(limits[0], limits[1]) < kBlock)) {
#pragma unroll
      for (int i = 0; i < kBlock / 2; ++i) {
        if (column_of(i, lane) >= limits[i / 2 % 2]) sums[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max = row_max(sums, half);
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
      float sum = row_sum(sums, half, max, args.scale.factor);
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0 && thread_row + 8 * half < rows) {
        args.partials[slot_of(args, items[half])] = offset_of(max, args.scale.factor) + log2f(sum);
      }
    }
  }
}

template <typename Element, int kHeadDim, int kBlock>
__global__ void __launch_bounds__(kPartialThreads, 1) partial_lse(const __grid_constant__ PartialArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<PartialShared<kHeadDim, kBlock>*>(shared_bytes);
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kPartialSlots; ++slot) {
      barrier_init(&shared.full[slot], kStagedArrivals * 128);
      barrier_init(&shared.empty[slot], 4);  // one arrival by each of the consumer's warps
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (warpgroup == kPartialConsumers) {
    lower_register_limit<kPartialProducerRegisters>();
    const uint32_t placed = count_placed(args.places, args.count, args.no_place, thread % 32);
    PartialProducer<Element, kHeadDim, kBlock>(args, &shared, thread).produce(part_of(0, placed));
    const Part rest = part_of(placed, args.count);
    for (uint32_t i = rest.begin + thread; i < rest.end; i += 128) {
      args.partials[slot_of(args, args.items[i])] = -INFINITY;
    }
  } else {
    raise_register_limit<kPartialConsumerRegisters>();
    consume_tiles<Element>(args, &shared, warpgroup, thread);
  }
}

}  // namespace openmsa::cuda::sm90::lse
