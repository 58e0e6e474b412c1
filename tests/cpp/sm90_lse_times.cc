// Times of index_lse at M3's shape: --gtest_also_run_disabled_tests --gtest_filter=Sm90Lse*Times
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cpp/sm90_times.h"
#include "cuda/sm90/plan/launch.h"
#include "cuda/sm90/select/lse.h"

namespace openmsa::testing {
namespace {

using cases::gpu_memory;
using cuda::sm90::LseParams;

TEST(Sm90LseTimes, DISABLED_Times) {
  SKIP_WITHOUT_GPU();
  constexpr int64_t kHeads = 4, kDim = 128, kBlock = 128, kTopk = 16;
  for (const int64_t tokens : {int64_t{8} << 10, int64_t{32} << 10, int64_t{128} << 10, int64_t{1} << 20}) {
    LseParams params;
    params.layout.tokens_q = params.layout.tokens_k = tokens;
    params.index_q = make_tensor(random_rows(tokens * kHeads * kDim), OPENMSA_BFLOAT16, {tokens, kHeads, kDim});
    params.index_k = make_tensor(random_rows(tokens * kDim), OPENMSA_BFLOAT16, {tokens, 1, kDim});
    params.block_size = kBlock;
    params.scale = 1 / std::sqrt(static_cast<double>(kDim));
    params.indices =
        make_tensor(gpu_memory().allocate(tokens * kHeads * kTopk * 4), OPENMSA_INT32, {kHeads, tokens, kTopk});
    params.index_lse = make_tensor(gpu_memory().allocate(tokens * kHeads * 4), OPENMSA_FLOAT32, {kHeads, tokens});
    params.index_q.device_index = gpu_memory().device_index();
    params.stream = gpu_memory().stream();
    params.workspace = gpu_memory().allocate(cuda::sm90::selected_lse_workspace(params));
    cuda::sm90::PlanParams plan;
    plan.layout = params.layout;
    plan.indices = params.indices;
    plan.stream = params.stream;
    plan.workspace = params.workspace;

    for (const bool drifting : {false, true}) {
      std::vector<int32_t> chosen(static_cast<size_t>(tokens * kHeads * kTopk));
      std::mt19937_64 random(4);
      for (int64_t row = 0; row < kHeads * tokens; ++row) {
        int32_t* const entries = chosen.data() + row * kTopk;
        const auto own = static_cast<int32_t>(row % tokens / kBlock);
        for (int64_t slot = 0; slot < kTopk; ++slot) {
          const auto visible = static_cast<uint64_t>(own + 1);
          // Drifting: a row differs from the one before in a few entries.
          const uint64_t draw =
              drifting ? static_cast<uint64_t>((row / 16 + slot) / kTopk * 7919 + slot * 104729) : random();
          entries[slot] = slot + 1 < kTopk ? static_cast<int32_t>(draw % visible) : own;
        }
      }
      gpu_memory().upload(params.indices.data, chosen.data(), static_cast<int64_t>(chosen.size() * 4));
      const double total = median_milliseconds([&] { cuda::sm90::launch_selected_lse(params); });
      const double planned = median_milliseconds([&] {
        for (int64_t first = 0; first < tokens; first += cuda::sm90::plan_chunk(params.indices)) {
          plan.first_token = first;
          plan.tokens = std::min(cuda::sm90::plan_chunk(params.indices), tokens - first);
          static_cast<void>(cuda::sm90::launch_plan(plan));
        }
      });
      std::printf("selected %s %7lld: %8.3f ms, plan %7.3f ms of it, %4.0f TFLOP/s of whole blocks\n",
                  drifting ? "drifting" : "random  ", static_cast<long long>(tokens), total, planned,
                  2.0 * kDim * kBlock * kTopk * kHeads * static_cast<double>(tokens) / total / 1e9);
    }
    if (tokens <= int64_t{128} << 10) {
      const double time = median_milliseconds([&] { cuda::sm90::launch_prefix_lse(params); });
      const double pairs = 0.5 * static_cast<double>(tokens) * static_cast<double>(tokens + 1);
      std::printf("prefix            %7lld: %8.3f ms, %4.0f useful TFLOP/s\n", static_cast<long long>(tokens), time,
                  2.0 * kDim * kHeads * pairs / time / 1e9);
    }
    for (void* const pointer :
         {params.index_q.data, params.index_k.data, params.indices.data, params.index_lse.data, params.workspace}) {
      gpu_memory().release(pointer);
    }
  }
}

}  // namespace
}  // namespace openmsa::testing
