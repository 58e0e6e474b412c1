// Exponentials, logarithms and the running log-sum-exp of a row of scores, in float32.

#if defined(OPENMSA_CPU_COMMON_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPENMSA_CPU_COMMON_MATH_INL_H_
#undef OPENMSA_CPU_COMMON_MATH_INL_H_
#else
#define OPENMSA_CPU_COMMON_MATH_INL_H_
#endif

#include <cstdint>

#include "cpu/common/matrix-inl.h"
#include "cpu/common/running_sum.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

inline constexpr float kInfinity = __builtin_huge_valf();
inline constexpr float kNotANumber = __builtin_nanf("");
HWY_INLINE bool is_nan(float x) { return x != x; }

// e^x to 2 ulp; 0 below the smallest normal result (-inf included), NaN for NaN, +inf from half the largest float on.
//
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a polynomial of degree 6, fitted to that range (relative error 3e-9). Not
// hwy/contrib's Exp, which turns NaN into 0 and cares for subnormal results: 1.8 us for 2048 values on a Zen 3 core,
// 0.9 here.
HWY_INLINE FloatVector exponential(FloatVector x) {
  const Floats floats;
  const hn::RebindToSigned<Floats> ints;
  // Adding it leaves round(x / ln 2) + 127, a float's exponent field, in the lowest bits.
  const FloatVector shifter = hn::Set(floats, 12582912.0f + 127.0f);
  x = hn::Min(hn::Set(floats, 88.8f), x);  // in this order NaN stays
  const FloatVector shifted = hn::MulAdd(x, hn::Set(floats, 1.44269504f), shifter);
  const FloatVector n = hn::Sub(shifted, shifter);
  FloatVector r = hn::NegMulAdd(n, hn::Set(floats, 0.693145752f), x);  // ln 2 in two parts, n times the first is exact
  r = hn::NegMulAdd(n, hn::Set(floats, 1.42860677e-6f), r);
  FloatVector p = hn::MulAdd(r, hn::Set(floats, 0.00138143206f), hn::Set(floats, 0.00836885069f));
  p = hn::MulAdd(p, r, hn::Set(floats, 0.0416684002f));
  p = hn::MulAdd(p, r, hn::Set(floats, 0.166665196f));
  p = hn::MulAdd(p, r, hn::Set(floats, 0.499999940f));
  p = hn::MulAdd(p, r, hn::Set(floats, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(floats, 1.0f));
  const FloatVector power = hn::BitCast(floats, hn::ShiftLeft<23>(hn::BitCast(ints, shifted)));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(floats, -87.3f)), hn::Mul(p, power));
}

inline float exponential(float x) { return hn::GetLane(exponential(hn::Set(Floats(), x))); }

// Natural logarithm of x > 0.
HWY_INLINE FloatVector logarithm(FloatVector x) { return hn::Log(Floats(), x); }

HWY_INLINE float largest_lane(FloatVector x) { return hn::GetLane(hn::MaxOfLanes(Floats(), x)); }
HWY_INLINE float sum_of_lanes(FloatVector x) { return hn::GetLane(hn::SumOfLanes(Floats(), x)); }

// The first `count` lanes of kLanes at `from`, the others `fill`; no memory past the whole vector is read, but all of
// it is: rows of scores have padded_columns.
HWY_INLINE FloatVector load_first(const float* from, int64_t count, float fill) {
  const Floats floats;
  const auto wanted = hn::FirstN(floats, static_cast<size_t>(count));
  return hn::IfThenElse(wanted, hn::LoadU(floats, from), hn::Set(floats, fill));
}

// The largest of scores[0, count), -inf when there is none. NaN does not count, or is the result.
HWY_INLINE float largest_of(const float* scores, int64_t count) {
  const Floats floats;
  FloatVector even = hn::Set(floats, -kInfinity), odd = even;
  int64_t j = 0;
  for (; j + 2 * kLanes <= count; j += 2 * kLanes) {
    even = hn::Max(hn::LoadU(floats, scores + j), even);
    odd = hn::Max(hn::LoadU(floats, scores + j + kLanes), odd);
  }
  for (; j + kLanes <= count; j += kLanes) even = hn::Max(hn::LoadU(floats, scores + j), even);
  if (j < count) odd = hn::Max(load_first(scores + j, count - j, -kInfinity), odd);
  return largest_lane(hn::Max(even, odd));
}

HWY_INLINE bool any_nan(const float* scores, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    if (is_nan(scores[j])) return true;
  }
  return false;
}

// scores[j] = e^(scores[j] - shift) for j in [0, count), 0 in what is left of the last vector. Returns their sum.
HWY_INLINE float exponentials(float* scores, int64_t count, float shift) {
  const Floats floats;
  const FloatVector shifts = hn::Set(floats, shift);
  FloatVector even = hn::Zero(floats), odd = even;
  int64_t j = 0;
  for (; j + 2 * kLanes <= count; j += 2 * kLanes) {
    const FloatVector first = exponential(hn::Sub(hn::LoadU(floats, scores + j), shifts));
    const FloatVector second = exponential(hn::Sub(hn::LoadU(floats, scores + j + kLanes), shifts));
    hn::StoreU(first, floats, scores + j);
    hn::StoreU(second, floats, scores + j + kLanes);
    even = hn::Add(even, first);
    odd = hn::Add(odd, second);
  }
  for (; j < count; j += kLanes) {
    const FloatVector scored = exponential(hn::Sub(load_first(scores + j, count - j, -kInfinity), shifts));
    hn::StoreU(scored, floats, scores + j);
    even = hn::Add(even, scored);
  }
  return sum_of_lanes(hn::Add(even, odd));
}

// Takes scores[0, count) in and leaves e^(score - largest) in their place. Returns what everything that was summed up
// before, weighted with exponentials, is to be multiplied with: e^(largest before - largest), 0 before the first mass.
HWY_INLINE float take_in(float* scores, int64_t count, RunningSum* running) {
  const float before = running->largest;
  float largest = largest_of(scores, count);
  if (largest == kInfinity && any_nan(scores, count)) largest = kNotANumber;
  if (!(largest > before)) largest = is_nan(largest) ? largest : before;
  const float shift = largest == -kInfinity ? 0.0f : largest;  // -inf - -inf is NaN
  const float added = exponentials(scores, count, shift);
  if (is_nan(added) && largest < kInfinity) largest = kNotANumber;
  const float correction = before == shift ? 1.0f : exponential(before - shift);
  running->largest = largest;
  running->sum = running->sum * correction + added;
  return correction;
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, once for each target
