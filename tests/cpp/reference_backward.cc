// Gradients of the reference against central differences of an oracle that shares no code with it, and the identities
// of the training signal.
#include <gtest/gtest.h>
#include <omp.h>

#include <cstring>
#include <string>

#include "reference_problem.h"

namespace openmsa::testing {
namespace {

// The teacher is detached: the KL of changed index tensors, and <out, d_out> of changed q, k, v.
double attention_loss(const Problem& problem, const Inputs& inputs) {
  const Oracle oracle = oracle_forward(problem, inputs);
  double loss = 0;
  for (size_t at = 0; at < oracle.out.size(); ++at) loss += oracle.out[at] * static_cast<double>(problem.d_out[at]);
  return loss;
}
double kl_loss(const Problem& problem, const Inputs& inputs) {
  return static_cast<double>(problem.d_kl) * oracle_forward(problem, inputs).kl;
}

using Loss = double (*)(const Problem&, const Inputs&);

// For every few tokens, the derivative along a random direction in their rows.
void expect_gradient(const char* name, const Problem& problem, Loss loss, std::vector<double> Inputs::*input,
                     const std::vector<float>& gradient, int64_t tokens) {
  Inputs inputs(problem);
  const size_t width = 3 * gradient.size() / static_cast<size_t>(tokens);
  const std::vector<float> direction = random_values(static_cast<int64_t>(gradient.size()), 77);
  const double step = 1e-4;
  std::vector<double> expected, actual;
  for (size_t begin = 0; begin < gradient.size(); begin += width) {
    const size_t end = std::min(begin + width, gradient.size());
    const auto move = [&](double distance) {
      for (size_t at = begin; at < end; ++at) (inputs.*input)[at] += distance * static_cast<double>(direction[at]);
    };
    double along = 0;
    for (size_t at = begin; at < end; ++at) {
      along += static_cast<double>(gradient[at]) * static_cast<double>(direction[at]);
    }
    move(step);
    const double above = loss(problem, inputs);
    move(-2 * step);
    const double below = loss(problem, inputs);
    move(step);
    expected.push_back((above - below) / (2 * step));
    actual.push_back(along);
  }
  EXPECT_LT(relative_error(actual, expected), 3e-6) << name;
  double size = 0;
  for (const double derivative : expected) size += std::abs(derivative);
  EXPECT_GT(size, 1e-3) << name << ": a gradient of zero tests nothing";
}

void expect_gradients(const Shape& shape) {
  Problem problem(shape);
  problem.run_forward();
  problem.run_backward();
  const Oracle oracle = oracle_forward(problem, Inputs(problem));
  EXPECT_LT(relative_error(problem.out, oracle.out), 1e-6);
  EXPECT_NEAR(problem.kl, oracle.kl, 1e-6 * std::abs(oracle.kl));
  EXPECT_NEAR(problem.backward_kl, oracle.kl, 1e-5 * std::abs(oracle.kl));
  for (size_t at = 0; at < oracle.lse.size(); ++at)
    EXPECT_FLOAT_EQ(problem.lse[at], static_cast<float>(oracle.lse[at]));
  for (size_t at = 0; at < oracle.index_lse.size(); ++at) {
    EXPECT_FLOAT_EQ(problem.index_lse[at], static_cast<float>(oracle.index_lse[at]));
  }
  expect_gradient("d_q", problem, attention_loss, &Inputs::q, problem.d_q, shape.tokens_q);
  expect_gradient("d_k", problem, attention_loss, &Inputs::k, problem.d_k, shape.tokens_k);
  expect_gradient("d_v", problem, attention_loss, &Inputs::v, problem.d_v, shape.tokens_k);
  expect_gradient("d_index_q", problem, kl_loss, &Inputs::index_q, problem.d_index_q, shape.tokens_q);
  expect_gradient("d_index_k", problem, kl_loss, &Inputs::index_k, problem.d_index_k, shape.tokens_k);
}

TEST(ReferenceBackward, MatchesFiniteDifferencesOnOneSequence) { expect_gradients({}); }

TEST(ReferenceBackward, MatchesFiniteDifferencesWithFewerQueriesThanKeys) {
  Shape shape;
  shape.tokens_q = 21;
  shape.tokens_k = 101;
  expect_gradients(shape);
}

TEST(ReferenceBackward, MatchesFiniteDifferencesOnPackedSequences) {
  Shape shape;
  // No queries, no keys, more queries than keys, and the usual two kinds.
  shape.cu_seqlens_q = {0, 0, 5, 20, 45, 70};
  shape.cu_seqlens_k = {0, 10, 10, 15, 40, 85};
  shape.tokens_k = 85;
  expect_gradients(shape);
}

TEST(ReferenceBackward, AddsGradientsOfSharedKeys) {
  Shape shape;
  shape.tokens_q = 60;
  shape.tokens_k = 70;
  shape.cu_seqlens_q = {0, 30, 60};
  shape.cu_seqlens_k = {0, 40, 70};
  shape.k_starts = {0, 5};  // rows 5 .. 39 belong to both; the second's blocks are anchored at row 5
  expect_gradients(shape);
}

TEST(ReferenceBackward, MatchesFiniteDifferencesForEveryKindOfGroup) {
  struct Heads {
    int64_t q, kv, index, index_key;
  };
  for (const auto [q, kv, index, index_key] :
       {Heads{8, 1, 1, 1}, Heads{4, 4, 4, 4}, Heads{8, 2, 4, 2}, Heads{6, 1, 2, 1}}) {
    SCOPED_TRACE(std::to_string(q) + " query heads");
    Shape shape;
    shape.tokens_q = 9;
    shape.tokens_k = 75;
    shape.heads_q = q;
    shape.heads_kv = kv;
    shape.index_heads = index;
    shape.index_key_heads = index_key;
    expect_gradients(shape);
  }
}

TEST(ReferenceBackward, TakesHeadDimensionsThatDiffer) {
  Shape shape;
  shape.tokens_q = 40;
  shape.tokens_k = 40;
  shape.dim = 5;
  shape.v_dim = 19;
  shape.index_dim = 3;
  expect_gradients(shape);
}

TEST(ReferenceBackward, MatchesFiniteDifferencesInWarmup) {
  Shape shape;
  shape.warmup = true;
  shape.cu_seqlens_q = {0, 30, 70};
  shape.cu_seqlens_k = {0, 30, 70};
  expect_gradients(shape);
}

TEST(ReferenceBackward, CrossEntropyIdentity) {
  // CE_i = H(pi_i) + <index_q_i, d_index_q_i> / g, and KL = CE - H(p).
  Problem problem({});
  problem.run_forward();
  problem.run_backward();
  const Shape& s = problem.shape;
  const Inputs inputs(problem);
  const double g = static_cast<double>(problem.d_kl) / static_cast<double>(s.index_heads * s.tokens_q);
  double kl = 0;
  for (int64_t i = 0; i < s.tokens_q; ++i) {
    for (int64_t r = 0; r < s.index_heads; ++r) {
      const std::vector<int64_t> tokens = oracle_tokens(problem, i, r);
      std::vector<double> z, p(tokens.size(), 0.0);
      for (const int64_t j : tokens)
        z.push_back(oracle_score(inputs.index_q, i * s.index_heads + r, inputs.index_k, j, s.index_dim));
      for (int64_t h = 2 * r; h < 2 * r + 2; ++h) {
        std::vector<double> scores;
        double unused = 0;
        for (const int64_t j : tokens)
          scores.push_back(oracle_score(inputs.q, i * 4 + h, inputs.k, j * 2 + h / 2, s.dim));
        const auto head = oracle_softmax(scores, &unused);
        for (size_t t = 0; t < p.size(); ++t) p[t] += head[t] / 2;
      }
      double lse = 0, entropy = 0, teacher_entropy = 0, product = 0;
      for (const double student : oracle_softmax(z, &lse)) entropy -= student * std::log(student);
      for (const double teacher : p) teacher_entropy -= teacher * std::log(teacher);
      const int64_t row = (i * s.index_heads + r) * s.index_dim;
      for (int64_t d = row; d < row + s.index_dim; ++d) {
        product +=
            inputs.index_q[static_cast<size_t>(d)] * static_cast<double>(problem.d_index_q[static_cast<size_t>(d)]);
      }
      kl += entropy + product / g - teacher_entropy;

      // KL = A - C + L' with A = sum p log p, C = sum p z.
      double cross = 0;
      for (size_t t = 0; t < p.size(); ++t) cross += p[t] * z[t];
      EXPECT_NEAR(entropy + product / g - teacher_entropy, -teacher_entropy - cross + lse, 2e-5);

      // d_index_q = g scale (E_pi[index_k] - E_p[index_k]).
      const auto student = oracle_softmax(z, &lse);
      for (int64_t d = 0; d < s.index_dim; ++d) {
        double moment = 0;
        for (size_t t = 0; t < p.size(); ++t) {
          moment += (student[t] - p[t]) * inputs.index_k[static_cast<size_t>(tokens[t] * s.index_dim + d)];
        }
        EXPECT_NEAR(problem.d_index_q[static_cast<size_t>(row + d)],
                    g * moment / std::sqrt(static_cast<double>(s.index_dim)), 1e-6 * g);
      }
    }
  }
  EXPECT_NEAR(problem.kl, kl / static_cast<double>(s.index_heads * s.tokens_q), 1e-5);
}

TEST(ReferenceBackward, GivesEachPartAlone) {
  Problem both({}), attention({}), index({}), value({});
  both.run_forward();
  both.run_backward();
  attention.run_forward();
  BackwardParams p = attention.backward_params();
  p.index = nullptr;
  p.index_lse = p.d_kl = p.d_index_q = p.d_index_k = p.kl = nullptr;
  reference_backend().backward(p);
  EXPECT_EQ(attention.d_q, both.d_q);
  EXPECT_EQ(attention.d_k, both.d_k);
  EXPECT_EQ(attention.d_v, both.d_v);
  index.run_forward();
  p = index.backward_params();
  p.d_out = p.d_q = p.d_k = p.d_v = p.kl = nullptr;
  reference_backend().backward(p);
  EXPECT_EQ(index.d_index_q, both.d_index_q);
  EXPECT_EQ(index.d_index_k, both.d_index_k);
  value.run_forward();
  p = value.backward_params();
  p.d_out = p.d_kl = p.d_q = p.d_k = p.d_v = p.d_index_q = p.d_index_k = nullptr;
  reference_backend().backward(p);
  EXPECT_EQ(value.backward_kl, both.backward_kl);
  EXPECT_TRUE(std::isnan(value.d_q[0]));
}

TEST(ReferenceBackward, CoefficientZeroGivesZeroGradients) {
  Problem problem({});
  problem.index_q[3] = NAN;  // a row whose KL is NaN has no say either
  problem.d_kl = 0;
  problem.run_forward();
  problem.run_backward();
  EXPECT_TRUE(std::isnan(problem.backward_kl));
  for (const float x : problem.d_index_q) EXPECT_EQ(x, 0);
  for (const float x : problem.d_index_k) EXPECT_EQ(x, 0);
}

TEST(ReferenceBackward, KeysThatNobodySelectedGetZero) {
  Shape shape;
  shape.tokens_q = 1;
  shape.tokens_k = 200;
  shape.topk = 1;
  Problem problem(shape);
  for (int64_t at = 0; at < 150 * 2 * 8; ++at) {
    problem.k[static_cast<size_t>(at)] = problem.v[static_cast<size_t>(at)] = NAN;
    if (at < 150 * 8) problem.index_k[static_cast<size_t>(at)] = NAN;
  }
  problem.run_forward();
  problem.run_backward();
  for (const auto* gradient : {&problem.d_k, &problem.d_v, &problem.d_index_k}) {
    const size_t width = gradient->size() / 200;
    for (size_t at = 0; at < gradient->size(); ++at) {
      if (at < 192 * width) {
        EXPECT_EQ((*gradient)[at], 0);  // the own block starts at 192
      } else {
        EXPECT_TRUE(std::isfinite((*gradient)[at]));
      }
    }
  }
}

TEST(ReferenceBackward, QueriesWithoutKeysGetZero) {
  Shape shape;
  shape.tokens_q = 12;
  shape.tokens_k = 5;
  Problem problem(shape);
  for (size_t at = 0; at < 7 * 4 * 8; ++at)
    problem.q[at] = problem.d_out[at] = NAN;  // of the first 7, which see nothing
  problem.run_forward();
  problem.run_backward();
  for (size_t at = 0; at < problem.d_q.size(); ++at) {
    if (at < 7 * 4 * 8) {
      EXPECT_EQ(problem.d_q[at], 0);
    }
    EXPECT_TRUE(std::isfinite(problem.d_q[at]));
  }
  for (const auto* gradient : {&problem.d_k, &problem.d_v, &problem.d_index_q, &problem.d_index_k}) {
    for (const float x : *gradient) EXPECT_TRUE(std::isfinite(x));
  }
  EXPECT_TRUE(std::isfinite(problem.kl));
}

TEST(ReferenceBackward, EmptyProblems) {
  Shape shape;
  shape.tokens_q = 0;
  Problem no_queries(shape);
  no_queries.run_forward();
  no_queries.run_backward();
  EXPECT_EQ(no_queries.kl, 0);
  EXPECT_EQ(no_queries.backward_kl, 0);
  for (const float x : no_queries.d_k) EXPECT_EQ(x, 0);
  shape.tokens_q = 3;
  shape.tokens_k = 0;
  Problem no_keys(shape);
  no_keys.run_forward();
  no_keys.run_backward();
  EXPECT_EQ(no_keys.kl, 0);
  for (const float x : no_keys.out) EXPECT_EQ(x, 0);
  for (const float x : no_keys.d_q) EXPECT_EQ(x, 0);
}

TEST(ReferenceBackward, SameBitsOnAnyNumberOfThreads) {
  Shape shape;
  shape.tokens_q = shape.tokens_k = 300;  // several chunks of queries
  const int before = omp_get_max_threads();
  std::vector<Problem> runs;
  for (const int threads : {1, 2, 3, 3}) {
    omp_set_num_threads(threads);
    runs.emplace_back(shape);
    runs.back().run_forward();
    runs.back().run_backward();
  }
  omp_set_num_threads(before);
  const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  };
  for (const Problem& run : runs) {
    EXPECT_EQ(run.indices, runs[0].indices);
    EXPECT_TRUE(same(run.out, runs[0].out));
    EXPECT_TRUE(same(run.lse, runs[0].lse));
    EXPECT_TRUE(same(run.d_q, runs[0].d_q));
    EXPECT_TRUE(same(run.d_k, runs[0].d_k));
    EXPECT_TRUE(same(run.d_v, runs[0].d_v));
    EXPECT_TRUE(same(run.d_index_q, runs[0].d_index_q));
    EXPECT_TRUE(same(run.d_index_k, runs[0].d_index_k));
    EXPECT_TRUE(same({run.kl, run.backward_kl}, {runs[0].kl, runs[0].backward_kl}));
  }
}

}  // namespace
}  // namespace openmsa::testing
