// Gradients. Queries go in chunks: first every row of the chunk on its own (its weights, the gradients of its queries),
// then the rows' contributions to keys and values, added in the order of the queries. A thread owns some columns of a
// gradient in that second step, so the sums have the same bits on any number of threads.
#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/kl.h"
#include "reference/scores.h"
#include "reference/stages.h"
#include "reference/tensor_access.h"

namespace openmsa::reference {
namespace {

// The weights of one (query, index head) over its visible tokens T.
struct Row {
  int64_t index_head = 0;
  std::vector<int64_t> tokens;
  std::vector<double> queries, d_outputs;         // [G][D], [G][Dv]
  std::vector<double> probabilities, d_scores;    // P, dS [G][T]
  std::vector<double> index_query, teacher, d_z;  // [Di], [T], [T]
};

struct Scratch {
  std::vector<int64_t> blocks;
  std::vector<double> key, value, outputs, delta, d_queries, z, d_index_query;
};

// A gradient [tokens][heads][dim] that sums in float64.
class Accumulator {
 public:
  explicit Accumulator(const Tensor* gradient) {
    if (gradient == nullptr) return;
    tokens_ = gradient->shape[0];
    heads_ = gradient->shape[1];
    dim_ = gradient->shape[2];
    sums_.assign(static_cast<size_t>(tokens_ * heads_ * dim_), 0.0);
  }

  int64_t dim() const { return dim_; }
  double* row(int64_t token, int64_t head) { return sums_.data() + (token * heads_ + head) * dim_; }

  void store(const Tensor* gradient) {
    if (gradient == nullptr) return;
    const Rows rows(*gradient);
    for (int64_t token = 0; token < tokens_; ++token) {
      for (int64_t head = 0; head < heads_; ++head) rows.store(token, head, row(token, head));
    }
  }

 private:
  int64_t tokens_ = 0, heads_ = 0, dim_ = 0;
  std::vector<double> sums_;
};

// sums[tokens[t]] += factor * sum_h weights[h][t] * vectors[h], in columns [begin, end). A weight of 0 adds nothing,
// even to the product with an infinite vector.
void scatter(const Row& row, const std::vector<double>& weights, const std::vector<double>& vectors, double factor,
             int64_t head, int64_t begin, int64_t end, Accumulator* sums) {
  const auto count = static_cast<int64_t>(row.tokens.size()), dim = sums->dim();
  const int64_t vector_count = static_cast<int64_t>(vectors.size()) / dim;
  for (int64_t t = 0; t < count; ++t) {
    double* sum = sums->row(row.tokens[static_cast<size_t>(t)], head);
    for (int64_t h = 0; h < vector_count; ++h) {
      const double weight = weights[static_cast<size_t>(h * count + t)];
      if (weight != 0) add_scaled(factor * weight, vectors.data() + h * dim + begin, end - begin, sum + begin);
    }
  }
}

class Backward {
 public:
  explicit Backward(const BackwardParams& params)
      : params_(params),
        sequences_(params.layout, params.block_size),
        heads_{params.q.shape[1], params.k.shape[1], params.index_heads,
               params.index != nullptr ? params.index->index_k.shape[1] : 1},
        d_k_(params.d_k),
        d_v_(params.d_v),
        d_index_k_(params.d_index_k),
        kl_(params.kl != nullptr ? static_cast<size_t>(params.layout.tokens_q * heads_.index) : 0) {
    if (params.d_kl != nullptr) {
      const int64_t rows = std::max<int64_t>(1, params.layout.tokens_q * heads_.index);
      kl_coefficient_ = static_cast<double>(element(*params.d_kl)) / static_cast<double>(rows);
    }
  }

  void run() {
    const int64_t queries = params_.layout.tokens_q, chunk = chunk_size();
    std::vector<Row> rows(static_cast<size_t>(std::min(chunk, queries) * heads_.index));
    for (int64_t first = 0; first < queries; first += chunk) {
      const int64_t count = std::min(chunk, queries - first) * heads_.index;
      parallel_for<Scratch>(count, [&](int64_t at, Scratch& scratch) {
        differentiate_row(first + at / heads_.index, at % heads_.index, &rows[static_cast<size_t>(at)], scratch);
      });
      add_to_keys(rows, count);
    }
    d_k_.store(params_.d_k);
    d_v_.store(params_.d_v);
    d_index_k_.store(params_.d_index_k);
    if (params_.kl != nullptr) element(*params_.kl) = mean_kl(kl_);
  }

 private:
  // As many queries as keep the chunk's weights near 32 MiB; sums do not depend on it.
  int64_t chunk_size() const {
    int64_t tokens = std::max<int64_t>(1, sequences_.most_keys());
    if (params_.indices != nullptr) {
      const int64_t blocks = (tokens + params_.block_size - 1) / params_.block_size;
      tokens = std::min(params_.indices->shape[2], blocks) * params_.block_size;
    }
    const int64_t per_query = std::max<int64_t>(1, tokens * (2 * heads_.query + 2 * heads_.index));
    return std::clamp<int64_t>((int64_t{1} << 22) / per_query, 1, 128);
  }

  void differentiate_row(int64_t query, int64_t index_head, Row* row, Scratch& scratch) {
    const QueryKeys keys = sequences_.keys_of(query);
    selected_blocks(params_.indices, index_head, query, keys, &scratch.blocks);
    visible_tokens(keys, scratch.blocks, &row->tokens);
    row->index_head = index_head;
    differentiate_attention(query, row, scratch);
    if (params_.d_kl != nullptr || params_.kl != nullptr) differentiate_kl(query, row, scratch);
  }

  // P, and with d_out: delta = <dO, O>, dP = <dO, v>, dS = P (dP - delta), dq = scale sum_t dS k.
  void differentiate_attention(int64_t query, Row* row, Scratch& s) {
    const Rows q(params_.q), k(params_.k), v(params_.v), out(params_.out);
    const int64_t group = heads_.group(), first_head = row->index_head * group;
    const int64_t kv_head = heads_.kv_head(row->index_head), dim = q.dim(), v_dim = v.dim();
    const auto count = static_cast<int64_t>(row->tokens.size());

    load_heads(q, query, first_head, group, &row->queries);
    scaled_scores(row->queries, k, kv_head, row->tokens, params_.scale, &row->probabilities);
    for (int64_t h = 0; h < group; ++h) {
      const double lse = element(params_.lse, first_head + h, query);
      double* scores = row->probabilities.data() + h * count;
      for (int64_t t = 0; t < count; ++t) scores[t] = probability(scores[t], lse);
    }
    if (params_.d_out == nullptr) return;

    load_heads(Rows(*params_.d_out), query, first_head, group, &row->d_outputs);
    load_heads(out, query, first_head, group, &s.outputs);
    s.delta.resize(static_cast<size_t>(group));
    for (int64_t h = 0; h < group; ++h) {
      s.delta[static_cast<size_t>(h)] = dot(row->d_outputs.data() + h * v_dim, s.outputs.data() + h * v_dim, v_dim);
    }

    s.key.resize(static_cast<size_t>(dim));
    s.value.resize(static_cast<size_t>(v_dim));
    s.d_queries.assign(static_cast<size_t>(group * dim), 0.0);
    row->d_scores.resize(row->probabilities.size());
    for (int64_t t = 0; t < count; ++t) {
      k.load(row->tokens[static_cast<size_t>(t)], kv_head, s.key.data());
      v.load(row->tokens[static_cast<size_t>(t)], kv_head, s.value.data());
      for (int64_t h = 0; h < group; ++h) {
        const auto at = static_cast<size_t>(h * count + t);
        const double p = row->probabilities[at];
        const double d_p = dot(row->d_outputs.data() + h * v_dim, s.value.data(), v_dim);
        row->d_scores[at] = p == 0 ? 0.0 : p * (d_p - s.delta[static_cast<size_t>(h)]);
        if (p != 0) add_scaled(params_.scale * row->d_scores[at], s.key.data(), dim, s.d_queries.data() + h * dim);
      }
    }
    const Rows d_q(*params_.d_q);
    for (int64_t h = 0; h < group; ++h) d_q.store(query, first_head + h, s.d_queries.data() + h * dim);
  }

  // p = head mean of P, pi = softmax(z), dz = coefficient (pi - p), d_index_q = scale sum_t dz k_index.
  void differentiate_kl(int64_t query, Row* row, Scratch& s) {
    const Rows index_q(params_.index->index_q), index_k(params_.index->index_k);
    const int64_t dim = index_q.dim(), key_head = heads_.index_key_head(row->index_head);
    const double index_lse = element(*params_.index_lse, row->index_head, query);
    const size_t count = row->tokens.size();

    head_mean(row->probabilities, heads_.group(), &row->teacher);
    load_heads(index_q, query, row->index_head, 1, &row->index_query);
    scaled_scores(row->index_query, index_k, key_head, row->tokens, params_.index->scale, &s.z);
    if (params_.kl != nullptr) {
      kl_[static_cast<size_t>(query * heads_.index + row->index_head)] = kl_divergence(row->teacher, s.z, index_lse);
    }
    if (params_.d_kl == nullptr) return;

    s.key.resize(static_cast<size_t>(dim));
    s.d_index_query.assign(static_cast<size_t>(dim), 0.0);
    row->d_z.assign(count, 0.0);
    // Without an upstream gradient nothing flows, not even from a row that is NaN.
    for (size_t t = 0; t < count && kl_coefficient_ != 0; ++t) {
      row->d_z[t] = kl_coefficient_ * (std::exp(s.z[t] - index_lse) - row->teacher[t]);
      index_k.load(row->tokens[t], key_head, s.key.data());
      add_scaled(params_.index->scale * row->d_z[t], s.key.data(), dim, s.d_index_query.data());
    }
    Rows(*params_.d_index_q).store(query, row->index_head, s.d_index_query.data());
  }

  // dk += scale sum dS q, dv += sum P dO, d_index_k += scale sum dz q_index.
  void add_to_keys(const std::vector<Row>& rows, int64_t count) {
    constexpr int64_t kColumns = 32;
    struct Part {
      Accumulator* sums;
      int64_t head, begin;
    };
    std::vector<Part> parts;
    const auto split = [&](Accumulator* sums, int64_t heads) {
      for (int64_t head = 0; head < heads; ++head) {
        for (int64_t begin = 0; begin < sums->dim(); begin += kColumns) parts.push_back({sums, head, begin});
      }
    };
    split(&d_k_, heads_.kv);
    split(&d_v_, heads_.kv);
    split(&d_index_k_, heads_.index_key);

    parallel_for(static_cast<int64_t>(parts.size()), [&](int64_t number) {
      const auto [sums, head, begin] = parts[static_cast<size_t>(number)];
      const int64_t end = std::min(begin + kColumns, sums->dim());
      for (int64_t at = 0; at < count; ++at) {
        const Row& row = rows[static_cast<size_t>(at)];
        if (sums == &d_index_k_) {
          if (heads_.index_key_head(row.index_head) != head) continue;
          scatter(row, row.d_z, row.index_query, params_.index->scale, head, begin, end, sums);
        } else if (heads_.kv_head(row.index_head) == head) {
          if (sums == &d_k_) scatter(row, row.d_scores, row.queries, params_.scale, head, begin, end, sums);
          if (sums == &d_v_) scatter(row, row.probabilities, row.d_outputs, 1.0, head, begin, end, sums);
        }
      }
    });
  }

  const BackwardParams& params_;
  Sequences sequences_;
  Heads heads_;
  double kl_coefficient_ = 0;
  Accumulator d_k_, d_v_, d_index_k_;
  std::vector<double> kl_;  // [Tq][Hi]
};

}  // namespace

void backward(const BackwardParams& params) { Backward(params).run(); }

}  // namespace openmsa::reference
