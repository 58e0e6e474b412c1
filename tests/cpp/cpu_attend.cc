// Attend of the cpu backend beyond the case table: threads, batches, tiles and scores that are no ordinary numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "api/stages.h"
#include "cpp/cpu_threads.h"
#include "cpp/reference_problem.h"
#include "cpu/decode/attend.h"

namespace openmsa::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<unsigned char> attend_bits(Problem& problem) {
  cpu_backend().attend(problem.attend_params());
  return bits_of(problem.out, problem.lse, problem.index_lse, std::vector<float>{problem.kl});
}

Problem selected(const Shape& shape) {
  Problem problem(shape);
  if (!shape.warmup) reference_backend().select(problem.select_params());
  return problem;
}

// Numbers within `tolerance` of the largest, NaN and infinities in the same places.
void expect_close(const char* what, const std::vector<float>& got, const std::vector<float>& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  double largest = 1e-30;
  for (float x : want) largest = std::isfinite(x) ? std::max<double>(largest, std::abs(x)) : largest;
  for (size_t n = 0; n < want.size(); ++n) {
    if (!std::isfinite(want[n])) {
      ASSERT_TRUE(std::isnan(want[n]) ? std::isnan(got[n]) : got[n] == want[n])
          << what << " " << n << ": " << got[n] << ", expected " << want[n];
    } else {
      ASSERT_LE(std::abs(static_cast<double>(got[n]) - want[n]), tolerance * largest)
          << what << " " << n << ": " << got[n] << ", expected " << want[n];
    }
  }
}

// Returns what the reference says.
Problem expect_like_the_reference(const Problem& problem) {
  Problem got = problem, want = problem;
  cpu_backend().attend(got.attend_params());
  reference_backend().attend(want.attend_params());
  expect_close("out", got.out, want.out, 5e-5);
  expect_close("lse", got.lse, want.lse, 5e-5);
  expect_close("index_lse", got.index_lse, want.index_lse, 5e-5);
  if (std::isnan(want.kl)) {
    EXPECT_TRUE(std::isnan(got.kl)) << got.kl;
  } else {
    EXPECT_LE(std::abs(got.kl - want.kl), 2e-4 * std::max(want.kl, 0.05F));
  }
  return want;
}

int64_t count_of(const std::vector<float>& values, float wanted) {
  return std::count_if(values.begin(), values.end(),
                       [&](float x) { return std::isnan(wanted) ? std::isnan(x) : x == wanted; });
}

// Sequences that are cut into tiles, of few queries over many keys, without queries, and with more queries than keys.
Shape mixed_shape() {
  Shape shape;
  shape.tokens_q = 1160;
  shape.tokens_k = 1900;
  shape.topk = 7;
  shape.dim = 20;
  shape.v_dim = 40;
  shape.index_dim = 12;
  shape.cu_seqlens_q = {0, 700, 700, 703, 719, 736, 1160};
  shape.cu_seqlens_k = {0, 700, 720, 1100, 1150, 1500, 1900};
  return shape;
}

TEST(CpuAttend, SameBitsOnAnyThreads) {
  for (bool warmup : {false, true}) {
    Shape shape = mixed_shape();
    shape.warmup = warmup;
    const Problem problem = selected(shape);
    expect_same_bits_on_any_threads([&] {
      Problem fresh = problem;
      return attend_bits(fresh);
    });
  }
}

TEST(CpuAttend, AgreesWithTheReference) {
  for (bool warmup : {false, true}) {
    Shape shape = mixed_shape();
    shape.warmup = warmup;
    expect_like_the_reference(selected(shape));
  }
}

// A sequence alone, and among others, cut into tiles of another length: the same bits.
TEST(CpuAttend, ASequenceDoesNotDependOnTheOthers) {
  Shape shape = mixed_shape();
  shape.tokens_q = shape.cu_seqlens_q.back() = 3000;  // together they are cut into longer tiles
  shape.tokens_k = shape.cu_seqlens_k.back() = 4000;
  shape.topk = 3;
  Problem all = selected(shape);
  attend_bits(all);
  const auto same_rows = [](const std::vector<float>& part, const std::vector<float>& whole, int64_t first,
                            int64_t width, const char* what) {
    for (size_t n = 0; n < part.size(); ++n) {
      ASSERT_EQ(part[n], whole[static_cast<size_t>(first * width) + n]) << what << " " << n;
    }
  };
  for (size_t b = 0; b + 1 < shape.cu_seqlens_q.size(); ++b) {
    const int64_t first = shape.cu_seqlens_q[b], end = shape.cu_seqlens_q[b + 1];
    Problem alone = all;
    alone.shape.cu_seqlens_q = {0, static_cast<int32_t>(end - first)};
    alone.shape.cu_seqlens_k = {shape.cu_seqlens_k[b], shape.cu_seqlens_k[b + 1]};
    alone.shape.tokens_q = end - first;
    const auto cut = [&](std::vector<float>& rows, int64_t width) {
      rows = std::vector<float>(rows.begin() + first * width, rows.begin() + end * width);
    };
    cut(alone.q, shape.heads_q * shape.dim);
    cut(alone.index_q, shape.index_heads * shape.index_dim);
    cut(alone.out, shape.heads_q * shape.v_dim);
    std::vector<int32_t> indices;
    for (int64_t r = 0; r < shape.index_heads; ++r) {
      const auto row = all.indices.begin() + (r * shape.tokens_q + first) * shape.topk;
      indices.insert(indices.end(), row, row + (end - first) * shape.topk);
    }
    alone.indices = indices;
    alone.lse.assign(static_cast<size_t>(shape.heads_q * (end - first)), 0.0F);
    alone.index_lse.assign(static_cast<size_t>(shape.index_heads * (end - first)), 0.0F);
    attend_bits(alone);
    same_rows(alone.out, all.out, first, shape.heads_q * shape.v_dim, "out");
    for (int64_t h = 0; h < shape.heads_q; ++h) {
      for (int64_t i = first; i < end; ++i) {
        ASSERT_EQ(alone.lse[static_cast<size_t>(h * (end - first) + i - first)],
                  all.lse[static_cast<size_t>(h * shape.tokens_q + i)]);
      }
    }
  }
}

// Groups that do and do not fill tiles of the products, one that exceeds a chunk; dimensions next to those of panels.
TEST(CpuAttend, AnyGroupAndAnyDimensions) {
  struct Sizes {
    int64_t group, dim, v_dim, index_dim, block_size, tokens;
  };
  for (const Sizes& s : {Sizes{1, 1, 1, 1, 32, 140}, Sizes{3, 7, 17, 5, 64, 300}, Sizes{5, 33, 15, 31, 32, 9},
                         Sizes{16, 128, 128, 128, 128, 200}, Sizes{97, 16, 33, 8, 32, 40},
                         Sizes{2, 256, 256, 256, 128, 100}, Sizes{40, 8, 256, 8, 64, 16}}) {
    SCOPED_TRACE(::testing::Message() << "group " << s.group << ", dims " << s.dim << " " << s.v_dim);
    Shape shape;
    shape.heads_q = 2 * s.group;
    shape.dim = s.dim;
    shape.v_dim = s.v_dim;
    shape.index_dim = s.index_dim;
    shape.block_size = s.block_size;
    shape.tokens_q = s.tokens;
    shape.tokens_k = s.tokens + 41;
    shape.topk = 3;
    expect_like_the_reference(selected(shape));
    shape.warmup = true;
    expect_like_the_reference(selected(shape));
  }
}

// For few queries, whose blocks are merged in parts, and for many.
class CpuAttendValues : public ::testing::TestWithParam<int64_t> {
 protected:
  static Shape shape() {
    Shape shape;
    shape.tokens_q = GetParam();
    shape.tokens_k = 400;
    shape.topk = 9;
    return shape;
  }
  static float* key(Problem& problem, int64_t token, int64_t head) {
    return problem.k.data() + (token * problem.shape.heads_kv + head) * problem.shape.dim;
  }
};

TEST_P(CpuAttendValues, NanAndInfiniteScores) {
  Problem problem = selected(shape());
  // The products with a query are +inf or -inf by its first number's sign, in one block and in another one; NaN in a
  // third.
  key(problem, 5, 0)[0] = kInfinity;
  key(problem, 390, 0)[0] = kInfinity;
  key(problem, 200, 1)[3] = kNan;
  key(problem, 385, 1)[0] = -kInfinity;
  const Problem expected = expect_like_the_reference(problem);
  EXPECT_GT(count_of(expected.lse, kInfinity), 0);
  EXPECT_GT(count_of(expected.lse, kNan), 0);
  problem.index_k[330 * problem.shape.index_dim] = kInfinity;
  problem.index_k[100 * problem.shape.index_dim] = kNan;
  expect_like_the_reference(problem);
}

TEST_P(CpuAttendValues, RowsWithoutMass) {
  Problem problem = selected(shape());
  // Every score of head 0's group is -inf for queries whose first number is positive.
  for (int64_t token = 0; token < problem.shape.tokens_k; ++token) key(problem, token, 0)[0] = -kInfinity;
  for (size_t n = 0; n < problem.q.size(); n += static_cast<size_t>(problem.shape.dim)) problem.q[n] = 0.5F;
  for (size_t n = 0; n < problem.index_k.size(); n += static_cast<size_t>(problem.shape.index_dim)) {
    problem.index_k[n] = -kInfinity;
  }
  for (size_t n = 0; n < problem.index_q.size(); n += static_cast<size_t>(problem.shape.index_dim)) {
    problem.index_q[n] = 0.5F;
  }
  const Problem expected = expect_like_the_reference(problem);
  EXPECT_GT(count_of(expected.lse, -kInfinity), 0);
  EXPECT_GT(count_of(expected.index_lse, -kInfinity), 0);
}

// What a query does not see of its own block has no say, whatever it holds, though later queries see it.
TEST_P(CpuAttendValues, LaterKeysDoNotReachEarlierQueries) {
  Problem problem = selected(shape());
  Problem clean = problem;
  attend_bits(clean);
  const int64_t last = problem.shape.tokens_k - 1;
  for (int64_t n = 0; n < problem.shape.heads_kv * problem.shape.dim; ++n) {
    problem.k[static_cast<size_t>(last * problem.shape.heads_kv * problem.shape.dim + n)] = kNan;
  }
  for (int64_t n = 0; n < problem.shape.heads_kv * problem.shape.v_dim; ++n) {
    problem.v[static_cast<size_t>(last * problem.shape.heads_kv * problem.shape.v_dim + n)] = kInfinity;
  }
  expect_like_the_reference(problem);
  attend_bits(problem);
  const auto earlier = static_cast<size_t>((problem.shape.tokens_q - 1) * problem.shape.heads_q * problem.shape.v_dim);
  for (size_t n = 0; n < earlier; ++n) ASSERT_EQ(problem.out[n], clean.out[n]) << n;
}

INSTANTIATE_TEST_SUITE_P(FewAndMany, CpuAttendValues, ::testing::Values(cpu::kFewQueries, 400));

}  // namespace
}  // namespace openmsa::testing
