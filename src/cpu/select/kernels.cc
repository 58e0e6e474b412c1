#include "cpu/select/kernels.h"

#include "cpu/common/targets.h"
#include "cpu/common/tensor_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/select/kernels.cc"
#include "hwy/foreach_target.h"

// After foreach_target.h
#include "cpu/common/math-inl.h"
#include "cpu/common/matrix-inl.h"
#include "cpu/common/pack-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

// 2^exponent of the largest finite magnitude of row[0, count), of 1 when all are 0. Its inverse is a normal number too.
float UnitOf(const float* row, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, row + i, sizeof(bits));
    bits &= 0x7fffffffu;
    if (bits < 0x7f800000u && bits > largest) largest = bits;
  }
  if (largest == 0) return 1.0f;
  const uint32_t exponent = largest >> 23;
  const uint32_t unit = HWY_MAX(1u, HWY_MIN(253u, exponent)) << 23;
  float result;
  std::memcpy(&result, &unit, sizeof(result));
  return result;
}

void LoadQueries(const StoredRows& rows, int64_t count, float* queries, int64_t stride, float* units,
                 int64_t units_stride) {
  widen_rows(rows, count, queries, stride);
  const Floats floats;
  for (int64_t r = 0; r < count; ++r) {
    float* row = queries + r * stride;
    const float unit = UnitOf(row, rows.columns);
    units[r * units_stride] = unit;
    int64_t i = 0;
    for (; i + kLanes <= rows.columns; i += kLanes) {
      hn::StoreU(hn::Mul(hn::LoadU(floats, row + i), hn::Set(floats, 1.0f / unit)), floats, row + i);
    }
    for (; i < rows.columns; ++i) row[i] *= 1.0f / unit;
  }
}

// Sums of a tile over a part of the depth: they begin at zero or where `unfinished` stands, and go there or, when the
// depth ends, into largest[row][kLanes] = max(largest, sums), which a NaN does not change.
struct ScoreTileSums {
  float* largest;
  float* unfinished;      // [rows][kPanel]; not used when the depth begins and ends here
  const int32_t* limits;  // columns [0, limits[row] - column) are keys that the row sees; null: all
  int64_t column;
  bool begins, ends;

  template <int64_t kRows>
  HWY_INLINE void start(int64_t first_row, FloatVector (&sums)[kRows][kPanelVectors]) const {
    if (!begins) return StoreTile<true>{unfinished, kPanel}.start<kRows>(first_row, sums);
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kPanelVectors; ++v) sums[r][v] = hn::Zero(Floats());
    }
  }

  template <int64_t kRows>
  HWY_INLINE void finish(int64_t first_row, const FloatVector (&sums)[kRows][kPanelVectors]) const {
    if (!ends) return StoreTile<true>{unfinished, kPanel}.finish<kRows>(first_row, sums);
    const Floats floats;
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r) {
      float* row = largest + (first_row + r) * kLanes;
      FloatVector so_far = hn::Load(floats, row);
#pragma GCC unroll 4
      for (int64_t v = 0; v < kPanelVectors; ++v) {
        const FloatVector seen = limits == nullptr ? sums[r][v] : seen_part(first_row + r, v, sums[r][v]);
        so_far = hn::Max(seen, so_far);  // in this order a NaN goes
      }
      hn::Store(so_far, floats, row);
    }
  }

  HWY_INLINE FloatVector seen_part(int64_t row, int64_t vector, FloatVector sums) const {
    const Floats floats;
    const int64_t left = HWY_MAX(int64_t{0}, HWY_MIN(kLanes, limits[row] - column - vector * kLanes));
    return hn::IfThenElse(hn::FirstN(floats, static_cast<size_t>(left)), sums, hn::Set(floats, -kInfinity));
  }
};

// Up to this many rows, the time goes into reading and packing keys: one cache line of each key is packed and
// multiplied at a time, under which the next panel's lines arrive. Products of more rows hide that, and want their sums
// in registers.
constexpr int64_t kFewRows = 24;

int64_t ScratchFloats(int64_t rows, int64_t dim) { return kPanel * (dim + kFewRows) + kLanes * rows; }

// Panels of a batch of blocks, one after the other.
struct PanelCursor {
  const ScoreBlock* block;
  int64_t first = 0;  // key

  HWY_INLINE int64_t keys() const { return HWY_MIN(kPanel, block->count - first); }
  HWY_INLINE void advance() {
    first += kPanel;
    if (first < block->count) return;
    ++block;
    first = 0;
  }
};

// Asks for rows [begin, end) of a panel. Whole rows in order: a line of each row at a time takes 1.6 times as long.
HWY_INLINE void prefetch_keys(const PanelCursor& panel, int64_t begin, int64_t end) {
  constexpr int64_t kLine = 64;
  const StoredRows& keys = panel.block->keys;
  const int64_t row_bytes = keys.columns * dtype_size(keys.dtype);
  for (int64_t r = begin; r < HWY_MIN(end, panel.keys()); ++r) {
    const char* row = static_cast<const char*>(rows_at(keys, (panel.first + r) * keys.stride).data);
    for (int64_t at = 0; at < row_bytes; at += kLine) hwy::Prefetch(row + at);
  }
}

// One function for all types of keys, whose packed form is the same: it is large.
HWY_NOINLINE void multiply_keys(int64_t rows, int64_t depth, const LeftMatrix& queries, const float* panel,
                                const ScoreTileSums& sums) {
  multiply_panel(rows, depth, queries, panel, sums);
}

// One panel of keys for the rows that ask, under which the panel `next` arrives, unless its block is null.
HWY_INLINE void score_panel(const ScoreRows& rows, const PanelCursor& panel, const PanelCursor& next, float* scratch,
                            float* largest) {
  const ScoreBlock& block = *panel.block;
  const int64_t asking = rows.rows - block.first_row, dim = rows.dim;
  const int64_t step = asking <= kFewRows ? 64 / dtype_size(block.keys.dtype) : dim;
  for (int64_t depth = 0; depth < dim; depth += step) {
    const int64_t length = HWY_MIN(step, dim - depth);
    if (next.block != nullptr) prefetch_keys(next, kPanel * depth / dim, kPanel * (depth + length) / dim);
    StoredRows keys = rows_at(block.keys, panel.first * block.keys.stride + depth);
    keys.columns = length;
    pack_transposed(keys, panel.keys(), scratch);
    const ScoreTileSums sums{largest + block.first_row * kLanes,
                             scratch + kPanel * dim,
                             block.limits != nullptr ? block.limits + block.first_row : nullptr,
                             panel.first,
                             depth == 0,
                             depth + length == dim};
    multiply_keys(asking, length, LeftMatrix{rows.queries + block.first_row * dim + depth, dim, 1}, scratch, sums);
  }
}

void ScoreBlocks(const ScoreRows& rows, const ScoreBlock* blocks, int64_t count, float* scratch, float* scores) {
  const Floats floats;
  float* largest = scratch + kPanel * (rows.dim + kFewRows);
  for (int64_t r = 0; r < rows.rows; ++r) hn::Store(hn::Set(floats, -kInfinity), floats, largest + r * kLanes);
  for (PanelCursor panel{blocks}; panel.block != blocks + count;) {
    const ScoreBlock& block = *panel.block;
    PanelCursor next = panel;
    next.advance();
    const bool is_last = next.block == blocks + count;
    score_panel(rows, panel, is_last ? PanelCursor{nullptr} : next, scratch, largest);
    if (next.block != panel.block) {
      for (int64_t r = block.first_row; r < rows.rows; ++r) {
        scores[(panel.block - blocks) * rows.rows + r] = largest_lane(hn::Load(floats, largest + r * kLanes));
        hn::Store(hn::Set(floats, -kInfinity), floats, largest + r * kLanes);
      }
    }
    panel = next;
  }
}

int64_t LseScratchFloats(int64_t block_size, int64_t dim) {
  return padded_columns(block_size) * dim + kLseRows * (dim + padded_columns(block_size));
}

void AddScores(const ScoreRows& rows, const float* factors, const StoredRows& keys, int64_t count,
               const PlanEntry* entries, int64_t entry_count, float* scratch, RunningSum* running) {
  const Floats floats;
  const int64_t dim = rows.dim, columns = padded_columns(count);
  float* panels = scratch;
  float* scores = panels + columns * dim;
  float* queries = scores + kLseRows * columns;
  pack_transposed(keys, count, panels);
  for (int64_t first = 0; first < entry_count; first += kLseRows) {
    const int64_t chunk = HWY_MIN(kLseRows, entry_count - first);
    for (int64_t e = 0; e < chunk; ++e) {
      std::memcpy(queries + e * dim, rows.queries + entries[first + e].token * dim,
                  static_cast<size_t>(dim) * sizeof(float));
    }
    multiply<false>(chunk, columns, dim, LeftMatrix{queries, dim, 1}, panels, scores, columns);
    for (int64_t e = 0; e < chunk; ++e) {
      const PlanEntry& entry = entries[first + e];
      float* row = scores + e * columns;
      const FloatVector factor = hn::Set(floats, factors[entry.token]);
      for (int64_t c = 0; c < columns; c += kLanes) {
        hn::Store(hn::Mul(factor, hn::Load(floats, row + c)), floats, row + c);
      }
      take_in(row, entry.keys, running + entry.token);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace openmsa::cpu {

HWY_EXPORT(LoadQueries);
HWY_EXPORT(ScratchFloats);
HWY_EXPORT(ScoreBlocks);
HWY_EXPORT(LseScratchFloats);
HWY_EXPORT(AddScores);

void select_load_queries(const StoredRows& rows, int64_t count, float* queries, int64_t stride, float* units,
                         int64_t units_stride) {
  HWY_DYNAMIC_DISPATCH(LoadQueries)(rows, count, queries, stride, units, units_stride);
}

int64_t select_scratch_floats(int64_t rows, int64_t dim) { return HWY_DYNAMIC_DISPATCH(ScratchFloats)(rows, dim); }

void select_score_blocks(const ScoreRows& rows, const ScoreBlock* blocks, int64_t count, float* scratch,
                         float* scores) {
  HWY_DYNAMIC_DISPATCH(ScoreBlocks)(rows, blocks, count, scratch, scores);
}

int64_t select_lse_scratch_floats(int64_t block_size, int64_t dim) {
  return HWY_DYNAMIC_DISPATCH(LseScratchFloats)(block_size, dim);
}

void select_add_scores(const ScoreRows& rows, const float* factors, const StoredRows& keys, int64_t count,
                       const PlanEntry* entries, int64_t entry_count, float* scratch, RunningSum* running) {
  HWY_DYNAMIC_DISPATCH(AddScores)(rows, factors, keys, count, entries, entry_count, scratch, running);
}

}  // namespace openmsa::cpu
#endif
