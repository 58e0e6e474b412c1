// combine and captured_mass on any threads, and combine on log-sum-exps that are no ordinary numbers.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "api/stages.h"
#include "cpp/cpu_threads.h"
#include "cpp/reference_problem.h"

namespace openmsa::testing {
namespace {

struct Combination {
  static constexpr int64_t kSplits = 3, kTokens = 700, kHeads = 5, kDim = 40;
  std::vector<float> outs = random_values(kSplits * kTokens * kHeads * kDim, 1);
  std::vector<float> lses = random_values(kSplits * kHeads * kTokens, 2, 9.0F);
  std::vector<float> out = std::vector<float>(kTokens * kHeads * kDim, -7.0F);
  std::vector<float> lse = std::vector<float>(kHeads * kTokens, -7.0F);

  float& lse_of(int64_t split, int64_t head, int64_t query) { return lses[(split * kHeads + head) * kTokens + query]; }
  float* out_of(int64_t split, int64_t query, int64_t head) {
    return outs.data() + ((split * kTokens + query) * kHeads + head) * kDim;
  }

  void run(const Backend& backend) {
    CombineParams params;
    params.outs = {outs.data(),
                   {kSplits, kTokens, kHeads, kDim},
                   {kTokens * kHeads * kDim, kHeads * kDim, kDim, 1},
                   4,
                   OPENMSA_FLOAT32,
                   OPENMSA_CPU,
                   0};
    params.lses = {
        lses.data(), {kSplits, kHeads, kTokens}, {kHeads * kTokens, kTokens, 1}, 3, OPENMSA_FLOAT32, OPENMSA_CPU, 0};
    params.out = {out.data(), {kTokens, kHeads, kDim}, {kHeads * kDim, kDim, 1}, 3, OPENMSA_FLOAT32, OPENMSA_CPU, 0};
    params.lse = {lse.data(), {kHeads, kTokens}, {kTokens, 1}, 2, OPENMSA_FLOAT32, OPENMSA_CPU, 0};
    backend.combine(params);
  }
};

TEST(CpuCombine, SameBitsOnAnyThreads) {
  expect_same_bits_on_any_threads([] {
    Combination c;
    c.run(cpu_backend());
    return bits_of(c.out, c.lse);
  });
}

TEST(CpuCombine, UnusualLogSumExpsMeanWhatTheReferenceSays) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  Combination c;
  const float rows[][3] = {{-kInfinity, 1, 2},
                           {-kInfinity, -kInfinity, -kInfinity},
                           {kInfinity, 1, 2},
                           {kNan, 1, 2},
                           {kInfinity, kNan, 2},
                           {80, -80, 3},
                           {3e38F, -3e38F, 0},
                           {1, 2, -kInfinity},
                           {-kInfinity, -kInfinity, kNan}};
  constexpr int64_t kRows = std::size(rows);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t split = 0; split < 3; ++split) c.lse_of(split, row % 5, row) = rows[row][split];
  }
  // A part without mass has no say, whatever it holds.
  for (int64_t d = 0; d < Combination::kDim; ++d) {
    c.out_of(0, 0, 0)[d] = d % 2 == 0 ? kNan : kInfinity;
    c.out_of(1, 1, 1)[d] = kNan;
  }
  Combination expected = c;
  c.run(cpu_backend());
  expected.run(reference_backend());
  const auto compare = [](const char* what, const std::vector<float>& got, const std::vector<float>& want) {
    for (size_t n = 0; n < want.size(); ++n) {
      if (!std::isfinite(want[n])) {
        ASSERT_TRUE(std::isnan(want[n]) ? std::isnan(got[n]) : got[n] == want[n])
            << what << " " << n << ": " << got[n] << ", expected " << want[n];
      } else {
        ASSERT_LE(std::abs(got[n] - want[n]), 2e-6F * std::max(1.0F, std::abs(want[n]))) << what << " " << n;
      }
    }
  };
  compare("lse", c.lse, expected.lse);
  compare("out", c.out, expected.out);
}

struct Masses {
  Problem problem;
  std::vector<float> share, best;

  explicit Masses(const Shape& shape) : problem(shape), share(count()), best(share) {}
  size_t count() const { return static_cast<size_t>(problem.shape.index_heads * problem.shape.tokens_q); }

  void run(const Backend& backend) {
    problem.run_forward();
    const AttendParams attend = problem.attend_params();
    const int64_t heads = problem.shape.index_heads, tokens = problem.shape.tokens_q;
    CapturedMassParams params;
    params.layout = attend.layout;
    params.q = attend.q;
    params.k = attend.k;
    params.indices = *attend.indices;
    params.block_size = attend.block_size;
    params.scale = attend.scale;
    params.share = {share.data(), {heads, tokens}, {tokens, 1}, 2, OPENMSA_FLOAT32, OPENMSA_CPU, 0};
    params.best = {best.data(), {heads, tokens}, {tokens, 1}, 2, OPENMSA_FLOAT32, OPENMSA_CPU, 0};
    backend.captured_mass(params);
  }
};

// Tiles of several sequences, of which one begins in the middle of another's keys.
Shape shape_of_masses() {
  Shape shape;
  shape.tokens_q = 330;
  shape.tokens_k = 420;
  shape.dim = 24;
  shape.cu_seqlens_q = {0, 200, 200, 330};
  shape.cu_seqlens_k = {0, 190, 250, 420};
  return shape;
}

TEST(CpuCapturedMass, SameBitsOnAnyThreads) {
  expect_same_bits_on_any_threads([] {
    Masses masses(shape_of_masses());
    masses.run(cpu_backend());
    return bits_of(masses.share, masses.best);
  });
}

TEST(CpuCapturedMass, AgreesWithTheReference) {
  Masses got(shape_of_masses()), want(shape_of_masses());
  // One head's scores of one key: NaN, and in another sequence +inf or -inf.
  for (Masses* masses : {&got, &want}) {
    masses->problem.k[(100 * 2 + 0) * 24] = std::numeric_limits<float>::quiet_NaN();
    masses->problem.k[(300 * 2 + 1) * 24] = std::numeric_limits<float>::infinity();
    masses->run(masses == &got ? cpu_backend() : reference_backend());
  }
  int64_t numbers = 0, others = 0;
  for (const auto& [a, b] : {std::pair{&got.share, &want.share}, std::pair{&got.best, &want.best}}) {
    for (size_t n = 0; n < b->size(); ++n) {
      if (std::isnan((*b)[n])) {
        EXPECT_TRUE(std::isnan((*a)[n])) << n;
        ++others;
      } else {
        EXPECT_NEAR((*a)[n], (*b)[n], 2e-6) << n;
        ++numbers;
      }
    }
  }
  EXPECT_GT(numbers, 100);
  EXPECT_GT(others, 100);
}

}  // namespace
}  // namespace openmsa::testing
