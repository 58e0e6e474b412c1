#include "cpu/combine/kernels.h"

#include "cpu/common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/combine/kernels.cc"
#include "hwy/foreach_target.h"

// After foreach_target.h
#include "cpu/common/math-inl.h"
#include "cpu/common/pack-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

HWY_INLINE int64_t padded_heads(int64_t heads) { return (heads + kLanes - 1) / kLanes * kLanes; }

int64_t CombineWeights(int64_t splits, int64_t heads) { return (splits + 1) * padded_heads(heads); }

// weights [splits][padded heads], and the merged log-sum-exps after them.
HWY_INLINE void combine_lses(const CombineToken& token) {
  const Floats floats;
  const FloatVector minus_infinity = hn::Set(floats, -kInfinity);
  const int64_t heads = token.heads, stride = padded_heads(heads);
  for (int64_t split = 0; split < token.splits; ++split) {
    float* row = token.weights + split * stride;
    const float* lses = token.lses + split * token.lse_split_stride;
    for (int64_t head = 0; head < heads; ++head) row[head] = lses[head * token.lse_head_stride];
    for (int64_t head = heads; head < stride; ++head) row[head] = -kInfinity;
  }
  for (int64_t head = 0; head < stride; head += kLanes) {
    float* column = token.weights + head;
    FloatVector largest = minus_infinity;
    auto no_number = hn::IsNaN(largest);
    for (int64_t split = 0; split < token.splits; ++split) {
      const FloatVector lse = hn::LoadU(floats, column + split * stride);
      no_number = hn::Or(no_number, hn::IsNaN(lse));
      largest = hn::Max(largest, lse);
    }
    largest = hn::IfThenElse(no_number, hn::Set(floats, kNotANumber), largest);
    const auto no_mass = hn::Eq(largest, minus_infinity);
    const FloatVector shift = hn::IfThenZeroElse(no_mass, largest);  // -inf - -inf is NaN
    FloatVector sum = hn::Zero(floats);
    for (int64_t split = 0; split < token.splits; ++split) {
      const FloatVector mass = exponential(hn::Sub(hn::LoadU(floats, column + split * stride), shift));
      hn::StoreU(mass, floats, column + split * stride);
      sum = hn::Add(sum, mass);
    }
    const FloatVector divisor = hn::IfThenElse(no_mass, hn::Set(floats, 1.0f), sum);
    for (int64_t split = 0; split < token.splits; ++split) {
      hn::StoreU(hn::Div(hn::LoadU(floats, column + split * stride), divisor), floats, column + split * stride);
    }
    // Beside +inf every sum is NaN, but the log-sum-exp is +inf.
    const auto finite = hn::Lt(hn::Abs(largest), hn::Set(floats, kInfinity));
    const FloatVector lse = hn::IfThenElse(finite, hn::Add(largest, logarithm(divisor)), largest);
    hn::StoreU(lse, floats, column + token.splits * stride);
  }
}

// sum += weight * row of kVectors vectors, over the splits in order. A part without mass has no say, whatever it holds.
template <int64_t kVectors, typename Stored>
HWY_INLINE void combine_columns(const CombineToken& token, const float* weights, int64_t weight_stride,
                                const Stored* HWY_RESTRICT row, Stored* HWY_RESTRICT out) {
  const Floats floats;
  FloatVector sums[kVectors];
#pragma GCC unroll 4
  for (int64_t v = 0; v < kVectors; ++v) sums[v] = hn::Zero(floats);
  for (int64_t split = 0; split < token.splits; ++split) {
    const float weight = weights[split * weight_stride];
    if (weight == 0) continue;
    const FloatVector factor = hn::Set(floats, weight);
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) {
      sums[v] = hn::MulAdd(factor, load_widened(row + split * token.split_stride + v * kLanes), sums[v]);
    }
  }
#pragma GCC unroll 4
  for (int64_t v = 0; v < kVectors; ++v) store_narrowed(sums[v], out + v * kLanes);
}

template <typename Stored>
HWY_INLINE void combine_row(const CombineToken& token, const float* weights, int64_t weight_stride, const Stored* row,
                            Stored* out) {
  const int64_t columns = token.out.columns;
  int64_t c = 0;
  for (; c + 4 * kLanes <= columns; c += 4 * kLanes) {
    combine_columns<4>(token, weights, weight_stride, row + c, out + c);
  }
  for (; c + kLanes <= columns; c += kLanes) combine_columns<1>(token, weights, weight_stride, row + c, out + c);
  for (; c < columns; ++c) {
    float sum = 0.0f;
    for (int64_t split = 0; split < token.splits; ++split) {
      const float weight = weights[split * weight_stride];
      if (weight != 0) sum = __builtin_fmaf(weight, widen_one(row + split * token.split_stride + c), sum);
    }
    narrow_one(sum, out + c);
  }
}

template <typename Stored>
HWY_INLINE void combine_heads(const CombineToken& token, const Stored* outs) {
  auto* out = static_cast<Stored*>(token.out.data);
  const int64_t stride = padded_heads(token.heads);
  for (int64_t head = 0; head < token.heads; ++head) {
    token.lse[head * token.out_lse_stride] = token.weights[token.splits * stride + head];
    combine_row(token, token.weights + head, stride, outs + head * token.outs.stride, out + head * token.out.stride);
  }
}

void CombineTokenOf(const CombineToken& token) {
  combine_lses(token);
  with_stored(token.outs, [&](const auto* outs) HWY_ATTR { combine_heads(token, outs); });
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace openmsa::cpu {

HWY_EXPORT(CombineWeights);
HWY_EXPORT(CombineTokenOf);

int64_t combine_weights(int64_t splits, int64_t heads) { return HWY_DYNAMIC_DISPATCH(CombineWeights)(splits, heads); }
void combine_token(const CombineToken& token) { HWY_DYNAMIC_DISPATCH(CombineTokenOf)(token); }

}  // namespace openmsa::cpu
#endif
