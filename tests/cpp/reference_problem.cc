#include "reference_problem.h"

namespace openmsa::testing {
namespace {

const int32_t* pointer(const std::vector<int32_t>& values) { return values.empty() ? nullptr : values.data(); }

Tensor float_tensor(const std::vector<float>& values, std::initializer_list<int64_t> shape) {
  return make_tensor(values.data(), OPENMSA_FLOAT32, shape);
}

std::vector<double> widen(const std::vector<float>& values) { return {values.begin(), values.end()}; }

// The query's sequence: its keys' first row, its visible keys.
struct Span {
  int64_t first = 0, visible = 0;
};

Span span_of(const Shape& shape, int64_t query) {
  const bool packed = !shape.cu_seqlens_q.empty();
  const size_t batch = packed ? shape.cu_seqlens_q.size() - 1 : 1;
  for (size_t b = 0; b < batch; ++b) {
    const int64_t q_begin = packed ? shape.cu_seqlens_q[b] : 0,
                  q_end = packed ? shape.cu_seqlens_q[b + 1] : shape.tokens_q;
    if (query < q_begin || query >= q_end) continue;
    int64_t k_begin = packed ? shape.cu_seqlens_k[b] : 0;
    const int64_t k_end = packed ? shape.cu_seqlens_k[b + 1] : shape.tokens_k;
    if (!shape.k_starts.empty()) k_begin = shape.k_starts[b];
    const int64_t last = (k_end - k_begin) - (q_end - q_begin) + (query - q_begin);
    return {k_begin, std::max<int64_t>(0, last + 1)};
  }
  return {};
}

}  // namespace

std::vector<float> random_values(int64_t count, uint64_t seed, float limit) {
  std::vector<float> values(static_cast<size_t>(count));
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (float& value : values) {
    state += 0x9e3779b97f4a7c15u;  // splitmix64
    uint64_t bits = state;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    bits ^= bits >> 31;
    value = limit * (static_cast<float>(bits >> 40) / 8388608.0F - 1.0F);
  }
  return values;
}

Problem::Problem(const Shape& problem_shape, uint64_t seed) : shape(problem_shape) {
  const Shape& s = shape;
  q = random_values(s.tokens_q * s.heads_q * s.dim, 10 * seed);
  k = random_values(s.tokens_k * s.heads_kv * s.dim, 10 * seed + 1);
  v = random_values(s.tokens_k * s.heads_kv * s.v_dim, 10 * seed + 2);
  index_q = random_values(s.tokens_q * s.index_heads * s.index_dim, 10 * seed + 3);
  index_k = random_values(s.tokens_k * s.index_key_heads * s.index_dim, 10 * seed + 4);
  d_out = random_values(s.tokens_q * s.heads_q * s.v_dim, 10 * seed + 5);
  // Every output starts as NaN, so that what is not written shows.
  indices.assign(static_cast<size_t>(s.index_heads * s.tokens_q * s.topk), 12345);
  out.assign(static_cast<size_t>(s.tokens_q * s.heads_q * s.v_dim), NAN);
  lse.assign(static_cast<size_t>(s.heads_q * s.tokens_q), NAN);
  index_lse.assign(static_cast<size_t>(s.index_heads * s.tokens_q), NAN);
  selected_lse = index_lse;
  d_q.assign(q.size(), NAN);
  d_k.assign(k.size(), NAN);
  d_v.assign(v.size(), NAN);
  d_index_q.assign(index_q.size(), NAN);
  d_index_k.assign(index_k.size(), NAN);
}

SequenceLayout Problem::layout() const {
  SequenceLayout l;
  l.batch = shape.cu_seqlens_q.empty() ? 1 : static_cast<int64_t>(shape.cu_seqlens_q.size()) - 1;
  l.tokens_q = shape.tokens_q;
  l.tokens_k = shape.tokens_k;
  l.cu_seqlens_q = pointer(shape.cu_seqlens_q);
  l.cu_seqlens_k = pointer(shape.cu_seqlens_k);
  l.k_starts = pointer(shape.k_starts);
  return l;
}

SelectParams Problem::select_params() {
  const Shape& s = shape;
  SelectParams p;
  p.layout = layout();
  p.index_q = float_tensor(index_q, {s.tokens_q, s.index_heads, s.index_dim});
  p.index_k = float_tensor(index_k, {s.tokens_k, s.index_key_heads, s.index_dim});
  p.topk = s.topk;
  p.init_blocks = s.init_blocks;
  p.local_blocks = s.local_blocks;
  p.block_size = s.block_size;
  p.scale = 1 / std::sqrt(static_cast<double>(s.index_dim));
  p.indices = make_tensor(indices.data(), OPENMSA_INT32, {s.index_heads, s.tokens_q, s.topk});
  selected_lse_ = float_tensor(selected_lse, {s.index_heads, s.tokens_q});
  p.index_lse = &selected_lse_;
  return p;
}

AttendParams Problem::attend_params() {
  const Shape& s = shape;
  AttendParams p;
  p.layout = layout();
  p.q = float_tensor(q, {s.tokens_q, s.heads_q, s.dim});
  p.k = float_tensor(k, {s.tokens_k, s.heads_kv, s.dim});
  p.v = float_tensor(v, {s.tokens_k, s.heads_kv, s.v_dim});
  indices_ = make_tensor(indices.data(), OPENMSA_INT32, {s.index_heads, s.tokens_q, s.topk});
  if (!s.warmup) p.indices = &indices_;
  p.index_heads = s.index_heads;
  p.block_size = s.block_size;
  p.scale = 1 / std::sqrt(static_cast<double>(s.dim));
  index_ = {float_tensor(index_q, {s.tokens_q, s.index_heads, s.index_dim}),
            float_tensor(index_k, {s.tokens_k, s.index_key_heads, s.index_dim}),
            1 / std::sqrt(static_cast<double>(s.index_dim))};
  p.index = &index_;
  p.out = float_tensor(out, {s.tokens_q, s.heads_q, s.v_dim});
  lse_ = float_tensor(lse, {s.heads_q, s.tokens_q});
  index_lse_ = float_tensor(index_lse, {s.index_heads, s.tokens_q});
  kl_ = make_tensor(&kl, OPENMSA_FLOAT32, {});
  p.lse = &lse_;
  p.index_lse = &index_lse_;
  p.kl = &kl_;
  return p;
}

BackwardParams Problem::backward_params() {
  const AttendParams forward = attend_params();
  BackwardParams p;
  p.layout = forward.layout;
  p.q = forward.q;
  p.k = forward.k;
  p.v = forward.v;
  p.out = forward.out;
  p.lse = lse_;
  p.indices = forward.indices;
  p.index_heads = forward.index_heads;
  p.block_size = forward.block_size;
  p.scale = forward.scale;
  p.deterministic = true;
  p.index = forward.index;
  p.index_lse = &index_lse_;
  d_out_ = forward.out;
  d_out_.data = d_out.data();
  d_kl_ = make_tensor(&d_kl, OPENMSA_FLOAT32, {});
  p.d_out = &d_out_;
  p.d_kl = &d_kl_;
  const auto gradient = [](Tensor like, std::vector<float>* values) {
    like.data = values->data();
    return like;
  };
  d_q_ = gradient(p.q, &d_q);
  d_k_ = gradient(p.k, &d_k);
  d_v_ = gradient(p.v, &d_v);
  d_index_q_ = gradient(index_.index_q, &d_index_q);
  d_index_k_ = gradient(index_.index_k, &d_index_k);
  p.d_q = &d_q_;
  p.d_k = &d_k_;
  p.d_v = &d_v_;
  p.d_index_q = &d_index_q_;
  p.d_index_k = &d_index_k_;
  backward_kl_ = make_tensor(&backward_kl, OPENMSA_FLOAT32, {});
  p.kl = &backward_kl_;
  return p;
}

void Problem::run_forward() {
  if (!shape.warmup) reference_backend().select(select_params());
  reference_backend().attend(attend_params());
}

void Problem::run_backward() { reference_backend().backward(backward_params()); }

Inputs::Inputs(const Problem& p)
    : q(widen(p.q)), k(widen(p.k)), v(widen(p.v)), index_q(widen(p.index_q)), index_k(widen(p.index_k)) {}

std::vector<int64_t> oracle_visible(const Problem& problem, int64_t query) {
  const Span span = span_of(problem.shape, query);
  std::vector<int64_t> rows;
  for (int64_t j = 0; j < span.visible; ++j) rows.push_back(span.first + j);
  return rows;
}

std::vector<int64_t> oracle_tokens(const Problem& problem, int64_t query, int64_t index_head) {
  const Shape& s = problem.shape;
  const int32_t* entries = problem.indices.data() + (index_head * s.tokens_q + query) * s.topk;
  const Span span = span_of(s, query);
  std::vector<int64_t> tokens;
  for (int64_t j = 0; j < span.visible; ++j) {
    const bool selected = std::find(entries, entries + s.topk, j / s.block_size) != entries + s.topk;
    if (s.warmup || selected) tokens.push_back(span.first + j);
  }
  return tokens;
}

double oracle_score(const std::vector<double>& a, int64_t row_a, const std::vector<double>& b, int64_t row_b,
                    int64_t dim) {
  double sum = 0;
  for (int64_t d = 0; d < dim; ++d)
    sum += a[static_cast<size_t>(row_a * dim + d)] * b[static_cast<size_t>(row_b * dim + d)];
  return sum / std::sqrt(static_cast<double>(dim));
}

std::vector<double> oracle_softmax(const std::vector<double>& scores, double* lse) {
  const double shift = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (const double score : scores) sum += std::exp(score - shift);
  *lse = std::log(sum) + shift;
  std::vector<double> probabilities;
  for (const double score : scores) probabilities.push_back(std::exp(score - shift) / sum);
  return probabilities;
}

Oracle oracle_forward(const Problem& problem, const Inputs& inputs) {
  const Shape& s = problem.shape;
  Oracle result;
  result.out.assign(static_cast<size_t>(s.tokens_q * s.heads_q * s.v_dim), 0.0);
  result.lse.assign(static_cast<size_t>(s.heads_q * s.tokens_q), -INFINITY);
  result.index_lse.assign(static_cast<size_t>(s.index_heads * s.tokens_q), -INFINITY);
  for (int64_t i = 0; i < s.tokens_q; ++i) {
    for (int64_t r = 0; r < s.index_heads; ++r) {
      const std::vector<int64_t> tokens = oracle_tokens(problem, i, r);
      if (tokens.empty()) continue;
      std::vector<double> teacher(tokens.size(), 0.0), scores;
      const int64_t group = s.heads_q / s.index_heads;
      for (int64_t h = r * group; h < (r + 1) * group; ++h) {
        const int64_t kv = h / (s.heads_q / s.heads_kv);
        scores.clear();
        for (const int64_t j : tokens)
          scores.push_back(oracle_score(inputs.q, i * s.heads_q + h, inputs.k, j * s.heads_kv + kv, s.dim));
        const auto p = oracle_softmax(scores, &result.lse[static_cast<size_t>(h * s.tokens_q + i)]);
        for (size_t t = 0; t < tokens.size(); ++t) {
          teacher[t] += p[t] / static_cast<double>(group);
          for (int64_t d = 0; d < s.v_dim; ++d) {
            result.out[static_cast<size_t>((i * s.heads_q + h) * s.v_dim + d)] +=
                p[t] * inputs.v[static_cast<size_t>((tokens[t] * s.heads_kv + kv) * s.v_dim + d)];
          }
        }
      }
      const int64_t key_head = r / (s.index_heads / s.index_key_heads);
      scores.clear();
      for (const int64_t j : tokens) {
        scores.push_back(oracle_score(inputs.index_q, i * s.index_heads + r, inputs.index_k,
                                      j * s.index_key_heads + key_head, s.index_dim));
      }
      const auto student = oracle_softmax(scores, &result.index_lse[static_cast<size_t>(r * s.tokens_q + i)]);
      for (size_t t = 0; t < tokens.size(); ++t) result.kl += teacher[t] * std::log(teacher[t] / student[t]);
    }
  }
  result.kl /= static_cast<double>(s.index_heads * s.tokens_q);
  return result;
}

}  // namespace openmsa::testing
