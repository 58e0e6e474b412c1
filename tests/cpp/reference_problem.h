// Small float32 problems for the tests of the reference, and an oracle for them: dense loops over every (query, key)
// pair with a mask, which share no code with the library.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "api/stages.h"

namespace openmsa::testing {

struct Shape {
  int64_t tokens_q = 70, tokens_k = 70;
  int64_t heads_q = 4, heads_kv = 2, index_heads = 2, index_key_heads = 1;
  int64_t dim = 8, v_dim = 8, index_dim = 8;
  int64_t block_size = 32, topk = 2, init_blocks = 0, local_blocks = 1;
  bool warmup = false;
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_k, k_starts;  // empty: absent
};

// Uniform numbers in [-limit, limit], the same on every machine.
std::vector<float> random_values(int64_t count, uint64_t seed, float limit = 1.5F);

struct Problem {
  explicit Problem(const Shape& problem_shape, uint64_t seed = 1);

  SequenceLayout layout() const;
  SelectParams select_params();
  AttendParams attend_params();      // with index branch, lse, index_lse and kl
  BackwardParams backward_params();  // with all five gradients and kl
  void run_forward();                // select (unless warm-up) and attend
  void run_backward();

  Shape shape;
  std::vector<float> q, k, v, index_q, index_k, d_out;
  float d_kl = 0.7F;
  std::vector<int32_t> indices;
  std::vector<float> out, lse, index_lse, selected_lse;
  float kl = -1, backward_kl = -1;
  std::vector<float> d_q, d_k, d_v, d_index_q, d_index_k;

 private:
  // What the optional tensors of Params point to.
  IndexBranch index_;
  Tensor indices_{}, lse_{}, index_lse_{}, selected_lse_{}, kl_{}, backward_kl_{}, d_out_{}, d_kl_{};
  Tensor d_q_{}, d_k_{}, d_v_{}, d_index_q_{}, d_index_k_{};
};

// The inputs in float64, so that finite differences can be fine.
struct Inputs {
  explicit Inputs(const Problem& problem);
  std::vector<double> q, k, v, index_q, index_k;
};

struct Oracle {
  std::vector<double> out, lse, index_lse;
  double kl = 0;
};

// The key rows that a query sees, and those of its selected blocks (warm-up: all), ascending.
std::vector<int64_t> oracle_visible(const Problem& problem, int64_t query);
std::vector<int64_t> oracle_tokens(const Problem& problem, int64_t query, int64_t index_head);

// softmax over these scores (which may not be empty), and their log-sum-exp.
std::vector<double> oracle_softmax(const std::vector<double>& scores, double* lse);

// scale <a[row_a], b[row_b]> for rows of `dim` numbers.
double oracle_score(const std::vector<double>& a, int64_t row_a, const std::vector<double>& b, int64_t row_b,
                    int64_t dim);

Oracle oracle_forward(const Problem& problem, const Inputs& inputs);

// |a - b| / |b| over whole vectors; infinite when their lengths differ.
template <typename A, typename B>
double relative_error(const std::vector<A>& a, const std::vector<B>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference) / std::max(std::sqrt(size), 1e-12);
}

}  // namespace openmsa::testing
