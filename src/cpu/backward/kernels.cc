// The backward pass of one (query tile, key block): five products on tiles that stay in the second-level cache, and the
// three of the index branch. docs/cpu.md has the schedule.
#include "cpu/backward/kernels.h"

#include "cpu/common/targets.h"
#include "cpu/common/tensor_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/backward/kernels.cc"
#include "hwy/foreach_target.h"
// Highway's order: what follows is compiled once for each target.
#include "cpu/backward/products-inl.h"
#include "cpu/common/math-inl.h"
#include "cpu/common/matrix-inl.h"
#include "cpu/common/pack-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

// From `head` on, the rows of one token.
inline StoredRows heads_of(const TokenRows& rows, int64_t token, int64_t head) {
  return rows_at(rows.heads, token * rows.token_stride + head * rows.heads.stride);
}

// The columns that whole vectors of products add beside `columns`.
inline void clear_padding(float* rows, int64_t stride, int64_t count, int64_t columns) {
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t column = columns; column < padded_columns(columns); ++column) rows[row * stride + column] = 0.0f;
  }
}

inline RightRows widen(const StoredRows& rows, int64_t count, float* to) {
  const int64_t stride = backward_stride(rows.columns);
  widen_rows(rows, count, to, stride);
  clear_padding(to, stride, count, rows.columns);
  return {to, stride, rows.columns, all_finite(to, stride, count, rows.columns)};
}

// What the products of a few (query, head) rows, or of a few queries' index heads, need of them.
static_assert(kBackwardTokens <= kBackwardRows, "both fit");
struct RowChunk {
  int64_t count = 0;
  int64_t most_keys = 0, least_keys = 0;
  float lse[kBackwardRows], delta[kBackwardRows];
  int64_t keys[kBackwardRows], places[kBackwardRows];  // of the row; in the tile
};

class BlockPass {
 public:
  BlockPass(BackwardTile& tile, const PlanBlock& block, const PlanEntry* entries)
      : tile_(tile), buffers_(tile.buffers), block_(block), entries_(entries) {}

  void run() {
    pack_keys();
    const int64_t count = block_.end - block_.begin;
    for (int64_t first = 0; first < count; first += kBackwardTokens) {
      const int64_t tokens = HWY_MIN(kBackwardTokens, count - first);
      if (has_index()) clear(buffers_.teacher, tokens, padded_columns(block_.keys), scores_stride());
      const int64_t rows = tokens * tile_.group;
      for (int64_t row = 0; row < rows; row += kBackwardRows) {
        attention_rows(entries_ + first, row, HWY_MIN(kBackwardRows, rows - row));
      }
      if (has_index()) index_rows(entries_ + first, tokens);
    }
  }

 private:
  bool has_index() const { return tile_.has_kl || tile_.has_index_gradient; }
  int64_t scores_stride() const { return backward_stride(block_.keys); }

  static void clear(float* rows, int64_t count, int64_t columns, int64_t stride) {
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t i = 0; i < columns; ++i) rows[row * stride + i] = 0.0f;
    }
  }

  void pack_keys() {
    const int64_t keys = block_.keys;
    const KeyGradients& sums = buffers_.block;
    const StoredRows k = rows_at(tile_.k, block_.first * tile_.k.stride);
    pack_transposed(k, keys, buffers_.keys_transposed);
    if (tile_.has_d_out) {
      const StoredRows v = rows_at(tile_.v, block_.first * tile_.v.stride);
      pack_transposed(v, keys, buffers_.values_transposed);
      keys_ = widen(k, keys, buffers_.keys);
      clear(sums.k, keys, padded_columns(k.columns), backward_stride(k.columns));
      clear(sums.v, keys, padded_columns(v.columns), backward_stride(v.columns));
    }
    if (!has_index()) return;
    const StoredRows index_k = rows_at(tile_.index_k, block_.first * tile_.index_k.stride);
    pack_transposed(index_k, keys, buffers_.index_keys_transposed);
    if (tile_.has_index_gradient) {
      index_keys_ = widen(index_k, keys, buffers_.index_keys);
      clear(sums.index_k, keys, padded_columns(index_k.columns), backward_stride(index_k.columns));
    }
  }

  // Fills `rows_` and gathers what stands at (query, head) rows [first, first + count) of these entries.
  void gather(const PlanEntry* entries, int64_t first, int64_t count) {
    RowChunk& rows = rows_;
    rows.count = count;
    rows.most_keys = 0;
    rows.least_keys = block_.keys;
    const int64_t group = tile_.group, q_stride = backward_stride(tile_.q.columns());
    const int64_t v_stride = backward_stride(tile_.d_out.columns());
    for (int64_t row = 0; row < count;) {
      const PlanEntry& entry = entries[(first + row) / group];
      const int64_t head = (first + row) % group;
      const int64_t heads = HWY_MIN(group - head, count - row);
      widen_rows(heads_of(tile_.q, entry.token, head), heads, buffers_.queries + row * q_stride, q_stride);
      if (tile_.has_d_out) {
        widen_rows(heads_of(tile_.d_out, entry.token, head), heads, buffers_.d_outputs + row * v_stride, v_stride);
      }
      for (int64_t h = 0; h < heads; ++h, ++row) {
        const int64_t place = entry.token * group + head + h;
        rows.places[row] = place;
        rows.lse[row] = buffers_.lse[place];
        rows.delta[row] = buffers_.delta[place];
        rows.keys[row] = entry.keys;
      }
      rows.most_keys = HWY_MAX(rows.most_keys, entry.keys);
      rows.least_keys = HWY_MIN(rows.least_keys, entry.keys);
    }
    clear_padding(buffers_.queries, q_stride, count, tile_.q.columns());
    queries_ = {buffers_.queries, q_stride, tile_.q.columns(), true};
    if (!tile_.has_d_out) return;
    clear_padding(buffers_.d_outputs, v_stride, count, tile_.d_out.columns());
    queries_.finite = all_finite(queries_.data, q_stride, count, queries_.columns);
    d_outputs_ = {buffers_.d_outputs, v_stride, tile_.d_out.columns(),
                  all_finite(buffers_.d_outputs, v_stride, count, tile_.d_out.columns())};
  }

  // scores = left keys, panel by panel; `finish` takes each panel of them.
  template <typename Finish>
  void score_panels(const RightRows& left, const float* keys_transposed, float* scores, const Finish& finish) {
    const int64_t stride = scores_stride();
    for (int64_t column = 0; column < rows_.most_keys; column += kPanel) {
      multiply_panel(rows_.count, left.columns, LeftMatrix{left.data, left.stride, 1},
                     keys_transposed + column * left.columns, StoreTile<false>{scores + column, stride});
      finish(ScorePanel{scores + column, stride, column, rows_.count});
    }
  }

  void probabilities() {
    // What stands beyond the keys in the last panel counts as unseen too.
    const bool masked = rows_.least_keys < padded_columns(rows_.most_keys);
    score_panels(queries_, buffers_.keys_transposed, buffers_.probabilities, [&](const ScorePanel& panel) HWY_ATTR {
      if (masked) {
        to_probabilities<true>(panel, tile_.scale, rows_.lse, rows_.keys);
      } else {
        to_probabilities<false>(panel, tile_.scale, rows_.lse, rows_.keys);
      }
    });
  }

  void score_gradients() {
    score_panels(d_outputs_, buffers_.values_transposed, buffers_.d_scores, [&](const ScorePanel& panel) HWY_ATTR {
      to_score_gradients(panel, buffers_.probabilities + panel.column, rows_.delta);
    });
  }

  void attention_rows(const PlanEntry* entries, int64_t first, int64_t count) {
    gather(entries, first, count);
    const int64_t keys = rows_.most_keys, stride = scores_stride();
    probabilities();
    if (has_index()) add_to_teacher(first, count);
    if (!tile_.has_d_out) return;

    score_gradients();
    const int64_t v_dim = d_outputs_.columns;
    const KeyGradients& sums = buffers_.block;
    add_to_keys(keys, count, buffers_.probabilities, stride, d_outputs_, sums.v, backward_stride(v_dim));
    add_to_keys(keys, count, buffers_.d_scores, stride, queries_, sums.k, queries_.stride);
    add_to_queries<false>(count, keys, buffers_.d_scores, stride, keys_, rows_.keys, rows_.places, buffers_.d_q,
                          keys_.stride);
  }

  // teacher[token] += sum of the probabilities of its rows.
  void add_to_teacher(int64_t first, int64_t count) {
    const Floats floats;
    const int64_t stride = scores_stride();
    for (int64_t row = 0; row < count; ++row) {
      float* sum = buffers_.teacher + (first + row) / tile_.group * stride;
      const float* p = buffers_.probabilities + row * stride;
      for (int64_t i = 0; i < rows_.most_keys; i += kLanes) {
        hn::StoreU(hn::Add(hn::LoadU(floats, sum + i), hn::LoadU(floats, p + i)), floats, sum + i);
      }
    }
  }

  void index_rows(const PlanEntry* entries, int64_t tokens) {
    const int64_t dim = tile_.index_q.columns(), stride = scores_stride(), q_stride = backward_stride(dim);
    RowChunk& rows = rows_;
    rows.count = tokens;
    rows.most_keys = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      const PlanEntry& entry = entries[t];
      widen_rows(heads_of(tile_.index_q, entry.token, 0), 1, buffers_.index_queries + t * q_stride, q_stride);
      rows.places[t] = entry.token;
      rows.lse[t] = buffers_.index_lse[entry.token];
      rows.keys[t] = entry.keys;
      rows.most_keys = HWY_MAX(rows.most_keys, entry.keys);
    }
    clear_padding(buffers_.index_queries, q_stride, tokens, dim);

    const RightRows queries{buffers_.index_queries, q_stride, dim,
                            all_finite(buffers_.index_queries, q_stride, tokens, dim)};
    const float share = 1.0f / static_cast<float>(tile_.group);
    score_panels(queries, buffers_.index_keys_transposed, buffers_.d_scores, [&](const ScorePanel& panel) HWY_ATTR {
      const float* teacher = buffers_.teacher + panel.column;
      if (tile_.has_kl) {
        tile_.divergence += to_index_gradients<true>(panel, teacher, tile_.index_scale, share, rows.lse, rows.keys);
      } else {
        to_index_gradients<false>(panel, teacher, tile_.index_scale, share, rows.lse, rows.keys);
      }
    });
    if (!tile_.has_index_gradient) return;
    add_to_keys(rows.most_keys, tokens, buffers_.d_scores, stride, queries, buffers_.block.index_k, q_stride);
    add_to_queries<true>(tokens, rows.most_keys, buffers_.d_scores, stride, index_keys_, rows.keys, rows.places,
                         buffers_.d_index_q, q_stride);
  }

  BackwardTile& tile_;
  const BackwardBuffers& buffers_;
  const PlanBlock& block_;
  const PlanEntry* entries_;
  RowChunk rows_;
  RightRows keys_{}, index_keys_{}, queries_{}, d_outputs_{};
};

void block_pass(BackwardTile& tile, const PlanBlock& block, const PlanEntry* entries) {
  BlockPass(tile, block, entries).run();
}

// One chain of fused multiply-adds, as <d_out, v> is: over a single key, whose value is the output, dP - delta is 0.
void delta(BackwardTile& tile) {
  const hn::CappedTag<float, 1> one;
  constexpr int64_t kRows = 8;  // chains at a time
  const int64_t dim = tile.out.columns(), stride = backward_stride(dim);
  float *out = tile.buffers.d_outputs, *d_out = out + kRows * stride;
  for (int64_t t = 0; t < tile.queries; ++t) {
    for (int64_t head = 0; head < tile.group; head += kRows) {
      const int64_t heads = HWY_MIN(kRows, tile.group - head);
      widen_rows(heads_of(tile.out, t, head), heads, out, stride);
      widen_rows(heads_of(tile.d_out, t, head), heads, d_out, stride);
      float sums[kRows] = {};
      for (int64_t i = 0; i < dim; ++i) {
        for (int64_t h = 0; h < heads; ++h) {
          const float* x = out + h * stride + i;
          const auto sum = hn::MulAdd(hn::Set(one, d_out[h * stride + i]), hn::Set(one, *x), hn::Set(one, sums[h]));
          sums[h] = hn::GetLane(sum);
        }
      }
      for (int64_t h = 0; h < heads; ++h) tile.buffers.delta[t * tile.group + head + h] = sums[h];
    }
  }
}

void add_rows(const float* rows, int64_t count, int64_t columns, float* sums) {
  const Floats floats;
  const int64_t stride = backward_stride(columns);
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t i = 0; i < columns; i += kLanes) {
      float* sum = sums + row * stride + i;
      hn::StoreU(hn::Add(hn::LoadU(floats, sum), hn::LoadU(floats, rows + row * stride + i)), floats, sum);
    }
  }
}

void add(const KeyGradients& block, int64_t keys, int64_t dim, int64_t v_dim, int64_t index_dim,
         const KeyGradients& sums) {
  if (sums.k != nullptr) {
    add_rows(block.k, keys, dim, sums.k);
    add_rows(block.v, keys, v_dim, sums.v);
  }
  if (sums.index_k != nullptr) add_rows(block.index_k, keys, index_dim, sums.index_k);
}

// A factor that is not finite leaves 0 what nothing was added to.
void store(float* rows, int64_t stride, int64_t count, float factor, const OutputRows& output) {
  if (factor * 0.0f != 0.0f) {
    for (int64_t row = 0; row < count; ++row) {
      for (float* x = rows + row * stride; x != rows + row * stride + output.columns; ++x) {
        if (*x != 0) *x *= factor;
      }
    }
    factor = 1.0f;
  }
  narrow_rows(rows, stride, count, factor, output);
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace openmsa::cpu {

HWY_EXPORT(block_pass);
HWY_EXPORT(delta);
HWY_EXPORT(add);
HWY_EXPORT(store);

void backward_delta(BackwardTile& tile) { HWY_DYNAMIC_DISPATCH(delta)(tile); }

void backward_block(BackwardTile& tile, const PlanBlock& block, const PlanEntry* entries) {
  HWY_DYNAMIC_DISPATCH(block_pass)(tile, block, entries);
}

void backward_add(const KeyGradients& block, int64_t keys, int64_t dim, int64_t v_dim, int64_t index_dim,
                  const KeyGradients& sums) {
  HWY_DYNAMIC_DISPATCH(add)(block, keys, dim, v_dim, index_dim, sums);
}

void backward_store(float* rows, int64_t stride, int64_t count, float factor, const OutputRows& output) {
  HWY_DYNAMIC_DISPATCH(store)(rows, stride, count, factor, output);
}

}  // namespace openmsa::cpu
#endif
