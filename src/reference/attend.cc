// Attention over the visible tokens T of the selected blocks, and beside it the statistics of the index branch.
#include <vector>

#include "reference/kl.h"
#include "reference/scores.h"
#include "reference/stages.h"
#include "reference/tensor_access.h"

namespace openmsa::reference {
namespace {

struct Scratch {
  std::vector<int64_t> blocks, tokens;
  std::vector<double> queries, probabilities;   // [G][D], [G][T]
  std::vector<double> value, outputs;           // [Dv], [G][Dv]
  std::vector<double> index_query, z, teacher;  // [Di], [T], [T]
};

// Turns scores into probabilities in place and returns their log-sum-exp.
double softmax(double* scores, int64_t count) {
  const double lse = log_sum_exp(scores, count);
  for (int64_t t = 0; t < count; ++t) scores[t] = probability(scores[t], lse);
  return lse;
}

}  // namespace

void attend(const AttendParams& params) {
  const Sequences sequences(params.layout, params.block_size);
  const Rows q(params.q), k(params.k, factor_of(params.k_scale)), v(params.v, factor_of(params.v_scale));
  const Rows out(params.out);
  const Heads heads{q.heads(), k.heads(), params.index_heads,
                    params.index != nullptr ? Rows(params.index->index_k).heads() : 1};
  const int64_t group = heads.group(), rows = params.layout.tokens_q * heads.index;
  std::vector<double> kl(params.kl != nullptr ? static_cast<size_t>(rows) : 0);

  parallel_for<Scratch>(rows, [&](int64_t row, Scratch& s) {
    const int64_t query = row / heads.index, index_head = row % heads.index;
    const int64_t first_head = index_head * group, kv_head = heads.kv_head(index_head);
    const QueryKeys keys = sequences.keys_of(query);
    selected_blocks(params.indices, index_head, query, keys, &s.blocks);
    visible_tokens(keys, s.blocks, &s.tokens);
    const auto count = static_cast<int64_t>(s.tokens.size());

    load_heads(q, query, first_head, group, &s.queries);
    scaled_scores(s.queries, k, kv_head, s.tokens, params.scale, &s.probabilities);
    for (int64_t h = 0; h < group; ++h) {
      const double lse = softmax(s.probabilities.data() + h * count, count);
      if (params.lse != nullptr) element(*params.lse, first_head + h, query) = static_cast<float>(lse);
    }

    s.value.resize(static_cast<size_t>(v.dim()));
    s.outputs.assign(static_cast<size_t>(group * v.dim()), 0.0);
    for (int64_t t = 0; t < count; ++t) {
      v.load(s.tokens[static_cast<size_t>(t)], kv_head, s.value.data());
      for (int64_t h = 0; h < group; ++h) {
        const double p = s.probabilities[static_cast<size_t>(h * count + t)];
        add_scaled(p, s.value.data(), v.dim(), s.outputs.data() + h * v.dim());
      }
    }
    for (int64_t h = 0; h < group; ++h) out.store(query, first_head + h, s.outputs.data() + h * v.dim());

    if (params.index == nullptr) return;
    load_heads(Rows(params.index->index_q), query, index_head, 1, &s.index_query);
    scaled_scores(s.index_query, Rows(params.index->index_k), heads.index_key_head(index_head), s.tokens,
                  params.index->scale, &s.z);
    const double index_lse = log_sum_exp(s.z.data(), count);
    if (params.index_lse != nullptr) element(*params.index_lse, index_head, query) = static_cast<float>(index_lse);
    if (params.kl == nullptr) return;
    head_mean(s.probabilities, group, &s.teacher);
    kl[static_cast<size_t>(row)] = kl_divergence(s.teacher, s.z, index_lse);
  });

  if (params.kl != nullptr) element(*params.kl) = mean_kl(kl);
}

}  // namespace openmsa::reference
