// What the backward pass does with a panel of scores, and its products that go beyond matrix-inl.h: rows that stand
// anywhere, operands that are not finite.

#if defined(OPENMSA_CPU_BACKWARD_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPENMSA_CPU_BACKWARD_PRODUCTS_INL_H_
#undef OPENMSA_CPU_BACKWARD_PRODUCTS_INL_H_
#else
#define OPENMSA_CPU_BACKWARD_PRODUCTS_INL_H_
#endif

#include <cstdint>

#include "cpu/common/math-inl.h"
#include "cpu/common/matrix-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

// The lanes of the panel's vector `v` that stand for keys below `keys`.
HWY_INLINE hn::Mask<Floats> below(int64_t keys, int64_t column, int64_t v) {
  const int64_t left = keys - column - v * kLanes;
  return hn::FirstN(Floats(), static_cast<size_t>(HWY_MAX(left, int64_t{0})));
}

// One panel's columns of a matrix of scores, while they are in the first-level cache; `column` is the first of them.
struct ScorePanel {
  float* scores;  // [rows][kPanel] at the panel's first column
  int64_t stride, column, rows;
};

// P = exp(scale S - lse); 0 at keys that a row does not see.
template <bool kMasked>
HWY_INLINE void to_probabilities(const ScorePanel& panel, float scale, const float* lse, const int64_t* keys) {
  const Floats floats;
  const FloatVector factor = hn::Set(floats, scale);
  for (int64_t row = 0; row < panel.rows; ++row) {
    // A row whose scores are all -inf has no mass to share out: -inf - -inf would be NaN.
    const FloatVector shift = hn::Set(floats, lse[row] == -kInfinity ? -kInfinity : -lse[row]);
    float* at = panel.scores + row * panel.stride;
    for (int64_t v = 0; v < kPanelVectors; ++v) {
      FloatVector p = exponential(hn::MulAdd(hn::LoadU(floats, at + v * kLanes), factor, shift));
      if (kMasked) p = hn::IfThenElseZero(below(keys[row], panel.column, v), p);
      hn::StoreU(p, floats, at + v * kLanes);
    }
  }
}

// dS = P (dP - delta), in dP's place; 0 where P is, whatever dP.
HWY_INLINE void to_score_gradients(const ScorePanel& panel, const float* probabilities, const float* delta) {
  const Floats floats;
  for (int64_t row = 0; row < panel.rows; ++row) {
    const FloatVector subtracted = hn::Set(floats, delta[row]);
    for (int64_t v = 0; v < kPanelVectors; ++v) {
      const int64_t at = row * panel.stride + v * kLanes;
      const FloatVector p = hn::LoadU(floats, probabilities + at);
      const FloatVector gradient = hn::Mul(p, hn::Sub(hn::LoadU(floats, panel.scores + at), subtracted));
      hn::StoreU(hn::IfThenZeroElse(hn::Eq(p, hn::Zero(floats)), gradient), floats, panel.scores + at);
    }
  }
}

// dz = pi - p, in the place of <index_q, index_k>, with p = share * teacher. With kDivergence, returns the sum of
// p (log p - log pi).
template <bool kDivergence>
HWY_INLINE double to_index_gradients(const ScorePanel& panel, const float* teacher, float scale, float share,
                                     const float* index_lse, const int64_t* keys) {
  const Floats floats;
  const FloatVector factor = hn::Set(floats, scale), shares = hn::Set(floats, share), zero = hn::Zero(floats);
  double divergence = 0;
  for (int64_t row = 0; row < panel.rows; ++row) {
    const FloatVector lse = hn::Set(floats, index_lse[row]);
    FloatVector sum = zero;
    for (int64_t v = 0; v < kPanelVectors; ++v) {
      const int64_t at = row * panel.stride + v * kLanes;
      const auto seen = below(keys[row], panel.column, v);
      const FloatVector p = hn::IfThenElseZero(seen, hn::Mul(hn::LoadU(floats, teacher + at), shares));
      const FloatVector log_pi = hn::MulSub(hn::LoadU(floats, panel.scores + at), factor, lse);
      hn::StoreU(hn::IfThenElseZero(seen, hn::Sub(exponential(log_pi), p)), floats, panel.scores + at);
      if (!kDivergence) continue;
      const FloatVector term = hn::Mul(p, hn::Sub(logarithm(p), log_pi));
      sum = hn::Add(sum, hn::IfThenZeroElse(hn::Eq(p, zero), term));
    }
    if (kDivergence) divergence += static_cast<double>(sum_of_lanes(sum));
  }
  return divergence;
}

// c[rows[row]][column] += sums, for rows that stand anywhere.
struct AddToRows {
  float* c;  // at the panel's first column
  int64_t c_stride;
  const int64_t* rows;

  template <int64_t kRows>
  HWY_INLINE void start(int64_t first_row, FloatVector (&sums)[kRows][kPanelVectors]) const {
    const Floats floats;
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kPanelVectors; ++v) {
        sums[r][v] = hn::LoadU(floats, c + rows[first_row + r] * c_stride + v * kLanes);
      }
    }
  }
  template <int64_t kRows>
  HWY_INLINE void finish(int64_t first_row, const FloatVector (&sums)[kRows][kPanelVectors]) const {
    const Floats floats;
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kPanelVectors; ++v) {
        hn::StoreU(sums[r][v], floats, c + rows[first_row + r] * c_stride + v * kLanes);
      }
    }
  }
};

// A row-major operand: rows that are products' second factor as they stand.
struct RightRows {
  const float* data;
  int64_t stride, columns;
  bool finite;  // every element
};

HWY_INLINE bool all_finite(const float* rows, int64_t stride, int64_t count, int64_t columns) {
  const Floats floats;
  FloatVector sum = hn::Zero(floats);
  float rest = 0;
  for (int64_t row = 0; row < count; ++row) {
    const float* at = rows + row * stride;
    int64_t i = 0;
    for (; i + kLanes <= columns; i += kLanes) sum = hn::MulAdd(hn::LoadU(floats, at + i), hn::Zero(floats), sum);
    for (; i < columns; ++i) rest += at[i] * 0.0f;
  }
  return sum_of_lanes(sum) + rest == 0.0f;
}

HWY_INLINE void add_scaled(float weight, const float* row, int64_t columns, float* sum) {
  const Floats floats;
  for (int64_t i = 0; i < columns; i += kLanes) {
    const FloatVector added =
        hn::MulAdd(hn::Set(floats, weight), hn::LoadU(floats, row + i), hn::LoadU(floats, sum + i));
    hn::StoreU(added, floats, sum + i);
  }
}

// sums[key] += weights[row][key] rows[row], ascending rows. A weight of 0 adds nothing, even to the product with an
// infinite row, and a row of NaN reaches only keys that it sees: finite rows are multiplied by 0 there instead.
HWY_INLINE void add_to_keys(int64_t keys, int64_t count, const float* weights, int64_t weights_stride,
                            const RightRows& rows, float* sums, int64_t sums_stride) {
  if (rows.finite) {
    const LeftMatrix transposed{weights, 1, weights_stride};
    return multiply_by_rows(keys, rows.columns, count, transposed, rows.data, rows.stride, sums, sums_stride);
  }
  for (int64_t key = 0; key < keys; ++key) {
    for (int64_t row = 0; row < count; ++row) {
      const float weight = weights[row * weights_stride + key];
      if (weight != 0) add_scaled(weight, rows.data + row * rows.stride, rows.columns, sums + key * sums_stride);
    }
  }
}

// sums[places[row]] += weights[row][key] rows[key], ascending keys, of which each row sees keys_of_row[row]. With
// `kZeroCounts`, 0 times infinity is NaN among the keys that it sees.
template <bool kZeroCounts>
HWY_INLINE void add_to_queries(int64_t count, int64_t keys, const float* weights, int64_t weights_stride,
                               const RightRows& rows, const int64_t* keys_of_row, const int64_t* places, float* sums,
                               int64_t sums_stride) {
  if (rows.finite) {
    const LeftMatrix left{weights, weights_stride, 1};
    for (int64_t column = 0; column < rows.columns; column += kPanel) {
      multiply_panel(count, keys, left, rows.data + column, AddToRows{sums + column, sums_stride, places}, rows.stride);
    }
    return;
  }
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t key = 0; key < keys_of_row[row]; ++key) {
      const float weight = weights[row * weights_stride + key];
      if (!kZeroCounts && weight == 0) continue;
      add_scaled(weight, rows.data + key * rows.stride, rows.columns, sums + places[row] * sums_stride);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, once for each target
