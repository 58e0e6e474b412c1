// The backward pass of the cpu backend beyond the case table: against finite differences, on any number of threads,
// with parts of the call left out, and with numbers that are not finite.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "api/stages.h"
#include "cpp/cpu_threads.h"
#include "cpp/reference_problem.h"

namespace openmsa::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

Problem forward_done(const Shape& shape, uint64_t seed = 1) {
  Problem problem(shape, seed);
  problem.run_forward();
  return problem;
}

// Documents of several tiles, more queries than keys, queries without keys, keys without queries; index heads share KV
// heads and index key heads; (query, head) rows of a token do not divide a chunk of rows.
Shape mixed_shape() {
  Shape shape;
  shape.tokens_q = 190;
  shape.tokens_k = 330;
  shape.cu_seqlens_q = {0, 100, 100, 140, 190};
  shape.cu_seqlens_k = {0, 220, 230, 250, 330};
  shape.heads_q = 28;
  shape.heads_kv = 2;
  shape.index_heads = 4;
  shape.index_key_heads = 2;
  shape.dim = 20;
  shape.v_dim = 9;
  shape.index_dim = 35;
  shape.topk = 3;
  return shape;
}

std::vector<const std::vector<float>*> gradients_of(const Problem& p) {
  return {&p.d_q, &p.d_k, &p.d_v, &p.d_index_q, &p.d_index_k};
}

const char* const kNames[] = {"d_q", "d_k", "d_v", "d_index_q", "d_index_k"};

// The same places not finite, the rest within 1e-5 of its norm.
void expect_like_the_reference(const Problem& forward) {
  Problem got = forward, want = forward;
  cpu_backend().backward(got.backward_params());
  reference_backend().backward(want.backward_params());
  for (size_t n = 0; n < std::size(kNames); ++n) {
    std::vector<float> a = *gradients_of(got)[n], b = *gradients_of(want)[n];
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < b.size(); ++i) {
      if (std::isfinite(b[i])) continue;
      ASSERT_TRUE(std::isnan(b[i]) ? std::isnan(a[i]) : a[i] == b[i])
          << kNames[n] << " " << i << ": " << a[i] << ", expected " << b[i];
      a[i] = b[i] = 0;
    }
    EXPECT_LT(relative_error(a, b), 1e-5) << kNames[n];
  }
  if (!std::isfinite(want.backward_kl)) {
    EXPECT_EQ(std::isnan(got.backward_kl), std::isnan(want.backward_kl)) << got.backward_kl;
  } else {
    EXPECT_NEAR(got.backward_kl, want.backward_kl, 1e-5 * std::max(want.backward_kl, 0.05F));
  }
}

std::vector<unsigned char> backward_bits(Problem& p) {
  cpu_backend().backward(p.backward_params());
  return bits_of(p.d_q, p.d_k, p.d_v, p.d_index_q, p.d_index_k, std::vector<float>{p.backward_kl});
}

// Along one direction in all five inputs together: <out, d_out> in q, k, v, and d_kl kl in index_q, index_k.
TEST(CpuBackward, MatchesFiniteDifferences) {
  Problem problem = forward_done({});
  cpu_backend().backward(problem.backward_params());
  const std::vector<double> Inputs::*members[] = {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::index_q,
                                                  &Inputs::index_k};
  for (size_t n = 0; n < std::size(kNames); ++n) {
    const std::vector<float>& gradient = *gradients_of(problem)[n];
    const std::vector<float> direction = random_values(static_cast<int64_t>(gradient.size()), 77 + n);
    const auto loss_at = [&](double distance) {
      Inputs inputs(problem);
      auto& moved = const_cast<std::vector<double>&>(inputs.*members[n]);
      for (size_t i = 0; i < moved.size(); ++i) moved[i] += distance * static_cast<double>(direction[i]);
      const Oracle oracle = oracle_forward(problem, inputs);
      if (n >= 3) return static_cast<double>(problem.d_kl) * oracle.kl;
      double loss = 0;
      for (size_t i = 0; i < oracle.out.size(); ++i) loss += oracle.out[i] * static_cast<double>(problem.d_out[i]);
      return loss;
    };
    double along = 0;
    for (size_t i = 0; i < gradient.size(); ++i) {
      along += static_cast<double>(gradient[i]) * static_cast<double>(direction[i]);
    }
    const double expected = (loss_at(1e-4) - loss_at(-1e-4)) / 2e-4;
    EXPECT_GT(std::abs(expected), 1e-3) << kNames[n] << ": a derivative of zero tests nothing";
    EXPECT_NEAR(along, expected, 2e-5 * std::max(1.0, std::abs(expected))) << kNames[n];
  }
}

TEST(CpuBackward, AgreesWithTheReference) {
  expect_like_the_reference(forward_done(mixed_shape()));
  Shape warmup = mixed_shape();
  warmup.warmup = true;
  expect_like_the_reference(forward_done(warmup));
}

// A token's rows fill chunks of rows in part, as a whole and several times over.
TEST(CpuBackward, TakesGroupsOfAnySize) {
  for (int64_t group : {1, 3, 7, 96, 130}) {
    SCOPED_TRACE(std::to_string(group) + " heads in a group");
    Shape shape;
    shape.tokens_q = 45;
    shape.heads_q = group;
    shape.heads_kv = shape.index_heads = 1;
    expect_like_the_reference(forward_done(shape));
  }
}

// Sequences whose keys overlap, with blocks that begin at different rows.
TEST(CpuBackward, AddsGradientsOfSharedKeys) {
  Shape shape = mixed_shape();
  shape.cu_seqlens_k = {0, 120, 230, 250, 330};
  shape.k_starts = {0, 5, 130, 70};
  expect_like_the_reference(forward_done(shape));
}

TEST(CpuBackward, HasTheSameBitsOnAnyThreads) {
  for (const bool warmup : {false, true}) {
    for (const bool shared : {false, true}) {
      Shape shape = mixed_shape();
      shape.warmup = warmup;
      if (shared) {
        shape.cu_seqlens_k = {0, 120, 230, 250, 330};
        shape.k_starts = {0, 5, 130, 70};
      }
      const Problem problem = forward_done(shape);
      expect_same_bits_on_any_threads([&] {
        Problem again = problem;
        return backward_bits(again);
      });
    }
  }
}

TEST(CpuBackward, OrderAndRepetitionOfIndicesMakeNoDifference) {
  Problem problem = forward_done(mixed_shape());
  const std::vector<unsigned char> expected = backward_bits(problem);
  const int64_t topk = problem.shape.topk, wide = topk + 3;
  std::vector<int32_t> entries;
  for (auto row = problem.indices.begin(); row != problem.indices.end(); row += topk) {
    entries.insert(entries.end(), {1 << 30, *row, -7});
    entries.insert(entries.end(), std::make_reverse_iterator(row + topk), std::make_reverse_iterator(row));
  }
  problem.indices = entries;
  problem.shape.topk = wide;
  EXPECT_TRUE(backward_bits(problem) == expected);
}

TEST(CpuBackward, PartsOfACallAreTheWhole) {
  const Problem problem = forward_done(mixed_shape());
  Problem whole = problem;
  cpu_backend().backward(whole.backward_params());

  Problem main = problem;
  BackwardParams params = main.backward_params();
  params.index = nullptr;
  params.index_lse = params.d_kl = params.d_index_q = params.d_index_k = params.kl = nullptr;
  cpu_backend().backward(params);
  EXPECT_TRUE(bits_of(main.d_q, main.d_k, main.d_v) == bits_of(whole.d_q, whole.d_k, whole.d_v)) << "without KL";
  EXPECT_TRUE(std::isnan(main.d_index_q[0])) << "what was not asked for is not written";

  Problem index = problem;
  params = index.backward_params();
  params.d_out = params.d_q = params.d_k = params.d_v = nullptr;
  cpu_backend().backward(params);
  EXPECT_TRUE(bits_of(index.d_index_q, index.d_index_k) == bits_of(whole.d_index_q, whole.d_index_k))
      << "without d_out";
  EXPECT_EQ(index.backward_kl, whole.backward_kl);

  Problem value = problem;
  params = value.backward_params();
  params.d_kl = params.d_index_q = params.d_index_k = nullptr;
  cpu_backend().backward(params);
  EXPECT_EQ(value.backward_kl, whole.backward_kl) << "kl without its gradient";
}

TEST(CpuBackward, UpstreamOfZeroGivesZeros) {
  Problem problem(mixed_shape());
  problem.d_kl = 0;
  problem.index_k[3] = kNan;
  problem.run_forward();
  cpu_backend().backward(problem.backward_params());
  const auto is_zero = [](float x) { return x == 0; };
  EXPECT_TRUE(std::all_of(problem.d_index_q.begin(), problem.d_index_q.end(), is_zero));
  EXPECT_TRUE(std::all_of(problem.d_index_k.begin(), problem.d_index_k.end(), is_zero));
  EXPECT_TRUE(std::isnan(problem.backward_kl));
}

// What is not finite stays where the reference has it: no product with a weight of 0 spreads it, neither to keys that a
// query does not see nor to those whose probability is 0.
TEST(CpuBackward, NumbersThatAreNotFiniteStayInTheirPlaces) {
  for (const float number : {kNan, kInfinity}) {
    for (std::vector<float> Problem::*input :
         {&Problem::q, &Problem::k, &Problem::v, &Problem::index_q, &Problem::index_k, &Problem::d_out}) {
      for (const double place : {0.01, 0.4, 0.93}) {
        Problem problem(mixed_shape());
        std::vector<float>& values = problem.*input;
        values[static_cast<size_t>(place * static_cast<double>(values.size()))] = number;
        problem.run_forward();
        expect_like_the_reference(problem);
      }
    }
  }
}

TEST(CpuBackward, UpstreamThatIsNotFiniteReachesSelectedRowsAlone) {
  for (const float upstream : {kNan, kInfinity}) {
    Problem problem(mixed_shape());
    problem.d_kl = upstream;
    problem.run_forward();
    cpu_backend().backward(problem.backward_params());
    Problem plain = forward_done(mixed_shape());
    cpu_backend().backward(plain.backward_params());
    for (size_t i = 0; i < plain.d_index_k.size(); ++i) {
      ASSERT_EQ(plain.d_index_k[i] == 0, problem.d_index_k[i] == 0) << i << " with upstream " << upstream;
    }
  }
}

}  // namespace
}  // namespace openmsa::testing
