// The arithmetic that the stages share: scaled scores and the softmax over them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "reference/tensor_access.h"

namespace openmsa::reference {

// One order of additions everywhere, so that a (query, key) pair has the same score in every stage.
inline double dot(const double* a, const double* b, int64_t length) {
  constexpr int kLanes = 8;
  double lanes[kLanes] = {};
  int64_t d = 0;
  for (; d + kLanes <= length; d += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += a[d + lane] * b[d + lane];
  }
  double rest = 0;  // not a lane: a lane of variable number would keep them all out of registers
  for (; d < length; ++d) rest += a[d] * b[d];
  return (((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]))) + rest;
}

// sum += factor * row, which do not overlap
inline void add_scaled(double factor, const double* row, int64_t length, double* sum) {
#pragma omp simd
  for (int64_t d = 0; d < length; ++d) sum[d] += factor * row[d];
}

// log sum exp of score(t) for t in [0, count); -inf without any mass, NaN with a NaN score.
template <typename Score>
double log_sum_exp(int64_t count, const Score& score) {
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t t = 0; t < count; ++t) {
    if (std::isnan(score(t))) return score(t);
    largest = std::max<double>(largest, score(t));
  }
  if (std::isinf(largest)) return largest;  // no mass, or a score of +inf; inf - inf would hide both
  double sum = 0;
  for (int64_t t = 0; t < count; ++t) sum += std::exp(score(t) - largest);
  return largest + std::log(sum);
}
inline double log_sum_exp(const double* scores, int64_t count) {
  return log_sum_exp(count, [scores](int64_t t) { return scores[t]; });
}

// The rows [heads][dim] of `count` consecutive heads of one query.
void load_heads(const Rows& rows, int64_t query, int64_t first_head, int64_t count, std::vector<double>* heads);

// scores[h][t] = scale <queries[h], k[tokens[t]]> for queries [heads][dim].
void scaled_scores(const std::vector<double>& queries, const Rows& k, int64_t key_head,
                   const std::vector<int64_t>& tokens, double scale, std::vector<double>* scores);

}  // namespace openmsa::reference
