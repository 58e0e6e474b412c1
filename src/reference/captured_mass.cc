// How much of the dense attention of each row lies in its selected blocks, and how much as many blocks could hold.
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "reference/kl.h"
#include "reference/scores.h"
#include "reference/stages.h"
#include "reference/tensor_access.h"

namespace openmsa::reference {
namespace {

struct Scratch {
  std::vector<int64_t> all, selected, tokens;
  std::vector<double> query, scores, mass;  // [D], [visible tokens], [blocks]
};

// The most that `count` of the blocks hold together; NaN where any mass is NaN.
double largest_sum(std::vector<double> mass, size_t count) {
  for (const double m : mass) {
    if (std::isnan(m)) return m;
  }
  std::sort(mass.begin(), mass.end(), std::greater<>());
  double sum = 0;
  for (size_t at = 0; at < count; ++at) sum += mass[at];
  return sum;
}

}  // namespace

void captured_mass(const CapturedMassParams& params) {
  const Sequences sequences(params.layout, params.block_size);
  const Rows q(params.q), k(params.k);
  const Heads heads{q.heads(), k.heads(), params.indices.shape[0], 1};

  parallel_for<Scratch>(params.layout.tokens_q * heads.index, [&](int64_t row, Scratch& s) {
    const int64_t query = row / heads.index, index_head = row % heads.index;
    const QueryKeys keys = sequences.keys_of(query);
    selected_blocks(nullptr, index_head, query, keys, &s.all);
    selected_blocks(&params.indices, index_head, query, keys, &s.selected);
    visible_tokens(keys, s.all, &s.tokens);

    s.mass.assign(static_cast<size_t>(keys.blocks()), 0.0);
    for (int64_t h = 0; h < heads.group(); ++h) {
      load_heads(q, query, index_head * heads.group() + h, 1, &s.query);
      scaled_scores(s.query, k, heads.kv_head(index_head), s.tokens, params.scale, &s.scores);
      const double lse = log_sum_exp(s.scores.data(), keys.count);
      for (int64_t t = 0; t < keys.count; ++t) {
        const double p = probability(s.scores[static_cast<size_t>(t)], lse);
        s.mass[static_cast<size_t>(t / keys.block_size)] += p / static_cast<double>(heads.group());
      }
    }
    double share = 0;
    for (const int64_t number : s.selected) share += s.mass[static_cast<size_t>(number)];
    element(params.share, index_head, query) = static_cast<float>(share);
    element(params.best, index_head, query) = static_cast<float>(largest_sum(s.mass, s.selected.size()));
  });
}

}  // namespace openmsa::reference
