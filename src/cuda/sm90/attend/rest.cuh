// The rest of a selection, block by block: a block's keys and values stay while the rows that selected it pass by. Each
// row leaves its result over the block, normalised, and its log-sum-exp in a slot of its own; join.cuh adds them up.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/bulk_copy.cuh"
#include "cuda/common/instructions/bulk_tensor.cuh"
#include "cuda/common/instructions/fence_proxy.cuh"
#include "cuda/common/instructions/mbarrier.cuh"
#include "cuda/common/instructions/named_barrier.cuh"
#include "cuda/common/instructions/register_limit.cuh"
#include "cuda/sm90/attend/rest_shared.cuh"
#include "cuda/sm90/attend/softmax.cuh"
#include "cuda/sm90/plan/sorted_items.cuh"

namespace openmsa::cuda::sm90::attend {

// ---- The copying warp ----

// Sorted items, looked at eight and more at a time, the ones behind them on their way.
class ItemWindow {
 public:
  __device__ ItemWindow(const RestArguments& args, Part part, int lane)
      : args_(args), part_(part), lane_(lane), begin_(part.begin) {
    load(begin_, &places_[0], &items_[0]);
    load(begin_ + 32, &places_[1], &items_[1]);
  }

  // Of item `at` + lane, for ascending `at`; the place of items past the part is ~0.
  __device__ void look(uint32_t at, uint32_t* place, uint32_t* item) {
    if (at >= begin_ + 32) {
      begin_ += 32;
      places_[0] = places_[1];
      items_[0] = items_[1];
      load(begin_ + 32, &places_[1], &items_[1]);
    }
    const int from = static_cast<int>(at - begin_) + lane_;
    const uint32_t places[2] = {__shfl_sync(~0u, places_[0], from % 32), __shfl_sync(~0u, places_[1], from % 32)};
    const uint32_t items[2] = {__shfl_sync(~0u, items_[0], from % 32), __shfl_sync(~0u, items_[1], from % 32)};
    *place = from < 32 ? places[0] : places[1];
    *item = from < 32 ? items[0] : items[1];
  }

 private:
  __device__ void load(uint32_t first, uint32_t* place, uint32_t* item) const {
    const uint32_t at = first + lane_;
    *place = at < part_.end ? args_.places[at] : ~0u;
    *item = at < part_.end ? args_.items[at] : 0;
  }

  const RestArguments& args_;
  const Part part_;
  const int lane_;
  uint32_t begin_;
  uint32_t places_[2], items_[2];
};

template <typename Config>
class RestCopies {
 public:
  __device__ RestCopies(const RestArguments& args, RestShared<Config>& shared, int lane)
      : args_(args), shared_(shared), lane_(lane), tile_tokens_(kGroupRows / args.group) {}

  __device__ void copy(Part part) {
    if (lane_ == 0) {
      prefetch_tensor_map(&args_.queries);
      prefetch_tensor_map(&args_.keys);
      prefetch_tensor_map(&args_.values);
    }
    ItemWindow window(args_, part, lane_);
    uint32_t before = ~0u;
    for (uint32_t at = part.begin; at < part.end;) {
      uint32_t place, item;
      window.look(at, &place, &item);
      const uint32_t first = __shfl_sync(~0u, place, 0);
      // The items of a launch belong to one index head, so those of a place share a block of one KV head.
      const unsigned others = ~__ballot_sync(~0u, lane_ < tile_tokens_ && place == first);
      const int tokens = __ffs(static_cast<int>(others)) - 1;
      if (first != before) copy_block(first, unpack_item(__shfl_sync(~0u, item, 0)).head);
      before = first;
      copy_rows(tokens, item);
      at += static_cast<uint32_t>(tokens);
    }
    for (int group = 0; group < kGroups; ++group) {
      wait_for_slot();
      if (lane_ == 0) {
        shared_.tiles[slot()].tokens = 0;
        barrier_arrive(&shared_.full[slot()]);
      }
      ++tiles_;
    }
  }

 private:
  __device__ int slot() const { return static_cast<int>(tiles_ % kRestSlots); }

  __device__ void wait_for_slot() {
    if (tiles_ >= kRestSlots) barrier_wait(&shared_.empty[slot()], (tiles_ / kRestSlots - 1) & 1);
  }

  __device__ void copy_block(uint32_t place, uint32_t head) {
    // The groups' last tiles with the block that lies there; they take their tiles in order.
    for (uint32_t back = 1; back <= kGroups && back <= end_before_; ++back) {
      const uint32_t tile = end_before_ - back;
      if (tile + kRestSlots >= tiles_) barrier_wait(&shared_.used[tile % kRestSlots], tile / kRestSlots & 1);
    }
    end_before_ = tiles_;
    ++blocks_;
    if (lane_ != 0) return;
    const int buffer = static_cast<int>(blocks_ % kRestBuffers);
    uint64_t* const full = &shared_.block_full[buffer];
    const int32_t kv_head = (args_.first_head + static_cast<int32_t>(head)) * args_.kv_heads / args_.index_heads;
    const int32_t at = static_cast<int32_t>(place);
    barrier_arrive_expect(full, 2 * Config::kBlockBytes);
#pragma unroll
    for (int panel = 0; panel < Config::kPanels; ++panel) {
      const int column = panel * kPanelColumns;
      if (args_.paged) {
        copy_box(shared_.keys[buffer].panels[panel], &args_.keys, full, column, kv_head, 0, at);
        copy_box(shared_.values[buffer].panels[panel], &args_.values, full, column, kv_head, 0, at);
      } else {
        copy_box(shared_.keys[buffer].panels[panel], &args_.keys, full, column, kv_head, at);
        copy_box(shared_.values[buffer].panels[panel], &args_.values, full, column, kv_head, at);
      }
    }
  }

  __device__ void copy_rows(int tokens, uint32_t bits) {
    wait_for_slot();
    RestTile& tile = shared_.tiles[slot()];
    uint64_t* const full = &shared_.full[slot()];
    if (lane_ < tokens) tile.items[lane_] = bits;
    if (lane_ == 0) {
      tile.tokens = tokens;
      tile.buffer = static_cast<int32_t>(blocks_ % kRestBuffers);
      tile.phase = blocks_ / kRestBuffers & 1;
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive_expect(full, tokens * args_.group * Config::kHeadDim * 2);
    __syncwarp();
    if (lane_ < tokens) {
      const PlanItem item = unpack_item(bits);
      const int32_t head = (args_.first_head + static_cast<int32_t>(item.head)) * args_.group;
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel) {
        copy_box(shared_.queries[slot()].panels[panel][lane_ * args_.group], &args_.queries, full,
                 panel * kPanelColumns, head, args_.first_token + static_cast<int32_t>(item.token));
      }
    }
    ++tiles_;
  }

  const RestArguments& args_;
  RestShared<Config>& shared_;
  const int lane_, tile_tokens_;
  uint32_t tiles_ = 0;              // issued
  uint32_t blocks_ = ~uint32_t{0};  // number of the latest
  uint32_t end_before_ = 0;         // one past the last tile of the block before the latest
};

// ---- The warpgroups ----

template <typename Config>
class RestRows {
 public:
  using Element = typename Config::Element;
  static constexpr int kBlock = Config::kBlock;
  static constexpr int kScores = kBlock / 2, kSums = Config::kHeadDim / 2;

  __device__ RestRows(const RestArguments& args, RestShared<Config>& shared, int group)
      : args_(args),
        shared_(shared),
        group_(group),
        lane_(static_cast<int>(threadIdx.x) % 32),
        row_(static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane_ / 4) {}

  __device__ void attend_tiles() {
    for (uint32_t number = group_;; number += kGroups) {
      static_assert(kRestSlots % kGroups == 0);  // a slot belongs to one group, which sees each of its phases
      const int slot = static_cast<int>(number % kRestSlots);
      barrier_wait(&shared_.full[slot], number / kRestSlots & 1);
      const RestTile& tile = shared_.tiles[slot];
      const int tokens = __shfl_sync(~0u, tile.tokens, 0);
      if (tokens == 0) break;
      barrier_wait(&shared_.block_full[tile.buffer], tile.phase);
      attend_tile(slot, tokens, tile.buffer);
    }
    release();
    if (lane_ == 0) store_bulk_wait();
  }

 private:
  // The slot whose results are on their way out.
  __device__ void release() {
    if (leaving_ < 0) return;
    if (lane_ == 0) {
      store_bulk_wait_read();
      barrier_arrive(&shared_.empty[leaving_]);
    }
    leaving_ = -1;
  }

  __device__ void attend_tile(int slot, int tokens, int buffer) {
    float scores[kScores], sums[kSums] = {};
    uint32_t weights[kBlock / 16][4];
    wgmma_pin(scores);
    wgmma_fence();
    issue_product<Element>(scores, shared_.queries[slot], 0, shared_.keys[buffer]);
    release();
    wgmma_wait<0>();
    wgmma_pin(scores);
    // Every member sees the whole block. Rows of no token hold what was there before.
    const RowPart parts[2] = {{true, kBlock}, {true, kBlock}};
    SoftmaxRow rows[2];
    float rescale[2];
    add_scores<true>(scores, parts, args_.factor, lane_, rows, rescale);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      weights[i / 4][i % 4] = narrow_pair(Element{}, scores[2 * i], scores[2 * i + 1]);
    }
    wgmma_pin(sums);
    wgmma_fence();
    issue_transposed_product<Element>(sums, weights, shared_.values[buffer]);
    // The queries' place is read no more.
    named_barrier_sync(kFirstGroupBarrier + group_, 128);
    wgmma_wait<0>();
    wgmma_pin(sums);
    if (lane_ == 0) barrier_arrive(&shared_.used[slot]);
#pragma unroll
    for (int half = 0; half < 2; ++half) write_row(sums, rows[half], half, slot, tokens);
    fence_proxy_async();
    __syncwarp();
    if (lane_ == 0) store_rows(slot, tokens);
    leaving_ = slot;
  }

  __device__ int64_t partial_of(const PlanItem& item) const {
    return (static_cast<int64_t>(item.token) * args_.heads + item.head) * args_.topk + item.slot;
  }

  __device__ void write_row(const float (&sums)[kSums], const SoftmaxRow& softmax, int half, int slot, int tokens) {
    const int row = row_ + 8 * half;
    float sum = softmax.sum;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      unsigned char* const piece = shared_.queries[slot].panels[i / 8][row] + (i % 8 ^ row % 8) * 16;
      reinterpret_cast<uint32_t*>(piece)[lane_ % 4] =
          narrow_pair(Element{}, sums[4 * i + 2 * half] * inverse, sums[4 * i + 2 * half + 1] * inverse);
    }
    const int token = row / args_.group;
    if (lane_ % 4 == 0 && token < tokens) {
      args_.partial_lses[partial_of(unpack_item(shared_.tiles[slot].items[token])) * args_.group + row % args_.group] =
          softmax.offset + log2f(sum);
    }
  }

  // The tokens of this warp's 16 rows.
  __device__ void store_rows(int slot, int tokens) {
    const int first_row = row_ - lane_ / 4;
    const uint32_t bytes = static_cast<uint32_t>(args_.group) * kPanelRowBytes;
    for (int row = first_row; row < first_row + 16; row += args_.group) {
      const int token = row / args_.group;
      if (token >= tokens) break;
      char* const to = static_cast<char*>(args_.partials) +
                       partial_of(unpack_item(shared_.tiles[slot].items[token])) * Config::kPanels * bytes;
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel) {
        store_bulk(to + panel * bytes, shared_.queries[slot].panels[panel][row], bytes);
      }
    }
    store_bulk_commit();
  }

  const RestArguments& args_;
  RestShared<Config>& shared_;
  const int group_, lane_, row_;
  int leaving_ = -1;
};

template <typename Config>
__global__ void __launch_bounds__(kThreads, 1) rest_kernel(const __grid_constant__ RestArguments args) {
  extern __shared__ unsigned char shared_bytes[];
  RestShared<Config>& shared =
      *reinterpret_cast<RestShared<Config>*>(shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kRestSlots; ++slot) {
      barrier_init(&shared.full[slot], 1);
      barrier_init(&shared.used[slot], 4);  // one arrival by each of the group's warps
      barrier_init(&shared.empty[slot], 4);
    }
    for (uint64_t& full : shared.block_full) barrier_init(&full, 1);
    fence_barrier_init();
  }
  __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == kGroups) {
    lower_register_limit<kCopyRegisters>();
    if (threadIdx.x < kGroups * 128 + 32) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const uint32_t placed = count_placed(args.places, args.count, args.no_place, lane);
      RestCopies<Config>(args, shared, lane).copy(part_of(0, placed));
    }
  } else {
    raise_register_limit<kConsumerRegisters>();
    RestRows<Config>(args, shared, group).attend_tiles();
  }
}

}  // namespace openmsa::cuda::sm90::attend
