// Selection: the blocks that each (query, index head) attends to.
#include "reference/select.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "reference/scores.h"
#include "reference/stages.h"
#include "reference/tensor_access.h"

namespace openmsa::reference {
namespace {

// The block scores of one query for the index heads [first_head, first_head + heads), which share an index key head:
// scores[h][block].
void score_blocks(const SelectParams& params, const QueryKeys& keys, int64_t query, int64_t first_head, int64_t heads,
                  std::vector<double>* scores) {
  const Rows index_q(params.index_q), index_k(params.index_k);
  const int64_t dim = index_q.dim(), blocks = keys.blocks();
  const int64_t key_head = Heads{.index = index_q.heads(), .index_key = index_k.heads()}.index_key_head(first_head);
  std::vector<double> queries, key(static_cast<size_t>(dim));
  load_heads(index_q, query, first_head, heads, &queries);

  scores->assign(static_cast<size_t>(heads * blocks), -std::numeric_limits<double>::infinity());
  for (int64_t number = 0; number < blocks; ++number) {
    const KeyBlock block = keys.block(number);
    for (int64_t t = 0; t < block.length; ++t) {
      index_k.load(block.first + t, key_head, key.data());
      for (int64_t h = 0; h < heads; ++h) {
        const double score = params.scale * dot(queries.data() + h * dim, key.data(), dim);
        double& best = (*scores)[static_cast<size_t>(h * blocks + number)];
        if (score > best) best = score;  // never true for NaN
      }
    }
    if (block.length == 0) {
      for (int64_t h = 0; h < heads; ++h) (*scores)[static_cast<size_t>(h * blocks + number)] = std::nan("");
    }
  }
}

// The chosen blocks in the order of the contract: scored ones by score, then the forced local ones ascending.
struct Choice {
  std::vector<int64_t> scored, local;
  std::vector<int64_t> others;  // candidates for the slots that forced blocks leave
};

void choose_blocks(const SelectParams& params, const double* scores, int64_t blocks, Choice* choice) {
  const auto visible = [&](int64_t number) { return !std::isnan(scores[number]); };
  const auto better = [&](int64_t a, int64_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; };
  const int64_t first_local = blocks - std::min(params.local_blocks, blocks);
  auto free_slots = [&] { return params.topk - static_cast<int64_t>(choice->local.size() + choice->scored.size()); };
  choice->scored.clear();
  choice->local.clear();
  choice->others.clear();

  for (int64_t number = blocks - 1; number >= first_local && free_slots() > 0; --number) {
    if (visible(number)) choice->local.push_back(number);
  }
  std::reverse(choice->local.begin(), choice->local.end());

  for (int64_t number = 0; number < first_local; ++number) {
    if (!visible(number)) continue;
    if (number >= params.init_blocks) {
      choice->others.push_back(number);
    } else if (free_slots() > 0) {
      choice->scored.push_back(number);
    }
  }
  const int64_t taken = std::min<int64_t>(free_slots(), static_cast<int64_t>(choice->others.size()));
  std::partial_sort(choice->others.begin(), choice->others.begin() + taken, choice->others.end(), better);
  choice->scored.insert(choice->scored.end(), choice->others.begin(), choice->others.begin() + taken);
  std::sort(choice->scored.begin(), choice->scored.end(), better);
}

struct Scratch {
  std::vector<double> scores, query, token_scores;
  std::vector<int64_t> chosen, tokens;
  Choice choice;
};

}  // namespace

std::vector<double> block_scores(const SelectParams& params, int64_t index_head, int64_t query) {
  const Sequences sequences(params.layout, params.block_size);
  std::vector<double> scores;
  score_blocks(params, sequences.keys_of(query), query, index_head, 1, &scores);
  return scores;
}

void select(const SelectParams& params) {
  const Sequences sequences(params.layout, params.block_size);
  const Rows index_q(params.index_q), index_k(params.index_k);
  const int64_t shared = index_q.heads() / index_k.heads();  // index heads of one index key head

  parallel_for<Scratch>(params.layout.tokens_q * index_k.heads(), [&](int64_t item, Scratch& s) {
    const int64_t query = item / index_k.heads(), key_head = item % index_k.heads();
    const QueryKeys keys = sequences.keys_of(query);
    score_blocks(params, keys, query, key_head * shared, shared, &s.scores);
    for (int64_t h = 0; h < shared; ++h) {
      const int64_t index_head = key_head * shared + h;
      choose_blocks(params, s.scores.data() + h * keys.blocks(), keys.blocks(), &s.choice);
      s.chosen = s.choice.scored;
      s.chosen.insert(s.chosen.end(), s.choice.local.begin(), s.choice.local.end());
      for (int64_t slot = 0; slot < params.topk; ++slot) {
        const bool filled = slot < static_cast<int64_t>(s.chosen.size());
        store_index(params.indices, index_head, query, slot, filled ? s.chosen[static_cast<size_t>(slot)] : -1);
      }
      if (params.index_lse == nullptr) continue;
      std::sort(s.chosen.begin(), s.chosen.end());
      visible_tokens(keys, s.chosen, &s.tokens);
      load_heads(index_q, query, index_head, 1, &s.query);
      scaled_scores(s.query, index_k, key_head, s.tokens, params.scale, &s.token_scores);
      element(*params.index_lse, index_head, query) =
          static_cast<float>(log_sum_exp(s.token_scores.data(), static_cast<int64_t>(s.tokens.size())));
    }
  });
}

}  // namespace openmsa::reference
