// A log-sum-exp on its way.
#pragma once

#include <cmath>
#include <limits>

namespace openmsa::cpu {

// sum = the sum of e^(score - largest) over the scores so far. `largest` is NaN once a score was NaN, +inf once one was
// and none NaN, -inf before the first mass.
struct RunningSum {
  float largest = -std::numeric_limits<float>::infinity();
  float sum = 0.0F;
};

inline float log_sum_exp(const RunningSum& running) {
  return std::isfinite(running.largest) ? running.largest + std::log(running.sum) : running.largest;
}

// What a sum of terms weighted e^(score - largest) is worth when it counts from `merged` on, a larger or equal largest.
inline float rescaling(float largest, float merged) {
  if (largest == merged) return 1.0F;
  return std::exp(largest - merged);
}

// The larger one, NaN when either is.
inline float merged_largest(float a, float b) { return a > b || std::isnan(a) ? a : b; }

}  // namespace openmsa::cpu
