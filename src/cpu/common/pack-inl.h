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
// itself, subnormals included. Its NaN, all bits set, has no counterpart there. `upper` holds the byte in its upper
// half.
template <typename Words, typename Vector>
HWY_INLINE Vector float16_of_e4m3(Words words, Vector upper) {
  const hn::RebindToSigned<Words> integers;
  const Vector doubled = hn::BitCast(words, hn::ShiftRight<1>(hn::BitCast(integers, upper)));  // the sign twice
  const Vector value = hn::And(doubled, hn::Set(words, 0xbfff));
  const auto not_a_number = hn::Eq(hn::And(value, hn::Set(words, 0x7fff)), hn::Set(words, 0x3f80));
  return hn::Or(value, hn::VecFromMask(words, not_a_number));
}
inline constexpr float kE4m3OfFloat16 = 256.0f;

HWY_INLINE FloatVector load_widened(const uint8_t* from) {
  const Floats floats;
  const hn::Rebind<uint16_t, Floats> words;
  const auto stored = hn::PromoteTo(words, hn::LoadU(hn::Rebind<uint8_t, Floats>(), from));
  const auto value =
      hn::BitCast(hn::Rebind<hwy::float16_t, Floats>(), float16_of_e4m3(words, hn::ShiftLeft<8>(stored)));
  return hn::Mul(hn::PromoteTo(floats, value), hn::Set(floats, kE4m3OfFloat16));
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

// kLanes float32 to storage, rounded to nearest, ties to even.
HWY_INLINE void store_narrowed(FloatVector value, float* to) { hn::StoreU(value, Floats(), to); }
HWY_INLINE void store_narrowed(FloatVector value, hwy::bfloat16_t* to) {
  const hn::RebindToUnsigned<Floats> words;
  const hn::Rebind<uint16_t, Floats> halves;
  const auto bits = hn::BitCast(words, value);
  const auto to_even = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(hn::Set(words, 0x7fff), to_even)));
  const auto not_a_number = hn::Or(hn::ShiftRight<16>(bits), hn::Set(words, 0x40));
  const auto is_number = hn::RebindMask(words, hn::Eq(value, value));
  const auto narrowed = hn::IfThenElse(is_number, rounded, not_a_number);
  hn::StoreU(hn::DemoteTo(halves, hn::BitCast(hn::RebindToSigned<Floats>(), narrowed)), halves,
             reinterpret_cast<uint16_t*>(to));
}
HWY_INLINE void store_narrowed(FloatVector value, hwy::float16_t* to) {
  const hn::Rebind<hwy::float16_t, Floats> halves;
  hn::StoreU(hn::DemoteTo(halves, value), halves, to);
}
// e4m3 saturates, infinity included.
HWY_INLINE void store_narrowed(FloatVector value, uint8_t* to) {
  const Floats floats;
  const hn::RebindToSigned<Floats> words;
  const auto bits = hn::BitCast(words, value);
  const auto magnitude = hn::And(bits, hn::Set(words, 0x7fffffff));
  const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(words, 0x80));
  // From 2^-6 on the mantissa loses 20 bits and the exponent a bias of 120.
  const auto to_even = hn::And(hn::ShiftRight<20>(magnitude), hn::Set(words, 1));
  const auto rounded = hn::ShiftRight<20>(hn::Add(magnitude, hn::Add(hn::Set(words, 0x7ffff), to_even)));
  const auto normal = hn::Sub(rounded, hn::Set(words, 120 << 3));
  // Below, multiples of 2^-9, the unit of floats around 2^14.
  const FloatVector unit = hn::Set(floats, 16384.0f);
  const auto shifted = hn::BitCast(words, hn::Add(hn::Abs(value), unit));
  const auto subnormal = hn::Sub(shifted, hn::BitCast(words, unit));
  const auto is_normal = hn::Gt(magnitude, hn::Set(words, 0x3c7fffff));
  const auto number = hn::Min(hn::IfThenElse(is_normal, normal, subnormal), hn::Set(words, 0x7e));
  const auto is_number = hn::Gt(hn::Set(words, 0x7f800001), magnitude);
  const auto narrowed = hn::Or(sign, hn::IfThenElse(is_number, number, hn::Set(words, 0x7f)));
  const hn::Rebind<uint8_t, Floats> bytes;
  hn::StoreU(hn::DemoteTo(bytes, narrowed), bytes, to);
}

inline void narrow_one(float value, float* to) { *to = value; }
inline void narrow_one(float value, hwy::bfloat16_t* to) {
  const uint16_t bits = float_to_bfloat16(value);
  std::memcpy(to, &bits, sizeof(bits));
}
inline void narrow_one(float value, hwy::float16_t* to) {
  const uint16_t bits = float_to_float16(value);
  std::memcpy(to, &bits, sizeof(bits));
}
inline void narrow_one(float value, uint8_t* to) { *to = float_to_float8_e4m3(value); }

// to[i] = factor * from[i] for i in [0, count)
template <typename Stored>
HWY_INLINE void narrow_row(const float* HWY_RESTRICT from, int64_t count, float factor, Stored* HWY_RESTRICT to) {
  const Floats floats;
  const FloatVector factors = hn::Set(floats, factor);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_narrowed(hn::Mul(factors, hn::LoadU(floats, from + i)), to + i);
  for (; i < count; ++i) narrow_one(factor * from[i], to + i);
}

// `count` rows [row][column] of float32 with `stride`, times `factor`, to float32, bfloat16 or float16 storage.
inline void narrow_rows(const float* from, int64_t stride, int64_t count, float factor, const OutputRows& rows) {
  const auto store = [&](auto* stored) HWY_ATTR {
    for (int64_t row = 0; row < count; ++row) {
      narrow_row(from + row * stride, rows.columns, factor, stored + row * rows.stride);
    }
  };
  if (rows.dtype == OPENMSA_FLOAT32) return store(static_cast<float*>(rows.data));
  if (rows.dtype == OPENMSA_BFLOAT16) return store(static_cast<hwy::bfloat16_t*>(rows.data));
  return store(static_cast<hwy::float16_t*>(rows.data));
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

#if HWY_TARGET != HWY_SCALAR

// Transposition within 128-bit blocks of kCount vectors, which have at least as many lanes in a block: afterwards lane
// i of a block of vectors[c] is what lane c of that block of vectors[i] was; with twice the lanes, lanes kCount h + i
// of vectors[c] are what lane 2 c + h of vectors[i] was. Each round rotates the bits of (vector, lane) by one.
template <typename Tag, typename Vector, int64_t kCount>
HWY_INLINE void transpose_in_blocks(Tag tag, Vector (&vectors)[kCount]) {
#pragma GCC unroll 4
  for (int64_t round = 1; round < kCount; round *= 2) {
    Vector rotated[kCount];
#pragma GCC unroll 8
    for (int64_t i = 0; i < kCount / 2; ++i) {
      rotated[2 * i] = hn::InterleaveLower(tag, vectors[i], vectors[i + kCount / 2]);
      rotated[2 * i + 1] = hn::InterleaveUpper(tag, vectors[i], vectors[i + kCount / 2]);
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < kCount; ++i) vectors[i] = rotated[i];
  }
}

// The vector whose 128-bit block b is load(first_block + b).
template <typename Tag, typename Load>
HWY_INLINE hn::Vec<Tag> load_blocks(Tag tag, int64_t first_block, const Load& load) {
  if constexpr (hn::MaxLanes(tag) * sizeof(hn::TFromD<Tag>) == 16) {
    return load(first_block);
  } else {
    const hn::Half<Tag> half;
    constexpr int64_t kHalfBlocks = hn::MaxLanes(half) * sizeof(hn::TFromD<Tag>) / 16;
    return hn::Combine(tag, load_blocks(half, first_block + kHalfBlocks, load), load_blocks(half, first_block, load));
  }
}

// The storage types as pack_square sees them: kDepths depths of kColumns rows in kVectors vectors, column(block, i)
// being the row in a block of vector i. Transposed, a vector holds kDepths / kVectors depths of all of them; store()
// writes it widened.
template <typename Stored>
struct Square;

template <>
struct Square<float> {
  using Tag = Floats;
  static constexpr int64_t kVectors = 4, kDepths = 4, kColumns = kLanes;
  static constexpr int64_t column(int64_t block, int64_t i) { return 4 * block + i; }
  static HWY_INLINE hn::Vec<hn::Full128<float>> load(const float* from) {
    return hn::LoadU(hn::Full128<float>(), from);
  }
  static HWY_INLINE void store(FloatVector row, FloatVector factors, float* to) {
    hn::Store(hn::Mul(factors, row), Floats(), to);
  }
};

struct SquareOfWords {
  using Tag = hn::Repartition<uint16_t, Floats>;
  using Vector = hn::Vec<Tag>;
  using Block = hn::Full128<uint16_t>;
  static constexpr int64_t kVectors = 8, kDepths = 8, kColumns = 2 * kLanes;
};

// A bfloat16 is the upper half of a float32: interleaved with zeros, a block's first and last four words become a block
// of two vectors.
template <>
struct Square<hwy::bfloat16_t> : SquareOfWords {
  static constexpr int64_t column(int64_t block, int64_t i) { return 4 * block + i % 4 + i / 4 * kLanes; }
  static HWY_INLINE hn::Vec<Block> load(const hwy::bfloat16_t* from) {
    return hn::LoadU(Block(), reinterpret_cast<const uint16_t*>(from));
  }
  static HWY_INLINE void store(Vector row, FloatVector factors, float* to) {
    const Floats floats;
    const Tag words;
    const Vector zero = hn::Zero(words);
    hn::Store(hn::Mul(factors, hn::BitCast(floats, hn::InterleaveLower(words, zero, row))), floats, to);
    hn::Store(hn::Mul(factors, hn::BitCast(floats, hn::InterleaveUpper(words, zero, row))), floats, to + kLanes);
  }
};

// Both halves of a row of words that hold float16, times two factors one after the other.
HWY_INLINE void store_float16(SquareOfWords::Vector row, FloatVector first_factor, FloatVector factors, float* to) {
  const Floats floats;
  const hn::Half<SquareOfWords::Tag> half;
  const hn::Rebind<hwy::float16_t, Floats> float16s;
  const auto lower = hn::PromoteTo(floats, hn::BitCast(float16s, hn::LowerHalf(half, row)));
  const auto upper = hn::PromoteTo(floats, hn::BitCast(float16s, hn::UpperHalf(half, row)));
  hn::Store(hn::Mul(factors, hn::Mul(first_factor, lower)), floats, to);
  hn::Store(hn::Mul(factors, hn::Mul(first_factor, upper)), floats, to + kLanes);
}

template <>
struct Square<hwy::float16_t> : SquareOfWords {
  static constexpr int64_t column(int64_t block, int64_t i) { return 8 * block + i; }
  static HWY_INLINE hn::Vec<Block> load(const hwy::float16_t* from) {
    return hn::LoadU(Block(), reinterpret_cast<const uint16_t*>(from));
  }
  static HWY_INLINE void store(Vector row, FloatVector factors, float* to) {
    store_float16(row, hn::Set(Floats(), 1.0f), factors, to);
  }
};

// Blocks of 16 depths of eight rows.
template <>
struct Square<uint8_t> {
  using Tag = hn::Repartition<uint8_t, Floats>;
  static constexpr int64_t kVectors = 8, kDepths = 16, kColumns = 2 * kLanes;
  static constexpr int64_t column(int64_t block, int64_t i) { return 8 * block + i; }
  static HWY_INLINE hn::Vec<hn::Full128<uint8_t>> load(const uint8_t* from) {
    return hn::LoadU(hn::Full128<uint8_t>(), from);
  }
  static HWY_INLINE void store(hn::Vec<Tag> rows, FloatVector factors, float* to) {
    const Tag bytes;
    const SquareOfWords::Tag words;
    const FloatVector first_factor = hn::Set(Floats(), kE4m3OfFloat16);
    const auto zero = hn::Zero(bytes);
    const auto even = hn::BitCast(words, hn::InterleaveLower(bytes, zero, rows));
    const auto odd = hn::BitCast(words, hn::InterleaveUpper(bytes, zero, rows));
    store_float16(float16_of_e4m3(words, even), first_factor, factors, to);
    store_float16(float16_of_e4m3(words, odd), first_factor, factors, to + kPanel);
  }
};

// panel[d][column] for kDepths depths of kColumns rows, transposed in registers.
template <typename Stored>
HWY_INLINE void pack_square(const Stored* HWY_RESTRICT rows, int64_t stride, FloatVector factors,
                            float* HWY_RESTRICT panel) {
  using Shape = Square<Stored>;
  const typename Shape::Tag tag;
  constexpr int64_t kDepthsOfVector = Shape::kDepths / Shape::kVectors;
  hn::Vec<typename Shape::Tag> square[Shape::kVectors];
#pragma GCC unroll 8
  for (int64_t i = 0; i < Shape::kVectors; ++i) {
    square[i] = load_blocks(
        tag, 0, [&](int64_t block) HWY_ATTR { return Shape::load(rows + Shape::column(block, i) * stride); });
  }
  transpose_in_blocks(tag, square);
#pragma GCC unroll 8
  for (int64_t v = 0; v < Shape::kVectors; ++v) {
    Shape::store(square[v], factors, panel + v * kDepthsOfVector * kPanel);
  }
}

#else  // no vectors: never offered, but compiled

template <typename Stored>
struct Square {
  static constexpr int64_t kDepths = 1, kColumns = 1;
};
template <typename Stored>
HWY_INLINE void pack_square(const Stored* rows, int64_t /*stride*/, FloatVector factors, float* panel) {
  *panel = hn::GetLane(factors) * widen_one(rows);
}

#endif

// One panel of B[depth][column = row]: `count` rows, kPanel at most, transposed; zeros in what is left of it.
template <typename Stored>
HWY_INLINE void pack_transposed_panel(const Stored* stored, int64_t stride, int64_t count, int64_t depth, float factor,
                                      float* panel) {
  using Shape = Square<Stored>;
  const FloatVector factors = hn::Set(Floats(), factor);
  for (int64_t column = 0; column < kPanel; column += Shape::kColumns) {
    const Stored* rows = stored + column * stride;
    int64_t d = 0;
    if (column + Shape::kColumns <= count) {
      for (; d + Shape::kDepths <= depth; d += Shape::kDepths) {
        pack_square(rows + d, stride, factors, panel + d * kPanel + column);
      }
    }
    const int64_t filled = HWY_MAX(int64_t{0}, HWY_MIN(Shape::kColumns, count - column));
    for (; d < depth; ++d) {
      float* to = panel + d * kPanel + column;
      for (int64_t r = 0; r < filled; ++r) to[r] = factor * widen_one(rows + r * stride + d);
      for (int64_t r = filled; r < Shape::kColumns; ++r) to[r] = 0.0f;
    }
  }
}

// Panels of B[depth][column = row]: `count` rows transposed.
inline void pack_transposed(const StoredRows& rows, int64_t count, float* panels) {
  with_stored(rows, [&](const auto* stored) HWY_ATTR {
    for (int64_t first = 0; first < count; first += kPanel) {
      pack_transposed_panel(stored + first * rows.stride, rows.stride, HWY_MIN(kPanel, count - first), rows.columns,
                            rows.factor, panels + first * rows.columns);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, once for each target
