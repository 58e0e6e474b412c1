// Gradients. A query tile walks the blocks of its plan in ascending order and adds to the gradients of its own queries;
// what a block's keys get from it is summed up apart and then added, in the order of the tiles (key_order.h). Every sum
// has one order, whatever the number of threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "api/dtype.h"
#include "cpu/backward/kernels.h"
#include "cpu/backward/key_order.h"
#include "cpu/common/aligned.h"
#include "cpu/common/tensor_rows.h"
#include "cpu/plan/plan.h"
#include "cpu/stages.h"
#include "host/elements.h"
#include "host/heads.h"
#include "host/parallel.h"
#include "host/sequences.h"

namespace openmsa::cpu {
namespace {

// (query, head) rows of a tile, at most: a visit to a block costs about 100 us (packing, adding up) beside about 30 us
// for each query of 16 heads, so a block should serve many; more than this, and dq's 2 MB leave the cache.
constexpr int64_t kRowsOfTile = 4096;
// Smaller problems are cut finer, down to kFewestQueries, so that many threads have work.
constexpr int64_t kTilesWanted = 64, kFewestQueries = 8;

int64_t tile_length(int64_t queries, int64_t group) {
  const int64_t longest = std::max<int64_t>(1, kRowsOfTile / group);
  return std::clamp<int64_t>((queries + kTilesWanted - 1) / kTilesWanted, std::min(longest, kFewestQueries), longest);
}

// `head` and the heads after it, of the tokens from `token` on.
TokenRows query_rows(const Tensor& tensor, int64_t token, int64_t head) {
  return {head_rows(tensor, token, head), tensor.strides[0]};
}

OutputRows output_token_rows(const Tensor& tensor, int64_t token, int64_t head) {
  OutputRows rows = output_head_rows(tensor, token, head);
  rows.stride = tensor.strides[0];
  return rows;
}

// Sums of one head of a gradient of keys [Tk][columns], in float32.
class KeySums {
 public:
  KeySums(const Tensor* gradient, int64_t heads_at_once) : gradient_(gradient) {
    if (gradient_ == nullptr) return;
    tokens_ = gradient_->shape[0];
    stride_ = backward_stride(gradient_->shape[2]);
    heads_ = heads_at_once;
    sums_ = memory_.require(heads_ * tokens_ * stride_);
  }

  float* row(int64_t token, int64_t head) { return sums_ + (head % heads_ * tokens_ + token) * stride_; }

  void clear(int64_t head) {
    over_tokens([&](int64_t first, int64_t count) {
      std::memset(row(first, head), 0, static_cast<size_t>(count * stride_) * sizeof(float));
    });
  }
  void store(int64_t head, float factor) {
    over_tokens([&](int64_t first, int64_t count) {
      backward_store(row(first, head), stride_, count, factor, output_token_rows(*gradient_, first, head));
    });
  }

 private:
  template <typename Body>
  void over_tokens(const Body& body) const {
    constexpr int64_t kTokens = 256;
    if (gradient_ == nullptr) return;
    host::parallel_for((tokens_ + kTokens - 1) / kTokens,
                       [&](int64_t part) { body(part * kTokens, std::min(kTokens, tokens_ - part * kTokens)); });
  }

  const Tensor* gradient_;
  int64_t tokens_ = 0, stride_ = 0, heads_ = 1;
  AlignedFloats memory_;
  float* sums_ = nullptr;
};

struct Scratch {
  AlignedFloats floats;
  TilePlan plan;
  BackwardTile tile;
};

class Backward {
 public:
  explicit Backward(const BackwardParams& params)
      : params_(params),
        sequences_(params.layout, params.block_size),
        heads_{params.q.shape[1], params.k.shape[1], params.index_heads,
               params.index != nullptr ? params.index->index_k.shape[1] : 1},
        tiles_(query_tiles(sequences_, params.layout.tokens_q,
                           tile_length(params.layout.tokens_q * heads_.index / heads_.kv, heads_.group()))),
        d_k_(params.d_k, 1),
        d_v_(params.d_v, 1),
        d_index_k_(params.d_index_k, most_index_key_heads()) {
    if (params.d_kl != nullptr) {
      const int64_t rows = std::max<int64_t>(1, params.layout.tokens_q * heads_.index);
      kl_coefficient_ = static_cast<double>(host::element(*params.d_kl)) / static_cast<double>(rows);
    }
    if (params.kl != nullptr) divergences_.resize(tiles_.size() * static_cast<size_t>(heads_.index));
  }

  // KV heads one after another: their sums share memory.
  void run() {
    int64_t index_key_end = 0;  // heads of index keys below have been cleared
    for (int64_t kv_head = 0; kv_head < heads_.kv; ++kv_head) {
      const int64_t first = kv_head * heads_.index / heads_.kv, last = (kv_head + 1) * heads_.index / heads_.kv - 1;
      d_k_.clear(kv_head);
      d_v_.clear(kv_head);
      for (; index_key_end <= heads_.index_key_head(last); ++index_key_end) d_index_k_.clear(index_key_end);
      run_tiles(first, last - first + 1);
      const auto scale = static_cast<float>(params_.scale);
      d_k_.store(kv_head, scale);
      d_v_.store(kv_head, 1.0F);
      for (int64_t head = heads_.index_key_head(first); head <= heads_.index_key_head(last); ++head) {
        const bool complete = last + 1 == heads_.index || heads_.index_key_head(last + 1) > head;
        if (complete) d_index_k_.store(head, index_factor());
      }
    }
    if (params_.kl != nullptr) host::element(*params_.kl) = mean_divergence();
  }

 private:
  bool has_index_gradient() const { return params_.d_kl != nullptr && kl_coefficient_ != 0; }
  bool has_index() const { return has_index_gradient() || params_.kl != nullptr; }
  float index_factor() const {
    return params_.index != nullptr ? static_cast<float>(kl_coefficient_ * params_.index->scale) : 0.0F;
  }

  // Heads of index keys that the index heads of one KV head read, at most.
  int64_t most_index_key_heads() const {
    int64_t most = 1;
    for (int64_t kv_head = 0; kv_head < heads_.kv; ++kv_head) {
      const int64_t first = kv_head * heads_.index / heads_.kv, last = (kv_head + 1) * heads_.index / heads_.kv - 1;
      most = std::max(most, heads_.index_key_head(last) - heads_.index_key_head(first) + 1);
    }
    return most;
  }

  // Items: tile by tile, the index heads [first, first + count) within it.
  void run_tiles(int64_t first, int64_t count) {
    const auto items = static_cast<int64_t>(tiles_.size()) * count;
    KeyOrder order(items);
    for (int64_t item = 0; item < items; ++item) {
      const QueryTile& tile = tiles_[static_cast<size_t>(item / count)];
      const host::QueryKeys keys = sequences_.keys_of(tile.first_query + tile.queries - 1);  // the most of its queries
      order.expect(item, keys.first_row, keys.first_row + keys.count);
    }
    host::parallel_for<Scratch>(items, [&](int64_t item, Scratch& scratch) {
      try {
        run_tile(item / count, first + item % count, item, order, scratch);
      } catch (...) {
        order.finish(item);  // others may be waiting
        throw;
      }
    });
  }

  void run_tile(int64_t number, int64_t index_head, int64_t item, KeyOrder& order, Scratch& scratch) {
    const QueryTile& queries = tiles_[static_cast<size_t>(number)];
    scratch.plan.build(sequences_, params_.indices, index_head, queries);
    BackwardTile& tile = scratch.tile;
    set_up(queries, index_head, scratch);
    const std::vector<PlanBlock>& blocks = scratch.plan.blocks();
    if (tile.has_d_out && !blocks.empty()) backward_delta(tile);

    const int64_t dim = params_.k.shape[2], v_dim = params_.v.shape[2], index_dim = tile.index_q.columns();
    const int64_t kv_head = heads_.kv_head(index_head), index_key_head = heads_.index_key_head(index_head);
    for (size_t at = 0; at < blocks.size(); ++at) {
      const PlanBlock& block = blocks[at];
      backward_block(tile, block, scratch.plan.entries().data() + block.begin);
      KeyGradients sums;
      if (tile.has_d_out) {
        sums.k = d_k_.row(block.first, kv_head);
        sums.v = d_v_.row(block.first, kv_head);
      }
      if (tile.has_index_gradient) sums.index_k = d_index_k_.row(block.first, index_key_head);
      order.wait(item, block.first, block.first + block.keys);
      backward_add(tile.buffers.block, block.keys, dim, v_dim, index_dim, sums);
      if (at + 1 < blocks.size()) order.advance(item, blocks[at + 1].first);
    }
    order.finish(item);
    store(queries, index_head, tile);
  }

  void set_up(const QueryTile& queries, int64_t index_head, Scratch& scratch) {
    const int64_t group = heads_.group(), head = index_head * group, query = queries.first_query;
    BackwardTile& tile = scratch.tile;
    tile = {};
    tile.queries = queries.queries;
    tile.group = group;
    tile.has_d_out = params_.d_out != nullptr;
    tile.has_kl = params_.kl != nullptr;
    tile.has_index_gradient = has_index_gradient();
    tile.scale = static_cast<float>(params_.scale);
    tile.q = query_rows(params_.q, query, head);
    tile.k = token_rows(params_.k, 0, heads_.kv_head(index_head));
    if (tile.has_d_out) {
      tile.v = token_rows(params_.v, 0, heads_.kv_head(index_head));
      tile.out = query_rows(params_.out, query, head);
      tile.d_out = query_rows(*params_.d_out, query, head);
    }
    if (has_index()) {
      tile.index_scale = static_cast<float>(params_.index->scale);
      tile.index_q = query_rows(params_.index->index_q, query, index_head);
      tile.index_k = token_rows(params_.index->index_k, 0, heads_.index_key_head(index_head));
    }
    allocate(tile, scratch.floats);

    const int64_t rows = tile.queries * group;
    const auto clear = [](float* data, int64_t count) {
      std::memset(data, 0, static_cast<size_t>(count) * sizeof(float));
    };
    if (tile.has_d_out) clear(tile.buffers.d_q, rows * backward_stride(tile.q.columns()));
    if (tile.has_index_gradient) clear(tile.buffers.d_index_q, tile.queries * backward_stride(tile.index_q.columns()));
    for (int64_t row = 0; row < rows; ++row) {
      tile.buffers.lse[row] = host::element(params_.lse, head + row % group, query + row / group);
    }
    for (int64_t t = 0; t < tile.queries && has_index(); ++t) {
      tile.buffers.index_lse[t] = host::element(*params_.index_lse, index_head, query + t);
    }
  }

  // The longest tile's needs, so that a thread allocates once.
  void allocate(BackwardTile& tile, AlignedFloats& floats) const {
    int64_t queries = 0;
    for (const QueryTile& any : tiles_) queries = std::max(queries, any.queries);
    const int64_t rows = queries * tile.group, keys = params_.block_size;
    const int64_t dim = tile.q.columns(), v_dim = tile.d_out.columns(), index_dim = tile.index_q.columns();
    const auto carve = [&](float* memory) {
      int64_t used = 0;
      const auto take = [&](int64_t count) {
        float* data = memory == nullptr ? nullptr : memory + used;
        used += (count + 15) / 16 * 16;
        return data;
      };
      const auto panels = [&](int64_t depth) { return take(depth * backward_padded(keys)); };
      const auto matrix = [&](int64_t count, int64_t columns) {
        return take(columns > 0 ? count * backward_stride(columns) : 0);
      };
      BackwardBuffers& b = tile.buffers;
      b.keys_transposed = panels(dim);
      b.values_transposed = panels(v_dim);
      b.keys = matrix(keys, dim);
      b.index_keys_transposed = panels(index_dim);
      b.index_keys = matrix(keys, index_dim);
      b.queries = matrix(kBackwardRows, dim);
      b.d_outputs = matrix(kBackwardRows, v_dim);
      b.probabilities = matrix(kBackwardRows, keys);
      b.d_scores = matrix(kBackwardRows, keys);
      b.index_queries = matrix(kBackwardTokens, index_dim);
      b.teacher = matrix(kBackwardTokens, keys);
      b.d_q = matrix(rows, dim);
      b.d_index_q = matrix(queries, index_dim);
      b.lse = take(rows);
      b.delta = take(rows);
      b.index_lse = take(queries);
      b.block.k = matrix(keys, dim);
      b.block.v = matrix(keys, v_dim);
      b.block.index_k = matrix(keys, index_dim);
      return used;
    };
    carve(floats.require(carve(nullptr)));
  }

  void store(const QueryTile& queries, int64_t index_head, const BackwardTile& tile) {
    const int64_t group = heads_.group();
    if (params_.kl != nullptr) {
      const auto number = static_cast<size_t>(&queries - tiles_.data());
      divergences_[static_cast<size_t>(index_head) * tiles_.size() + number] = tile.divergence;
    }
    const int64_t stride = backward_stride(tile.q.columns()), index_stride = backward_stride(tile.index_q.columns());
    for (int64_t t = 0; t < queries.queries; ++t) {
      const int64_t query = queries.first_query + t;
      if (params_.d_q != nullptr) {
        backward_store(tile.buffers.d_q + t * group * stride, stride, group, tile.scale,
                       output_head_rows(*params_.d_q, query, index_head * group));
      }
      if (tile.has_index_gradient) {
        backward_store(tile.buffers.d_index_q + t * index_stride, index_stride, 1, index_factor(),
                       output_head_rows(*params_.d_index_q, query, index_head));
      } else if (params_.d_index_q != nullptr) {
        // Nothing flows back through kl, not even from a row that is NaN.
        OutputRows row = output_head_rows(*params_.d_index_q, query, index_head);
        std::memset(row.data, 0, static_cast<size_t>(row.columns * dtype_size(row.dtype)));
      }
    }
  }

  float mean_divergence() const {
    const int64_t rows = params_.layout.tokens_q * heads_.index;
    if (rows == 0) return 0.0F;
    double sum = 0;
    for (const double divergence : divergences_) sum += divergence;
    // A row without a teacher takes no part in the sums, but a NaN of its scores is told.
    for (int64_t head = 0; head < heads_.index; ++head) {
      for (int64_t query = 0; query < params_.layout.tokens_q; ++query) {
        const float lse = host::element(*params_.index_lse, head, query);
        if (std::isnan(lse)) return lse;
      }
    }
    return static_cast<float>(sum / static_cast<double>(rows));
  }

  const BackwardParams& params_;
  host::Sequences sequences_;
  host::Heads heads_;
  std::vector<QueryTile> tiles_;
  KeySums d_k_, d_v_, d_index_k_;
  double kl_coefficient_ = 0;
  std::vector<double> divergences_;  // [Hi][tiles]
};

}  // namespace

void backward(const BackwardParams& params) { Backward(params).run(); }

}  // namespace openmsa::cpu
