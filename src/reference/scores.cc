#include "reference/scores.h"

namespace openmsa::reference {

void load_heads(const Rows& rows, int64_t query, int64_t first_head, int64_t count, std::vector<double>* heads) {
  heads->resize(static_cast<size_t>(count * rows.dim()));
  for (int64_t h = 0; h < count; ++h) rows.load(query, first_head + h, heads->data() + h * rows.dim());
}

void scaled_scores(const std::vector<double>& queries, const Rows& k, int64_t key_head,
                   const std::vector<int64_t>& tokens, double scale, std::vector<double>* scores) {
  const int64_t dim = k.dim();
  const auto heads = static_cast<int64_t>(queries.size()) / dim;
  const auto count = static_cast<int64_t>(tokens.size());
  scores->resize(static_cast<size_t>(heads * count));
  std::vector<double> key(static_cast<size_t>(dim));
  for (int64_t t = 0; t < count; ++t) {
    k.load(tokens[static_cast<size_t>(t)], key_head, key.data());
    for (int64_t h = 0; h < heads; ++h) {
      (*scores)[static_cast<size_t>(h * count + t)] = scale * dot(queries.data() + h * dim, key.data(), dim);
    }
  }
}

}  // namespace openmsa::reference
