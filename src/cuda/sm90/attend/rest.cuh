// The rest of a selection, block by block: a block's keys and values stay while the rows that selected it pass by. Each
// row leaves its result over the block, normalised, and its log-sum-exp in a slot of its own; join.cuh adds them up.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/bulk_copy.cuh"
#include "cuda/common/instructions/bulk_tensor.cuh"
#include "cuda/common/instructions/fence_proxy.cuh"
#include "cuda/common/instructions/log2.cuh"
#include "cuda/common/instructions/mbarrier.cuh"
#include "cuda/common/instructions/reciprocal.cuh"
#include "cuda/common/instructions/register_limit.cuh"
#include "cuda/common/instructions/store_matrix.cuh"
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
    for (int group = 0; group < kGroups; ++group) send(kRestEnd);
  }

 private:
  __device__ int slot() const { return static_cast<int>(tiles_ % kRestSlots); }

  __device__ void wait_for_slot() {
    if (tiles_ >= kRestSlots) barrier_wait(&shared_.empty[slot()], (tiles_ / kRestSlots - 1) & 1);
  }

  // A tile of no rows.
  __device__ void send(int32_t tokens) {
    wait_for_slot();
    __syncwarp();  // no lane still waits for a phase that the next ones pass
    if (lane_ == 0) {
      shared_.tiles[slot()].tokens = tokens;
      barrier_arrive(&shared_.full[slot()]);
    }
    ++tiles_;
  }

  __device__ void copy_block(uint32_t place, uint32_t head) {
    // A group uses a tile's values when it has the next tile. After a block of one tile, the other group's last tile of
    // the block before has none yet.
    if (end_before_ > 0 && tiles_ == end_before_ + 1) send(kRestFlush);
    // The groups' last tiles with the block that lies there; they take their tiles in order, and with a tile's queries
    // the values of the tile before their last are used: of the tiles that share a place in `used` one is waited for.
    for (uint32_t back = 1; back <= kGroups && back <= end_before_; ++back) {
      const uint32_t tile = end_before_ - back;
      if (tile + kRestUses >= tiles_) barrier_wait(&shared_.used[tile % kRestUses], tile / kRestUses & 1);
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
    const PlanItem item = unpack_item(bits);
    if (lane_ < kMostRestTokens) {
      tile.partials[lane_] =
          lane_ < tokens ? (item.token * args_.heads + item.head) * args_.topk + item.slot : kNoPartial;
    }
    if (lane_ == 0) {
      tile.tokens = tokens;
      tile.buffer = static_cast<int32_t>(blocks_ % kRestBuffers);
      tile.phase = blocks_ / kRestBuffers & 1;
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive_expect(full, tokens * args_.group * Config::kHeadDim * 2);
    __syncwarp();
    if (lane_ < tokens) {
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
  static constexpr int kBlock = Config::kBlock, kHeadDim = Config::kHeadDim;
  static constexpr int kScores = kBlock / 2, kSums = kHeadDim / 2;

  __device__ RestRows(const RestArguments& args, RestShared<Config>& shared, int group)
      : args_(args),
        shared_(shared),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        group_shift_(args.group == 16 ? 4 : 3),
        results_(shared.results[group].warps[warp_]),
        number_(group - kGroups) {}

  // Scores of a tile while the values of the one before are summed up.
  __device__ void attend_tiles() {
    float scores[kScores], sums[kSums];
    uint32_t weights[kBlock / 16][4];
    float inverse[2];
    take_tile();
    while (tokens_ != kRestEnd) {
      if (tokens_ == kRestFlush) {
        take_tile();
        continue;
      }
      issue_scores(scores);
      wgmma_wait<0>();
      wgmma_pin(scores);
      arrive(&shared_.empty[slot()]);
      weigh(scores, inverse);
      pack(scores, weights);
      for (bool more = true; more;) {
        const Values held = values_;
        take_tile();
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
        more = tokens_ > 0;
        if (!more) {
          issue_values(sums, weights, held);
          wgmma_wait<0>();
          wgmma_pin(sums);
          arrive(held.used);
          write(sums, inverse, held);
          break;
        }
        issue_scores(scores);
        issue_values(sums, weights, held);
        wgmma_wait<1>();
        wgmma_pin(scores);
        arrive(&shared_.empty[slot()]);
        // Under the product of the tile before.
        float next_inverse[2];
        weigh(scores, next_inverse);
        wgmma_wait<0>();
        wgmma_pin(sums);
        arrive(held.used);
        pack(scores, weights);
        write(sums, inverse, held);
        inverse[0] = next_inverse[0];
        inverse[1] = next_inverse[1];
      }
    }
    if (lane_ == 0) store_bulk_wait();
  }

 private:
  // What a tile's second product needs, and the places of the thread's two rows.
  struct Values {
    uint64_t* used;
    int buffer;
    uint32_t partials[2];
  };

  __device__ int slot() const { return static_cast<int>(number_ % kRestSlots); }

  // One arrival of each warp: all of its lanes have read what they need.
  __device__ void arrive(uint64_t* barrier) const {
    __syncwarp();
    if (lane_ == 0) barrier_arrive(barrier);
  }

  // The group's next tile; its queries and its block are there. One of no rows is passed.
  __device__ void take_tile() {
    static_assert(kRestSlots % kGroups == 0);  // a slot belongs to one group, which sees each of its phases
    number_ += kGroups;
    barrier_wait(&shared_.full[slot()], number_ / kRestSlots & 1);
    const RestTile& tile = shared_.tiles[slot()];
    tokens_ = __shfl_sync(~0u, tile.tokens, 0);
    values_.used = &shared_.used[number_ % kRestUses];
    if (tokens_ <= 0) {
      arrive(&shared_.empty[slot()]);
      arrive(values_.used);
      return;
    }
    values_.buffer = tile.buffer;
#pragma unroll
    for (int half = 0; half < 2; ++half) values_.partials[half] = tile.partials[row(half) >> group_shift_];
    barrier_wait(&shared_.block_full[tile.buffer], tile.phase);
  }

  __device__ int row(int half) const { return warp_ * 16 + lane_ / 4 + 8 * half; }

  __device__ void issue_scores(float (&scores)[kScores]) const {
    wgmma_pin(scores);
    wgmma_fence();
    issue_product<Element>(scores, shared_.queries[slot()], 0, shared_.keys[values_.buffer]);
  }

  __device__ void issue_values(float (&sums)[kSums], const uint32_t (&weights)[kBlock / 16][4],
                               const Values& held) const {
    wgmma_pin(sums);
    wgmma_fence();
    issue_transposed_product<Element>(sums, weights, shared_.values[held.buffer]);
  }

  // Scores become weights; their rows' log-sum-exps leave.
  __device__ void weigh(float (&scores)[kScores], float (&inverse)[2]) const {
    // Every member sees the whole block. Rows of no token hold what was there before.
    const RowPart parts[2] = {{true, kBlock}, {true, kBlock}};
    SoftmaxRow rows[2];
    float rescale[2];
    add_scores<true>(scores, parts, true, args_.factor, lane_, rows, rescale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = rows[half].sum;
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      inverse[half] = sum == 0.0f ? 0.0f : reciprocal_approximate(sum);
      const uint32_t partial = values_.partials[half];
      if (lane_ % 4 == 0 && partial != kNoPartial) {
        args_.partial_lses[(static_cast<int64_t>(partial) << group_shift_) + (row(half) & (args_.group - 1))] =
            rows[half].offset + log2_approximate(sum);
      }
    }
  }

  __device__ static void pack(const float (&scores)[kScores], uint32_t (&weights)[kBlock / 16][4]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      weights[i / 4][i % 4] = narrow_pair(Element{}, scores[2 * i], scores[2 * i + 1]);
    }
  }

  // The warp's 16 rows, one token's or two tokens', as they lie in the partials.
  __device__ void write(const float (&sums)[kSums], const float (&inverse)[2], const Values& held) const {
    constexpr int kHalfBytes = 8 * kPanelRowBytes;  // of a panel
    if (lane_ == 0) store_bulk_wait_read();
    __syncwarp();
    const bool one_token = args_.group == 16;
    const int panel_bytes = args_.group * kPanelRowBytes;
    const int lane_half = lane_ / 8 % 2, piece = lane_ / 16 ^ lane_ % 8;
    unsigned char* const to =
        results_ + lane_half * (one_token ? 1 : Config::kPanels) * kHalfBytes + lane_ % 8 * kPanelRowBytes;
#pragma unroll
    for (int i = 0; i < kSums / 8; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        words[word] = narrow_pair(Element{}, sums[8 * i + 2 * word] * inverse[word % 2],
                                  sums[8 * i + 2 * word + 1] * inverse[word % 2]);
      }
      store_matrices(to + i / 4 * panel_bytes + (piece ^ 2 * i % 8) * 16, words);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane_ == 0) {
      const uint32_t bytes = static_cast<uint32_t>(args_.group) * kHeadDim * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (held.partials[half] == kNoPartial || (half == 1 && one_token)) continue;
        store_bulk_streaming(static_cast<char*>(args_.partials) + static_cast<int64_t>(held.partials[half]) * bytes,
                             results_ + half * 8 * kHeadDim * 2, bytes);
      }
      store_bulk_commit();
    }
  }

  const RestArguments& args_;
  RestShared<Config>& shared_;
  const int lane_, warp_, group_shift_;
  unsigned char* const results_;
  uint32_t number_;  // of the latest tile
  int32_t tokens_ = 0;
  Values values_{};
};

template <typename Config>
__global__ void __launch_bounds__(kThreads, 1) rest_kernel(const __grid_constant__ RestArguments args) {
  extern __shared__ unsigned char shared_bytes[];
  RestShared<Config>& shared =
      *reinterpret_cast<RestShared<Config>*>(shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kRestSlots; ++slot) {
      barrier_init(&shared.full[slot], 1);
      barrier_init(&shared.empty[slot], 4);  // one arrival by each of the group's warps
    }
    for (uint64_t& used : shared.used) barrier_init(&used, 4);
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
