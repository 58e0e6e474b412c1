// Rows of any storage type to and from float32, and into the panels of matrix-inl.h.

#if defined(OPENMSA_CPU_COMMON_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPENMSA_CPU_COMMON_PACK_INL_H_
#undef OPENMSA_CPU_COMMON_PACK_INL_H_
#else
#define OPENMSA_CPU_COMMON_PACK_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "api/numeric.h"
#include "cpu/common/matrix-inl.h"
#include "cpu/common/rows.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

// The next kLanes elements as float32.
HWY_INLINE FloatVector load_widened(const float* from) { return hn::LoadU(Floats(), from); }
HWY_INLINE FloatVector load_widened(const hwy::bfloat16_t* from) {
  return hn::PromoteTo(Floats(), hn::LoadU(hn::Rebind<hwy::bfloat16_t, Floats>(), from));
}
HWY_INLINE FloatVector load_widened(const hwy::float16_t* from) {
  return hn::PromoteTo(Floats(), hn::LoadU(hn::Rebind<hwy::float16_t, Floats>(), from));
}
// e4m3 has float16's layout with three mantissa bits and a bias smaller by 8: shifted into place, a value is 2^-8 of
// itself, subnormals included. Its NaN, all bits set, has no counterpart there.
HWY_INLINE FloatVector load_widened(const uint8_t* from) {
  const Floats floats;
  const hn::Rebind<uint8_t, Floats> bytes;
  const hn::Rebind<uint16_t, Floats> halves;
  const auto stored = hn::PromoteTo(halves, hn::LoadU(bytes, from));
  const auto magnitude = hn::And(stored, hn::Set(halves, 0x7f));
  const auto sign = hn::ShiftLeft<8>(hn::And(stored, hn::Set(halves, 0x80)));
  const auto not_a_number =
      hn::And(hn::VecFromMask(halves, hn::Eq(magnitude, hn::Set(halves, 0x7f))), hn::Set(halves, 0x7e00));
  const auto bits = hn::Or(hn::Or(sign, hn::ShiftLeft<7>(magnitude)), not_a_number);
  const auto value = hn::PromoteTo(floats, hn::BitCast(hn::Rebind<hwy::float16_t, Floats>(), bits));
  return hn::Mul(value, hn::Set(floats, 256.0f));
}

inline float widen_one(const float* from) { return *from; }
inline float widen_one(const hwy::bfloat16_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return bfloat16_to_float(bits);
}
inline float widen_one(const hwy::float16_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return float16_to_float(bits);
}
inline float widen_one(const uint8_t* from) { return float8_e4m3_to_float(*from); }

// to[i] = factor * from[i] for i in [0, count)
template <typename Stored>
HWY_INLINE void widen_row(const Stored* HWY_RESTRICT from, int64_t count, float factor, float* HWY_RESTRICT to) {
  const Floats floats;
  const FloatVector factors = hn::Set(floats, factor);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(hn::Mul(factors, load_widened(from + i)), floats, to + i);
  for (; i < count; ++i) to[i] = factor * widen_one(from + i);
}

// Calls function(pointer to the stored type, at row 0).
template <typename Function>
HWY_INLINE void with_stored(const StoredRows& rows, const Function& function) {
  switch (rows.dtype) {
    case OPENMSA_FLOAT32:
      return function(reinterpret_cast<const float*>(rows.data));
    case OPENMSA_BFLOAT16:
      return function(reinterpret_cast<const hwy::bfloat16_t*>(rows.data));
    case OPENMSA_FLOAT16:
      return function(reinterpret_cast<const hwy::float16_t*>(rows.data));
    default:
      return function(reinterpret_cast<const uint8_t*>(rows.data));
  }
}

// to[row][column], row-major with `stride` columns; columns past rows.columns are left alone.
inline void widen_rows(const StoredRows& rows, int64_t count, float* to, int64_t stride) {
  with_stored(rows, [&](const auto* stored) HWY_ATTR {
    for (int64_t row = 0; row < count; ++row) {
      widen_row(stored + row * rows.stride, rows.columns, rows.factor, to + row * stride);
    }
  });
}

// Panels of B[depth = row][column]: `count` rows as they stand.
inline void pack_rows(const StoredRows& rows, int64_t count, float* panels) {
  with_stored(rows, [&](const auto* stored) HWY_ATTR {
    for (int64_t column = 0; column < rows.columns; column += kPanel) {
      const int64_t filled = HWY_MIN(kPanel, rows.columns - column);
      float* panel = panels + column * count;
      for (int64_t row = 0; row < count; ++row) {
        widen_row(stored + row * rows.stride + column, filled, rows.factor, panel + row * kPanel);
        for (int64_t c = filled; c < kPanel; ++c) panel[row * kPanel + c] = 0.0f;
      }
    }
  });
}

// Panels of B[depth][column = row]: `count` rows transposed.
inline void pack_transposed(const StoredRows& rows, int64_t count, float* panels) {
  const int64_t depth = rows.columns;
  with_stored(rows, [&](const auto* stored) HWY_ATTR {
    constexpr int64_t kChunk = 64;  // of a row at a time: kPanel of them stay in the first-level cache
    alignas(64) float chunk[kPanel][kChunk];
    for (int64_t first = 0; first < count; first += kPanel) {
      const int64_t filled = HWY_MIN(kPanel, count - first);
      float* panel = panels + first * depth;
      for (int64_t at = 0; at < depth; at += kChunk) {
        const int64_t length = HWY_MIN(kChunk, depth - at);
        for (int64_t r = 0; r < filled; ++r) {
          widen_row(stored + (first + r) * rows.stride + at, length, rows.factor, chunk[r]);
        }
        for (int64_t r = filled; r < kPanel; ++r) std::memset(chunk[r], 0, sizeof(chunk[r]));
        for (int64_t d = 0; d < length; ++d) {
          for (int64_t r = 0; r < kPanel; ++r) panel[(at + d) * kPanel + r] = chunk[r][d];
        }
      }
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, once for each target
