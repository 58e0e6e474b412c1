// The training signal: KL(teacher || student) over the tokens T of a row. The teacher p is the mean of the
// probabilities of the row's query heads, the student softmax_T(z) of the index scores z.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace openmsa::reference {

// exp(score - lse); 0 where every score is -inf, for such a row has no mass to share out.
inline double probability(double score, double lse) {
  return lse == -std::numeric_limits<double>::infinity() ? 0.0 : std::exp(score - lse);
}

// mean[t] of probabilities [heads][t].
inline void head_mean(const std::vector<double>& probabilities, int64_t heads, std::vector<double>* mean) {
  const size_t count = probabilities.size() / static_cast<size_t>(heads);
  mean->assign(count, 0.0);
  for (size_t at = 0; at < probabilities.size(); ++at) {
    (*mean)[at % count] += probabilities[at] / static_cast<double>(heads);
  }
}

// sum_t p (log p - (z - index_lse)), where 0 log 0 = 0. A NaN score makes index_lse NaN and so the whole sum.
inline double kl_divergence(const std::vector<double>& teacher, const std::vector<double>& z, double index_lse) {
  if (std::isnan(index_lse)) return index_lse;
  double sum = 0;
  for (size_t t = 0; t < teacher.size(); ++t) {
    if (teacher[t] != 0) sum += teacher[t] * (std::log(teacher[t]) - (z[t] - index_lse));
  }
  return sum;
}

// The sum over the rows of all queries and index heads, in their order, divided by the number of rows.
inline float mean_kl(const std::vector<double>& rows) {
  double sum = 0;
  for (const double row : rows) sum += row;
  return rows.empty() ? 0.0F : static_cast<float>(sum / static_cast<double>(rows.size()));
}

}  // namespace openmsa::reference
