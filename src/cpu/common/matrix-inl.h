// Small dense products of float32, the work horse of every stage: C = A B (+ C), B in panels.
//
// A panel holds kPanel columns of B for all depths: panel[depth][kPanel], contiguous and zero-padded, so that it stays
// in the first-level cache while tiles of rows pass by. A row-major B serves too (multiply_by_rows). Every element of C
// is one chain of fused multiply-adds over ascending depth, whatever the tile: its bits depend on its row of A and its
// column of B alone.

#if defined(OPENMSA_CPU_COMMON_MATRIX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPENMSA_CPU_COMMON_MATRIX_INL_H_
#undef OPENMSA_CPU_COMMON_MATRIX_INL_H_
#else
#define OPENMSA_CPU_COMMON_MATRIX_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// 16 lanes at most: no target's vectors are longer, and those of unknown length are not used.
using Floats = hn::CappedTag<float, 16>;
using FloatVector = hn::Vec<Floats>;
inline constexpr int64_t kLanes = hn::MaxLanes(Floats());

// A tile of accumulators fills the registers but for two vectors of B and one of A: 12 of 16 on AVX2, where two fused
// multiply-adds of latency 4 a cycle need 8 at least; 24 of 32 on AVX-512 and NEON.
#if HWY_TARGET == HWY_AVX3
inline constexpr int64_t kPanelVectors = 2, kTileRows = 12;
#elif HWY_TARGET == HWY_NEON
inline constexpr int64_t kPanelVectors = 4, kTileRows = 6;
#else
inline constexpr int64_t kPanelVectors = 2, kTileRows = 6;
#endif
inline constexpr int64_t kPanel = kPanelVectors * kLanes;

// Columns that a matrix with `columns` of them occupies in panels, and in a C that is written in whole vectors.
constexpr int64_t padded_columns(int64_t columns) { return (columns + kPanel - 1) / kPanel * kPanel; }

// A: element (row, depth) at data[row * row_stride + depth * depth_stride]. Row-major and transposed alike.
struct LeftMatrix {
  const float* data;
  int64_t row_stride, depth_stride;
};

// The products of kRows rows with one panel, in registers; then `epilogue(first_row, sums)` once.
template <int64_t kRows, typename Epilogue>
HWY_INLINE void multiply_tile(int64_t depth, const float* HWY_RESTRICT a, int64_t row_stride, int64_t depth_stride,
                              const float* HWY_RESTRICT panel, int64_t panel_stride, int64_t first_row,
                              const Epilogue& epilogue) {
  const Floats floats;
  FloatVector sums[kRows][kPanelVectors];
  epilogue.template start<kRows>(first_row, sums);
  for (int64_t k = 0; k < depth; ++k) {
    FloatVector b[kPanelVectors];
#pragma GCC unroll 4
    for (int64_t v = 0; v < kPanelVectors; ++v) b[v] = hn::Load(floats, panel + k * panel_stride + v * kLanes);
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r) {
      const FloatVector x = hn::Set(floats, a[r * row_stride + k * depth_stride]);
#pragma GCC unroll 4
      for (int64_t v = 0; v < kPanelVectors; ++v) sums[r][v] = hn::MulAdd(x, b[v], sums[r][v]);
    }
  }
  epilogue.template finish<kRows>(first_row, sums);
}

template <int64_t kRows, typename Epilogue>
HWY_INLINE void multiply_last_rows(int64_t rows, int64_t depth, const LeftMatrix& a, const float* panel,
                                   int64_t panel_stride, int64_t first_row, const Epilogue& epilogue) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      multiply_tile<kRows>(depth, a.data + first_row * a.row_stride, a.row_stride, a.depth_stride, panel, panel_stride,
                           first_row, epilogue);
    } else {
      multiply_last_rows<kRows - 1>(rows, depth, a, panel, panel_stride, first_row, epilogue);
    }
  }
}

// All rows with one panel, whose depths are `panel_stride` apart. An epilogue has start<kRows>(first_row, sums), which
// sets the sums, and finish<kRows>(first_row, sums), which takes them; both HWY_INLINE members.
template <typename Epilogue>
HWY_INLINE void multiply_panel(int64_t rows, int64_t depth, const LeftMatrix& a, const float* panel,
                               const Epilogue& epilogue, int64_t panel_stride = kPanel) {
  int64_t row = 0;
  for (; row + kTileRows <= rows; row += kTileRows) {
    multiply_tile<kTileRows>(depth, a.data + row * a.row_stride, a.row_stride, a.depth_stride, panel, panel_stride, row,
                             epilogue);
  }
  multiply_last_rows<kTileRows - 1>(rows - row, depth, a, panel, panel_stride, row, epilogue);
}

// C[row][column], row-major with whole vectors.
template <bool kAccumulate>
struct StoreTile {
  float* c;  // at the panel's first column
  int64_t c_stride;

  template <int64_t kRows>
  HWY_INLINE void start(int64_t first_row, FloatVector (&sums)[kRows][kPanelVectors]) const {
    const Floats floats;
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kPanelVectors; ++v) {
        sums[r][v] = kAccumulate ? hn::LoadU(floats, c + (first_row + r) * c_stride + v * kLanes) : hn::Zero(floats);
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
        hn::StoreU(sums[r][v], floats, c + (first_row + r) * c_stride + v * kLanes);
      }
    }
  }
};

// C [rows][columns] = A [rows][depth] B [depth][columns] (+ C). C has padded_columns(columns) columns, and what stands
// past `columns` in it is overwritten with sums of the panels' padding.
template <bool kAccumulate>
HWY_INLINE void multiply(int64_t rows, int64_t columns, int64_t depth, const LeftMatrix& a, const float* panels,
                         float* c, int64_t c_stride) {
  for (int64_t column = 0; column < columns; column += kPanel) {
    multiply_panel(rows, depth, a, panels + column * depth, StoreTile<kAccumulate>{c + column, c_stride});
  }
}

// C [rows][columns] += A [rows][depth] B [depth][columns] for a row-major B of padded_columns(columns) columns, whose
// rows begin at multiples of a vector. A stride that is an odd number of cache lines keeps a column of it in the first
// level.
HWY_INLINE void multiply_by_rows(int64_t rows, int64_t columns, int64_t depth, const LeftMatrix& a, const float* b,
                                 int64_t b_stride, float* c, int64_t c_stride) {
  for (int64_t column = 0; column < columns; column += kPanel) {
    multiply_panel(rows, depth, a, b + column, StoreTile<true>{c + column, c_stride}, b_stride);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, once for each target
