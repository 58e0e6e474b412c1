// The warpgroups that multiply: 64 rows of a tile each, against the blocks that one of their tokens selected.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/fence_proxy.cuh"
#include "cuda/common/instructions/log2.cuh"
#include "cuda/common/instructions/named_barrier.cuh"
#include "cuda/common/instructions/reciprocal.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attend/shared.cuh"
#include "cuda/sm90/attend/softmax.cuh"

namespace openmsa::cuda::sm90::attend {

template <typename Config>
class Rows {
 public:
  using Element = typename Config::Element;
  static constexpr int kBlock = Config::kBlock;
  static constexpr int kScores = kBlock / 2, kSums = Config::kHeadDim / 2;

  __device__ Rows(const Arguments& args, Shared<Config>& shared, int group)
      : args_(args),
        shared_(shared),
        group_(group),
        lane_(static_cast<int>(threadIdx.x) % 32),
        row_(group * kGroupRows + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane_ / 4),
        places_{row_ / args.group, (row_ + 8) / args.group} {}

  __device__ void attend_tiles() {
    for (uint32_t phase = 0;; phase ^= 1) {
      barrier_wait(&shared_.tile_full, phase);
      tile_ = shared_.tile;
      left_ = __shfl_sync(~0u, tile_.blocks, 0);
      if (left_ == kNoMoreTiles) return;
      float sums[kSums] = {};
      rows_[0] = rows_[1] = SoftmaxRow{};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reaches_[half] = shared_.reaches[places_[half]];
      }
      attend_tile(sums);
      write(sums);
    }
  }

 private:
  // Of the thread's row `half`.
  __device__ int32_t token(int half) const { return tile_.first + places_[half]; }

  // One arrival of each warp: all of its lanes have read what they need.
  __device__ void arrive(uint64_t* barrier) const {
    __syncwarp();
    if (lane_ == 0) barrier_arrive(barrier);
  }

  // What the latest stage that find_block looked at holds.
  __device__ bool is_active() const { return (info_ >> (kTileActiveBit + group_) & 1) != 0; }
  __device__ bool is_last() const { return (info_ >> (kTileLastBit + group_) & 1) != 0; }

  __device__ void look() {
    at_.wait_full(shared_.keys_full);
    info_ = __shfl_sync(~0u, shared_.steps[at_.slot].info, 0);
  }

  // Releases the stage; its barriers have seen each phase.
  __device__ void skip() {
    at_.wait_full(shared_.values_full);
    arrive(&shared_.keys_empty[at_.slot]);
    arrive(&shared_.values_empty[at_.slot]);
    advance();
  }
  __device__ void advance() {
    at_.advance();
    --left_;
  }

  // The tile's first block that this group takes part in; false when it has none.
  __device__ bool find_first_block() {
    for (; left_ > 0; skip()) {
      look();
      if (is_active()) return true;
    }
    return false;
  }

  // The next one; there is one. Values of the block before are not used up yet: beyond the stages between the two, a
  // block is taken that has no member here.
  __device__ void find_next_block() {
    for (int skipped = 0;; ++skipped) {
      look();
      if (is_active() || skipped == Config::kStages - 1) return;
      skip();
    }
  }

  // scores = queries x keys of the stage.
  __device__ void issue_scores(float (&scores)[kScores]) const {
    wgmma_pin(scores);
    wgmma_fence();
    issue_product<Element>(scores, shared_.queries, group_ * kGroupRows, shared_.keys[at_.slot]);
  }

  __device__ void issue_values(float (&sums)[kSums], const uint32_t (&weights)[kBlock / 16][4], int slot) const {
    wgmma_pin(sums);
    wgmma_fence();
    issue_transposed_product<Element>(sums, weights, shared_.values[slot]);
  }

  // Each key of the block at hand is seen by a token of the tile that selected it.
  __device__ bool is_whole() const { return (info_ & kTileKeysMask) >= kBlock; }

  // What the softmax needs of the stage.
  __device__ void read_parts(RowPart (&parts)[2]) const {
    const Step& step = shared_.steps[at_.slot];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t number = places_[half];
      parts[half].member = (step.members[number / 32] >> (number % 32) & 1) != 0;
      parts[half].limit = reaches_[half] - step.base;
    }
  }

  // The scores are there: the stage's keys and the last queries may go.
  __device__ void release_keys() const {
    arrive(&shared_.keys_empty[at_.slot]);
    if (__builtin_expect(is_last(), false)) arrive(&shared_.tile_empty);
  }

  // Rows of values that no token of the tile sees may hold anything, and 0 x NaN is NaN: they become zeros. The other
  // group writes the same zeros.
  __device__ void prepare_values(const RingPosition<Config::kStages>& held, uint32_t keys) {
    held.wait_full(shared_.values_full);
    if (__builtin_expect(keys >= kBlock, true)) return;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    constexpr int kPieces = kPanelRowBytes / 16;
#pragma unroll
    for (int panel = 0; panel < Config::kPanels; ++panel) {
      for (int row = static_cast<int>(keys) + thread / kPieces; row < kBlock; row += 128 / kPieces) {
        *reinterpret_cast<uint4*>(&shared_.values[held.slot].panels[panel][row][thread % kPieces * 16]) = uint4{};
      }
    }
    fence_proxy_async();
    named_barrier_sync(kFirstGroupBarrier + group_, 128);
  }

  __device__ static void pack(const float (&scores)[kScores], uint32_t (&weights)[kBlock / 16][4]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      weights[i / 4][i % 4] = narrow_pair(Element{}, scores[2 * i], scores[2 * i + 1]);
    }
  }

  __device__ void attend_tile(float (&sums)[kSums]) {
    if (!find_first_block()) {
      arrive(&shared_.tile_empty);
      return;
    }
    float scores[kScores];
    uint32_t weights[kBlock / 16][4];
    RowPart parts[2];
    float rescale[2];
    issue_scores(scores);
    read_parts(parts);
    wgmma_wait<0>();
    wgmma_pin(scores);
    release_keys();
    add_scores<false>(scores, parts, is_whole(), args_.factor, lane_, rows_, rescale);
    pack(scores, weights);
    for (;;) {
      const RingPosition<Config::kStages> held = at_;
      const uint32_t keys = info_ & kTileKeysMask;
      const bool last = is_last();
      advance();
      if (last) {
        prepare_values(held, keys);
        issue_values(sums, weights, held.slot);
        wgmma_wait<0>();
        wgmma_pin(sums);
        arrive(&shared_.values_empty[held.slot]);
        break;
      }
      find_next_block();
      prepare_values(held, keys);
      issue_scores(scores);
      issue_values(sums, weights, held.slot);
      read_parts(parts);
      wgmma_wait<1>();
      wgmma_pin(scores);
      release_keys();
      // Under the product of the block before.
      add_scores<false>(scores, parts, is_whole(), args_.factor, lane_, rows_, rescale);
      wgmma_hold(rows_[0].sum + rows_[1].sum);
      wgmma_wait<0>();
      wgmma_pin(sums);
      arrive(&shared_.values_empty[held.slot]);
      pack(scores, weights);
      if (__builtin_expect(__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f), false)) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] *= rescale[i / 2 % 2];
      }
    }
    while (left_ > 0) {
      look();
      skip();
    }
  }

  __device__ void write(const float (&sums)[kSums]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = rows_[half].sum;
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      // Rows that see nothing, or no score above -inf, have no weights.
      float inverse = sum == 0.0f ? 0.0f : reciprocal_approximate(sum);
      if (sum != 0.0f && fabsf(rows_[half].offset) > kHugeOffset) inverse = NAN;  // to be formed in float64
      float probes[4] = {};                                                       // NaN where a number is not finite
      const int64_t head = (args_.first_head + tile_.head) * args_.group + ((row_ + 8 * half) & (args_.group - 1));
      auto* const out = static_cast<Element*>(args_.out) + token(half) * args_.out_stride_token +
                        head * args_.out_stride_head + 8 * (lane_ % 4);
      const bool exists = token(half) < args_.tokens;
#pragma unroll
      for (int i = 0; i < kSums / 16; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float even = sums[16 * i + 4 * j + 2 * half], odd = sums[16 * i + 4 * j + 2 * half + 1];
          words[j] = narrow_pair(Element{}, even * inverse, odd * inverse);
          probes[j] = fmaf(even, 0.0f, fmaf(odd, 0.0f, probes[j]));
        }
        const uint4 piece = gather_words(words, lane_);
        if (exists) *reinterpret_cast<uint4*>(out + 32 * i) = piece;
      }
      if (!exists) continue;
      // A row whose scores are not finite is not to be anything else.
      if (probes[0] + probes[1] + probes[2] + probes[3] + 0.0f * inverse != 0.0f && fabsf(sum) < INFINITY) {
        args_.suspects[tile_.number] = 1;
        args_.header->has_suspect = 1;
      }
      if (args_.lse != nullptr && lane_ % 4 == 0) {
        constexpr float kLogOfTwo = 0.693147180559945309f;
        args_.lse[head * args_.lse_stride_head + token(half) * args_.lse_stride_token] =
            (rows_[half].offset + log2_approximate(sum)) * kLogOfTwo;
      }
    }
  }

  const Arguments& args_;
  Shared<Config>& shared_;
  const int group_, lane_, row_;
  const int32_t places_[2];  // of the thread's two rows: tokens of the tile
  TileNumber tile_;
  int32_t left_ = 0;  // stages of the tile not yet passed
  uint32_t info_ = 0;
  int32_t reaches_[2];
  SoftmaxRow rows_[2];
  RingPosition<Config::kStages> at_;
};

}  // namespace openmsa::cuda::sm90::attend
