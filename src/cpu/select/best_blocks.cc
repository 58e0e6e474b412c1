#include "cpu/select/best_blocks.h"

#include <algorithm>
#include <limits>

namespace openmsa::cpu {

Candidates::Candidates(const SelectionRule& rule, const host::QueryKeys& keys) : blocks(keys.blocks()) {
  first_local = blocks - std::min(rule.local_blocks, blocks);
  const bool all_visible = keys.page_row == nullptr;
  const auto visible = [&](int64_t number) { return all_visible || keys.block(number).length > 0; };

  if (all_visible) {
    local = std::min(rule.topk, blocks - first_local);
  } else {
    for (int64_t number = blocks - 1; number >= first_local && local < rule.topk; --number) {
      local += visible(number) ? 1 : 0;
    }
  }
  int64_t free = rule.topk - local;

  const int64_t most_init = std::min(rule.init_blocks, first_local);
  if (all_visible) {
    init = init_end = std::min(free, most_init);
  } else {
    for (; init_end < most_init && init < free; ++init_end) init += visible(init_end) ? 1 : 0;
  }
  free -= init;

  best = std::min(free, first_local - most_init);
  scored_end = best > 0 ? first_local : init_end;
}

void BestBlocks::start(int64_t rows, int64_t capacity) {
  capacity_ = capacity;
  entries_.resize(static_cast<size_t>(rows * capacity));
  rows_.assign(static_cast<size_t>(rows), {});
  limits_.assign(static_cast<size_t>(rows), std::numeric_limits<float>::infinity());
}

void BestBlocks::open(int64_t row, int64_t slots) {
  rows_[static_cast<size_t>(row)].slots = static_cast<int32_t>(slots);
  if (slots > 0) limits_[static_cast<size_t>(row)] = std::numeric_limits<float>::quiet_NaN();
}

void BestBlocks::add_init(int64_t row, int32_t number, float score) {
  Row& state = rows_[static_cast<size_t>(row)];
  list(row)[state.init++] = {score, number};
  state.end = state.init;
}

void BestBlocks::insert(int64_t row, ScoredBlock block) {
  Row& state = rows_[static_cast<size_t>(row)];
  ScoredBlock* first = list(row) + state.init;
  ScoredBlock* end = list(row) + state.end;
  if (end - first < state.slots) {
    *end = block;
    ++state.end;
    if (++end - first < state.slots) return;
    std::sort(first, end, stands_before);  // full: sorted from now on
  } else {
    ScoredBlock* place = std::upper_bound(first, end, block, stands_before);
    std::move_backward(place, end - 1, end);
    *place = block;
  }
  limits_[static_cast<size_t>(row)] = end[-1].score;
}

void BestBlocks::append_init(int64_t row, std::vector<ScoredBlock>* into) const {
  into->insert(into->end(), list(row), list(row) + rows_[static_cast<size_t>(row)].init);
}

void BestBlocks::append_best(int64_t row, std::vector<ScoredBlock>* into) const {
  const Row& state = rows_[static_cast<size_t>(row)];
  into->insert(into->end(), list(row) + state.init, list(row) + state.end);
}

void choose(const Candidates& candidates, const host::QueryKeys& keys, std::vector<ScoredBlock>* init,
            std::vector<ScoredBlock>* others, std::vector<int64_t>* row) {
  const auto best = static_cast<size_t>(candidates.best);
  if (others->size() > best) {
    std::nth_element(others->begin(), others->begin() + candidates.best, others->end(), stands_before);
    others->resize(best);
  }
  init->insert(init->end(), others->begin(), others->end());
  std::sort(init->begin(), init->end(), stands_before);

  row->clear();
  for (const ScoredBlock& block : *init) row->push_back(block.number);
  const auto scored = static_cast<int64_t>(row->size());
  for (int64_t number = candidates.blocks - 1, left = candidates.local; left > 0; --number) {
    if (keys.block(number).length == 0) continue;
    row->push_back(number);
    --left;
  }
  std::reverse(row->begin() + scored, row->end());
}

}  // namespace openmsa::cpu
