// Selection of the reference against a ranking written another way, and the edges of section "Selection" of
// docs/definition.md.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "reference/select.h"
#include "reference_problem.h"

namespace openmsa::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<int32_t> row_of(const Problem& problem, int64_t index_head, int64_t query) {
  const Shape& s = problem.shape;
  const auto begin = problem.indices.begin() + (index_head * s.tokens_q + query) * s.topk;
  return {begin, begin + s.topk};
}

// Block by block: how many blocks go before this one. No sorting, no shared code.
std::vector<int32_t> naive_row(const Problem& problem, int64_t index_head, int64_t query) {
  const Shape& s = problem.shape;
  const Inputs inputs(problem);
  const std::vector<int64_t> visible = oracle_visible(problem, query);
  const auto blocks = (static_cast<int64_t>(visible.size()) + s.block_size - 1) / s.block_size;
  const int64_t key_head = index_head / (s.index_heads / s.index_key_heads);
  std::vector<double> scores(static_cast<size_t>(blocks), -INFINITY);
  for (size_t j = 0; j < visible.size(); ++j) {
    const double z = oracle_score(inputs.index_q, query * s.index_heads + index_head, inputs.index_k,
                                  visible[j] * s.index_key_heads + key_head, s.index_dim);
    double& best = scores[j / static_cast<size_t>(s.block_size)];
    if (z > best) best = z;
  }
  const auto is_local = [&](int64_t b) { return b >= blocks - s.local_blocks; };
  const auto is_init = [&](int64_t b) { return b < s.init_blocks; };
  // Smaller goes first: (class, order within the class).
  const auto before = [&](int64_t a, int64_t b) {
    const int class_a = is_local(a) ? 0 : is_init(a) ? 1 : 2, class_b = is_local(b) ? 0 : is_init(b) ? 1 : 2;
    if (class_a != class_b) return class_a < class_b;
    if (class_a == 0) return a > b;
    if (class_a == 1) return a < b;
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)] ||
           (scores[static_cast<size_t>(a)] == scores[static_cast<size_t>(b)] && a < b);
  };
  std::vector<int64_t> kept;
  for (int64_t b = 0; b < blocks; ++b) {
    int64_t ahead = 0;
    for (int64_t other = 0; other < blocks; ++other) ahead += other != b && before(other, b) ? 1 : 0;
    if (ahead < s.topk) kept.push_back(b);
  }
  std::vector<int32_t> row(static_cast<size_t>(s.topk), -1);
  for (const int64_t b : kept) {
    size_t place = 0;
    for (const int64_t other : kept) {
      if (other == b) continue;
      const double mine = scores[static_cast<size_t>(b)], its = scores[static_cast<size_t>(other)];
      bool first = its > mine || (its == mine && other < b);
      if (is_local(b) || is_local(other)) first = is_local(b) && (!is_local(other) || other < b);
      place += first ? 1 : 0;
    }
    row[place] = static_cast<int32_t>(b);
  }
  return row;
}

void expect_naive(Problem& problem) {
  reference_backend().select(problem.select_params());
  for (int64_t r = 0; r < problem.shape.index_heads; ++r) {
    for (int64_t i = 0; i < problem.shape.tokens_q; ++i) {
      ASSERT_EQ(row_of(problem, r, i), naive_row(problem, r, i)) << "index head " << r << ", query " << i;
    }
  }
}

// One query over `scores.size()` blocks of 32 keys; every token of block b scores scores[b].
Problem scored_problem(const std::vector<float>& scores, int64_t topk, int64_t init_blocks, int64_t local_blocks) {
  Shape shape;
  shape.tokens_q = 1;
  shape.tokens_k = static_cast<int64_t>(scores.size()) * 32;
  shape.heads_q = shape.heads_kv = shape.index_heads = 1;
  shape.index_dim = 1;
  shape.topk = topk;
  shape.init_blocks = init_blocks;
  shape.local_blocks = local_blocks;
  Problem problem(shape);
  problem.index_q[0] = 1;
  for (size_t j = 0; j < problem.index_k.size(); ++j) problem.index_k[j] = scores[j / 32];
  return problem;
}

std::vector<int32_t> select_row(Problem problem) {
  reference_backend().select(problem.select_params());
  return row_of(problem, 0, 0);
}

using Row = std::vector<int32_t>;

TEST(ReferenceSelect, MatchesANaiveRanking) {
  Shape shape;
  shape.tokens_q = 60;
  shape.tokens_k = 500;
  for (const int64_t topk : {1, 3, 8, 40}) {
    for (const int64_t init : {0, 2}) {
      for (const int64_t local : {0, 1, 3}) {
        SCOPED_TRACE(std::to_string(topk) + " " + std::to_string(init) + " " + std::to_string(local));
        shape.topk = topk;
        shape.init_blocks = init;
        shape.local_blocks = local;
        Problem problem(shape);
        expect_naive(problem);
      }
    }
  }
}

TEST(ReferenceSelect, MatchesANaiveRankingOnPackedAndSharedSequences) {
  Shape shape;
  shape.cu_seqlens_q = {0, 20, 20, 45, 70};
  shape.cu_seqlens_k = {0, 300, 310, 310, 800};
  shape.k_starts = {0, 300, 90, 310};
  shape.tokens_k = 800;
  shape.index_heads = 4;
  shape.index_key_heads = 2;
  shape.topk = 4;
  Problem problem(shape);
  expect_naive(problem);
}

TEST(ReferenceSelect, RanksTiesByNumber) {
  EXPECT_EQ(select_row(scored_problem({1, 1, 1, 1, 1, 1}, 4, 0, 1)), (Row{0, 1, 2, 5}));
  EXPECT_EQ(select_row(scored_problem({1, 2, 2, 1, 2, 0}, 4, 0, 0)), (Row{1, 2, 4, 0}));
}

TEST(ReferenceSelect, SignedZerosAreEqual) {
  EXPECT_EQ(select_row(scored_problem({-0.0F, 0.0F, -0.0F, -1, 0}, 4, 0, 1)), (Row{0, 1, 2, 4}));
  EXPECT_EQ(select_row(scored_problem({-1, -0.0F, 0.0F, -0.0F, 0}, 4, 0, 1)), (Row{1, 2, 3, 4}));
}

TEST(ReferenceSelect, NanCountsAsMinusInfinity) {
  EXPECT_EQ(select_row(scored_problem({NAN, 1, -kInf, -5, kInf, 0}, 6, 0, 1)), (Row{4, 1, 3, 0, 2, 5}));
  EXPECT_EQ(select_row(scored_problem({NAN, 1, -kInf, -5, kInf, 0}, 5, 0, 1)), (Row{4, 1, 3, 0, 5}));
  Problem some = scored_problem({1, 2, 3, 0}, 3, 0, 1);
  for (int at = 33; at < 64; ++at) some.index_k[static_cast<size_t>(at)] = NAN;  // one token of block 1 is left
  reference_backend().select(some.select_params());
  EXPECT_EQ(row_of(some, 0, 0), (Row{2, 1, 3}));
  EXPECT_TRUE(std::isnan(some.selected_lse[0]));
  some.shape.topk = 2;  // blocks 2 and 3: no NaN among the selected tokens
  reference_backend().select(some.select_params());
  EXPECT_TRUE(std::isfinite(some.selected_lse[0]));
}

TEST(ReferenceSelect, ForcedBlocksTakeSlotsFirst) {
  const std::vector<float> scores = {1, 6, 2, 5, 3, 4};
  EXPECT_EQ(select_row(scored_problem(scores, 2, 2, 3)), (Row{4, 5}));        // nearest local blocks
  EXPECT_EQ(select_row(scored_problem(scores, 3, 2, 2)), (Row{0, 4, 5}));     // then the first init block
  EXPECT_EQ(select_row(scored_problem(scores, 4, 1, 2)), (Row{1, 0, 4, 5}));  // then the best; init stands by its score
  EXPECT_EQ(select_row(scored_problem(scores, 5, 100, 100)), (Row{1, 2, 3, 4, 5}));
  EXPECT_EQ(select_row(scored_problem(scores, 3, 0, 0)), (Row{1, 3, 5}));
  EXPECT_EQ(select_row(scored_problem(scores, 8, 0, 1)), (Row{1, 3, 4, 2, 0, 5, -1, -1}));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(select_row(scored_problem(scores, 2, kMost, kMost)), (Row{4, 5}));
}

TEST(ReferenceSelect, ScalesAndShowsBlockScores) {
  Problem problem = scored_problem({1, -2, NAN, 4}, 2, 0, 1);
  SelectParams params = problem.select_params();
  params.scale = 0.5;
  EXPECT_EQ(reference::block_scores(params, 0, 0), (std::vector<double>{0.5, -1, -kInf, 2}));
}

TEST(ReferenceSelect, IndexLseIsOverTheSelectedTokens) {
  Shape shape;
  shape.tokens_q = 20;
  shape.tokens_k = 300;
  Problem problem(shape);
  problem.run_forward();
  const Oracle oracle = oracle_forward(problem, Inputs(problem));
  for (size_t at = 0; at < oracle.index_lse.size(); ++at) {
    EXPECT_FLOAT_EQ(problem.selected_lse[at], static_cast<float>(oracle.index_lse[at]));
    EXPECT_EQ(problem.selected_lse[at], problem.index_lse[at]);
  }
}

TEST(ReferenceSelect, QueriesWithoutKeys) {
  Shape shape;
  shape.tokens_q = 10;
  shape.tokens_k = 4;
  Problem problem(shape);
  problem.run_forward();
  for (int64_t i = 0; i < 6; ++i) {
    EXPECT_EQ(row_of(problem, 1, i), (Row{-1, -1}));
    EXPECT_EQ(problem.selected_lse[static_cast<size_t>(10 + i)], -kInf);
    EXPECT_EQ(problem.index_lse[static_cast<size_t>(10 + i)], -kInf);
    EXPECT_EQ(problem.lse[static_cast<size_t>(i)], -kInf);
  }
  EXPECT_EQ(row_of(problem, 1, 6), (Row{0, -1}));
}

TEST(ReferenceSelect, WritesInt64AndAnyStrides) {
  Shape shape;
  shape.tokens_q = 8;
  shape.tokens_k = 200;
  shape.topk = 4;
  Problem problem(shape);
  reference_backend().select(problem.select_params());
  std::vector<int64_t> wide(8 * 2 * 4, 99);  // token-major
  SelectParams params = problem.select_params();
  params.indices = make_tensor(wide.data(), OPENMSA_INT64, {2, 8, 4});
  params.indices.strides[0] = 4;
  params.indices.strides[1] = 8;
  params.index_lse = nullptr;
  reference_backend().select(params);
  for (int64_t i = 0; i < 8; ++i) {
    for (int64_t r = 0; r < 2; ++r) {
      const Row row = row_of(problem, r, i);
      for (int64_t n = 0; n < 4; ++n)
        EXPECT_EQ(wide[static_cast<size_t>((i * 2 + r) * 4 + n)], row[static_cast<size_t>(n)]);
    }
  }
}

TEST(ReferenceSelect, OffsetsOutOfRangeClamp) {
  Shape shape;
  shape.tokens_q = 6;
  shape.tokens_k = 90;
  shape.cu_seqlens_q = {-3, 2, 1, 4, 900};
  shape.cu_seqlens_k = {std::numeric_limits<int32_t>::min(), 50, 50, 40, std::numeric_limits<int32_t>::max()};
  shape.k_starts = {-40, 0, 95, 20};
  Problem problem(shape);
  problem.run_forward();
  EXPECT_EQ(row_of(problem, 0, 1), (Row{0, 1}));    // queries [0, 2), keys [0, 50)
  EXPECT_EQ(row_of(problem, 0, 2), (Row{-1, -1}));  // queries [1, 4), keys [90, 40): none
  EXPECT_EQ(row_of(problem, 0, 5)[1], 2);           // queries [4, 6), keys [20, 90)
  EXPECT_EQ(problem.lse[3], -kInf);
  EXPECT_TRUE(std::isfinite(problem.lse[5]));
}

TEST(ReferenceSelect, BatchOfNone) {
  Shape shape;
  shape.tokens_q = shape.tokens_k = 0;
  shape.cu_seqlens_q = shape.cu_seqlens_k = {0};
  Problem problem(shape);
  problem.run_forward();
  EXPECT_EQ(problem.kl, 0);
}

}  // namespace
}  // namespace openmsa::testing
