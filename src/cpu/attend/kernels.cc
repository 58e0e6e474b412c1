#include "cpu/attend/kernels.h"

#include "cpu/common/targets.h"
#include "cpu/common/tensor_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attend/kernels.cc"
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

int64_t PaddedColumns(int64_t columns) { return padded_columns(columns); }

// The part of a chunk's entries that one call of the products handles.
struct Chunk {
  const PlanEntry* entries;
  int64_t tokens;
  int64_t keys;  // the most that any of them sees
};

// Function(chunk) for consecutive chunks of the block's entries.
template <typename Function>
HWY_INLINE void for_chunks(const AttendTile& tile, const AttendBlock& block, const Function& function) {
  const int64_t length = HWY_MAX(1, kChunkRows / tile.group);
  for (int64_t first = 0; first < block.count; first += length) {
    Chunk chunk{block.entries + first, HWY_MIN(length, block.count - first), 0};
    for (int64_t t = 0; t < chunk.tokens; ++t) chunk.keys = HWY_MAX(chunk.keys, chunk.entries[t].keys);
    function(chunk);
  }
}

// scores [tokens][heads][block_size] of a chunk's query rows with the keys in `panels`. Columns past an entry's own
// keys are scores of keys that it does not see.
HWY_INLINE void chunk_scores(const Chunk& chunk, const QueryRows& queries, int64_t heads, const float* panels,
                             int64_t block_size, float* gathered, float* scores) {
  const int64_t depth = queries.rows.columns;
  for (int64_t t = 0; t < chunk.tokens; ++t) {
    widen_rows(rows_at(queries.rows, chunk.entries[t].token * queries.token_stride), heads,
               gathered + t * heads * depth, depth);
  }
  multiply<false>(chunk.tokens * heads, chunk.keys, depth, LeftMatrix{gathered, depth, 1}, panels, scores, block_size);
}

// Rows of accumulators that lie anywhere, multiplied with their corrections first.
struct CorrectRows {
  float* const* rows;
  int64_t column;
  const float* corrections;

  template <int64_t kRows>
  HWY_INLINE void start(int64_t first_row, FloatVector (&sums)[kRows][kPanelVectors]) const {
    const Floats floats;
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r) {
      const FloatVector correction = hn::Set(floats, corrections[first_row + r]);
#pragma GCC unroll 4
      for (int64_t v = 0; v < kPanelVectors; ++v) {
        sums[r][v] = hn::Mul(correction, hn::LoadU(floats, rows[first_row + r] + column + v * kLanes));
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
        hn::StoreU(sums[r][v], floats, rows[first_row + r] + column + v * kLanes);
      }
    }
  }
};

// The value rows of a block for a chunk's query rows: row r takes the first keys[r] of them, no other is touched.
struct ValueProduct {
  const float* weights;  // [rows][stride]
  int64_t stride;
  const int64_t* keys;
  const float* panel;  // [block keys][kPanel]
  CorrectRows sums;

  template <int64_t kRows>
  HWY_INLINE void tile(int64_t row) const {
    int64_t common = keys[row];
    for (int64_t r = 1; r < kRows; ++r) common = HWY_MIN(common, keys[row + r]);
    multiply_tile<kRows>(common, weights + row * stride, stride, 1, panel, kPanel, row, sums);
    for (int64_t r = row; r < row + kRows; ++r) {
      if (keys[r] == common) continue;
      multiply_tile<1>(keys[r] - common, weights + r * stride + common, stride, 1, panel + common * kPanel, kPanel, r,
                       StoreTile<true>{sums.rows[r] + sums.column, 0});
    }
  }
  template <int64_t kRows>
  HWY_INLINE void last(int64_t row, int64_t left) const {
    if constexpr (kRows > 0) {
      if (left == kRows) return tile<kRows>(row);
      last<kRows - 1>(row, left);
    }
  }
  HWY_INLINE void run(int64_t rows) const {
    int64_t row = 0;
    for (; row + kTileRows <= rows; row += kTileRows) {
      // Accumulators lie apart, where no hardware prefetcher follows: ask for the next tile's.
      for (int64_t r = row + kTileRows; r < HWY_MIN(row + 2 * kTileRows, rows); ++r) {
        hwy::Prefetch(sums.rows[r] + sums.column);
      }
      tile<kTileRows>(row);
    }
    last<kTileRows - 1>(row, rows - row);
  }
};

HWY_INLINE void pack_keys(const AttendTile& tile, const AttendBlock& block) {
  pack_transposed(block.k, block.keys, tile.buffers.k_panels);
  if (block.index_k.data != nullptr) pack_transposed(block.index_k, block.keys, tile.buffers.index_k_panels);
}

void AttendBlockOf(const AttendTile& tile, const AttendBlock& block) {
  const AttendBuffers& b = tile.buffers;
  const int64_t group = tile.group, stride = tile.block_size;
  pack_keys(tile, block);
  pack_rows(block.v, block.keys, b.v_panels);

  for_chunks(tile, block, [&](const Chunk& chunk) HWY_ATTR {
    chunk_scores(chunk, tile.q, group, b.k_panels, stride, b.queries, b.scores);
    for (int64_t t = 0; t < chunk.tokens; ++t) {
      const PlanEntry& entry = chunk.entries[t];
      for (int64_t h = 0; h < group; ++h) {
        const int64_t row = t * group + h, state = entry.token * group + h;
        b.corrections[row] = take_in(b.scores + row * stride, entry.keys, tile.running + state);
        b.sums[row] = tile.sums + state * tile.sums_stride;
        b.keys[row] = entry.keys;
      }
    }
    for (int64_t column = 0; column < block.v.columns; column += kPanel) {
      const ValueProduct product{b.scores, stride, b.keys, b.v_panels + column * block.keys,
                                 CorrectRows{b.sums, column, b.corrections}};
      product.run(chunk.tokens * group);
    }

    if (tile.index_running == nullptr) return;
    chunk_scores(chunk, tile.index_q, 1, b.index_k_panels, stride, b.index_queries, b.index_scores);
    for (int64_t t = 0; t < chunk.tokens; ++t) {
      take_in(b.index_scores + t * stride, chunk.entries[t].keys, tile.index_running + chunk.entries[t].token);
    }
  });
}

// The terms p (log p - (z - index_lse)) of one token over `keys` keys, where p is the mean over the heads of
// e^(score - lse).
HWY_INLINE float kl_terms(const float* scores, int64_t group, int64_t stride, const float* lse, const float* z,
                          float index_lse, int64_t keys) {
  const Floats floats;
  const FloatVector share = hn::Set(floats, 1.0f / static_cast<float>(group));
  const FloatVector student_lse = hn::Set(floats, index_lse);
  FloatVector sum = hn::Zero(floats);
  for (int64_t j = 0; j < keys; j += kLanes) {
    FloatVector teacher = hn::Zero(floats);
    for (int64_t h = 0; h < group; ++h) {
      if (lse[h] == -kInfinity) continue;  // no mass to share out
      const FloatVector score = load_first(scores + h * stride + j, keys - j, -kInfinity);
      teacher = hn::Add(teacher, exponential(hn::Sub(score, hn::Set(floats, lse[h]))));
    }
    teacher = hn::Mul(teacher, share);
    const FloatVector student = hn::Sub(hn::LoadU(floats, z + j), student_lse);
    const FloatVector term = hn::Mul(teacher, hn::Sub(logarithm(teacher), student));
    sum = hn::Add(sum, hn::IfThenZeroElse(hn::Eq(teacher, hn::Zero(floats)), term));
  }
  return sum_of_lanes(sum);
}

void AttendKlBlock(const AttendTile& tile, const AttendBlock& block) {
  const AttendBuffers& b = tile.buffers;
  const int64_t group = tile.group, stride = tile.block_size;
  pack_keys(tile, block);
  for_chunks(tile, block, [&](const Chunk& chunk) HWY_ATTR {
    chunk_scores(chunk, tile.q, group, b.k_panels, stride, b.queries, b.scores);
    chunk_scores(chunk, tile.index_q, 1, b.index_k_panels, stride, b.index_queries, b.index_scores);
    for (int64_t t = 0; t < chunk.tokens; ++t) {
      const PlanEntry& entry = chunk.entries[t];
      const float terms = kl_terms(b.scores + t * group * stride, group, stride, tile.lse + entry.token * group,
                                   b.index_scores + t * stride, tile.index_lse[entry.token], entry.keys);
      tile.kl[entry.token] += static_cast<double>(terms);
    }
  });
}

void AttendStore(const float* rows, int64_t stride, const float* factors, int64_t count, const OutputRows& out) {
  for (int64_t row = 0; row < count; ++row) {
    narrow_rows(rows + row * stride, stride, 1, factors[row], rows_at(out, row * out.stride));
  }
}

void AttendMerge(float* into, float into_factor, const float* from, float from_factor, int64_t columns) {
  const Floats floats;
  const FloatVector kept = hn::Set(floats, into_factor), added = hn::Set(floats, from_factor);
  for (int64_t c = 0; c < columns; c += kLanes) {
    const FloatVector sum = hn::Mul(kept, hn::LoadU(floats, into + c));
    hn::StoreU(hn::MulAdd(added, hn::LoadU(floats, from + c), sum), floats, into + c);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace openmsa::cpu {

HWY_EXPORT(PaddedColumns);
HWY_EXPORT(AttendBlockOf);
HWY_EXPORT(AttendKlBlock);
HWY_EXPORT(AttendStore);
HWY_EXPORT(AttendMerge);

int64_t attend_padded_columns(int64_t columns) { return HWY_DYNAMIC_DISPATCH(PaddedColumns)(columns); }
void attend_block(const AttendTile& tile, const AttendBlock& block) {
  HWY_DYNAMIC_DISPATCH(AttendBlockOf)(tile, block);
}
void attend_kl_block(const AttendTile& tile, const AttendBlock& block) {
  HWY_DYNAMIC_DISPATCH(AttendKlBlock)(tile, block);
}
void attend_store(const float* rows, int64_t stride, const float* factors, int64_t count, const OutputRows& out) {
  HWY_DYNAMIC_DISPATCH(AttendStore)(rows, stride, factors, count, out);
}
void attend_merge(float* into, float into_factor, const float* from, float from_factor, int64_t columns) {
  HWY_DYNAMIC_DISPATCH(AttendMerge)(into, into_factor, from, from_factor, columns);
}

}  // namespace openmsa::cpu
#endif
