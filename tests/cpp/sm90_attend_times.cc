// Times of attention at M3's shape, by how the blocks are divided between unions and rest:
// --gtest_also_run_disabled_tests --gtest_filter=Sm90Attend*Times
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cpp/sm90_times.h"
#include "cuda/sm90/attend/config.h"
#include "cuda/sm90/attend/launch.h"
#include "cuda/sm90/plan/tile_launch.h"

namespace openmsa::testing {
namespace {

using cases::gpu_memory;
using cuda::sm90::attend_tuning;

constexpr int64_t kHeads = 64, kIndexHeads = 4, kDim = 128, kBlock = 128, kTopk = 16;

// Each token keeps its neighbour's blocks but `fresh` of them on average; the own block and, nearly always, block 0 are
// among them. 16: nothing is kept.
std::vector<int32_t> drifting_blocks(int64_t tokens, double fresh) {
  std::mt19937_64 random(4);
  const auto chance = [&](double of) { return static_cast<double>(random() % 1000) < of * 1000; };
  std::vector<int32_t> all(static_cast<size_t>(kIndexHeads * tokens * kTopk), -1);
  for (int64_t head = 0; head < kIndexHeads; ++head) {
    std::vector<int32_t> kept;
    for (int64_t token = 0; token < tokens; ++token) {
      const auto own = static_cast<int32_t>(token / kBlock);
      std::erase(kept, own);
      const int drops = static_cast<int>(fresh) + (chance(fresh - std::floor(fresh)) ? 1 : 0);
      for (int i = 0; i < drops && !kept.empty(); ++i) {
        const auto at = kept.begin() + static_cast<int64_t>(random() % kept.size());
        if (*at != 0 || chance(0.01)) kept.erase(at);
      }
      const auto most = static_cast<size_t>(std::min<int64_t>(kTopk - 1, own));
      while (kept.size() < most) {
        const auto block = static_cast<int32_t>(random() % static_cast<uint64_t>(own));
        if (std::find(kept.begin(), kept.end(), block) == kept.end()) kept.push_back(block);
      }
      int32_t* const row = all.data() + (head * tokens + token) * kTopk;
      std::copy(kept.begin(), kept.end(), row);
      row[kept.size()] = own;
    }
  }
  return all;
}

double useful_flop(const std::vector<int32_t>& blocks, int64_t tokens) {
  double pairs = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i] < 0) continue;
    const auto token = static_cast<int64_t>(i / kTopk) % tokens;
    pairs += static_cast<double>(std::min(kBlock, token + 1 - blocks[i] * kBlock));
  }
  return 4.0 * kDim * (kHeads / kIndexHeads) * pairs;
}

TEST(Sm90AttendTimes, DISABLED_Times) {
  SKIP_WITHOUT_GPU();
  const cuda::sm90::AttendTuning usual = attend_tuning();
  for (const int64_t tokens : {int64_t{8} << 10, int64_t{32} << 10, int64_t{128} << 10}) {
    AttendParams params;
    params.layout.tokens_q = params.layout.tokens_k = tokens;
    params.q = make_tensor(random_rows(tokens * kHeads * kDim), OPENMSA_BFLOAT16, {tokens, kHeads, kDim});
    params.k = make_tensor(random_rows(tokens * kIndexHeads * kDim), OPENMSA_BFLOAT16, {tokens, kIndexHeads, kDim});
    params.v = make_tensor(random_rows(tokens * kIndexHeads * kDim), OPENMSA_BFLOAT16, {tokens, kIndexHeads, kDim});
    params.out =
        make_tensor(gpu_memory().allocate(tokens * kHeads * kDim * 2), OPENMSA_BFLOAT16, {tokens, kHeads, kDim});
    Tensor indices = make_tensor(gpu_memory().allocate(kIndexHeads * tokens * kTopk * 4), OPENMSA_INT32,
                                 {kIndexHeads, tokens, kTopk});
    params.q.device_index = gpu_memory().device_index();
    params.indices = &indices;
    params.index_heads = kIndexHeads;
    params.block_size = kBlock;
    params.scale = 1 / std::sqrt(static_cast<double>(kDim));
    params.execution.stream = gpu_memory().stream();
    for (const double fresh : {0.0, 2.03, 16.0}) {
      const std::vector<int32_t> blocks = drifting_blocks(tokens, fresh);
      gpu_memory().upload(indices.data, blocks.data(), static_cast<int64_t>(blocks.size() * 4));
      for (const auto& [least_members, spread] : {std::pair{0, 0}, {3, 0}, {3, 3}}) {
        attend_tuning() = usual;
        attend_tuning().least_members = least_members;
        attend_tuning().least_tokens = 0;
        attend_tuning().least_spread = spread;
        void* const workspace = gpu_memory().allocate(cuda::sm90::attend_workspace(params));
        const double time = median_milliseconds([&] { cuda::sm90::launch_attend(params, workspace); });
        std::printf(
            "%7lld tokens, %5.2f fresh, rest below %d members beyond %d x topk: %8.3f ms, %4.0f useful TFLOP/s\n",
            static_cast<long long>(tokens), fresh, least_members, spread, time,
            useful_flop(blocks, tokens) / time / 1e9);
        gpu_memory().release(workspace);
      }
      cuda::sm90::TilePlanParams plan;
      plan.layout = params.layout;
      plan.indices = indices;
      plan.heads = kIndexHeads;
      plan.stream = params.execution.stream;
      plan.workspace = gpu_memory().allocate(cuda::sm90::tile_plan_workspace(plan));
      const int64_t chunk = std::min(cuda::sm90::tile_plan_chunk(plan), tokens);
      const double time = median_milliseconds([&] {
        for (plan.first_token = 0; plan.first_token < tokens; plan.first_token += chunk) {
          plan.tokens = std::min(chunk, tokens - plan.first_token);
          static_cast<void>(cuda::sm90::launch_tile_plan(plan));
        }
      });
      std::printf("%7lld tokens, %5.2f fresh, plan of the unions: %8.3f ms\n", static_cast<long long>(tokens), fresh,
                  time);
      gpu_memory().release(plan.workspace);
    }
    for (void* const pointer : {params.q.data, params.k.data, params.v.data, params.out.data, indices.data}) {
      gpu_memory().release(pointer);
    }
  }
  attend_tuning() = usual;
}

}  // namespace
}  // namespace openmsa::testing
