#include "cpu/plan/plan.h"

#include <algorithm>
#include <bit>

#include "host/elements.h"

namespace openmsa::cpu {

std::vector<QueryTile> query_tiles(const host::Sequences& sequences, int64_t tokens_q, int64_t length) {
  std::vector<QueryTile> tiles;
  int64_t first = 0;
  while (first < tokens_q) {
    const int64_t sequence = sequences.sequence_of(first);
    int64_t end = first + 1;
    while (end < tokens_q && sequences.sequence_of(end) == sequence) ++end;
    for (int64_t at = first; at < end; at += length) {
      tiles.push_back({at, std::min(length, end - at), sequence, first, end - first});
    }
    first = end;
  }
  return tiles;
}

void TilePlan::build(const host::Sequences& sequences, const Tensor* indices, int64_t index_head,
                     const QueryTile& tile) {
  const int64_t words = (tile.queries + 63) / 64;
  keys_.clear();
  int64_t most_blocks = 0;
  for (int64_t t = 0; t < tile.queries; ++t) {
    keys_.push_back(sequences.keys_of(tile.first_query + t));
    most_blocks = std::max(most_blocks, keys_.back().blocks());
  }

  marks_.assign(static_cast<size_t>(most_blocks * words), 0);
  for (int64_t t = 0; t < tile.queries; ++t) {
    const int64_t visible = keys_[static_cast<size_t>(t)].blocks();
    const uint64_t bit = uint64_t{1} << (t % 64);
    const auto mark = [&](int64_t block) { marks_[static_cast<size_t>(block * words + t / 64)] |= bit; };
    if (indices == nullptr) {
      for (int64_t block = 0; block < visible; ++block) mark(block);
      continue;
    }
    for (int64_t slot = 0; slot < indices->shape[2]; ++slot) {
      const int64_t block = host::load_index(*indices, index_head, tile.first_query + t, slot);
      if (block >= 0 && block < visible) mark(block);
    }
  }

  blocks_.clear();
  entries_.clear();
  ranks_.assign(static_cast<size_t>(tile.queries), 0);
  for (int64_t number = 0; number < most_blocks; ++number) {
    PlanBlock block{number, 0, 0, static_cast<int64_t>(entries_.size()), 0};
    for (int64_t word = 0; word < words; ++word) {
      for (uint64_t left = marks_[static_cast<size_t>(number * words + word)]; left != 0; left &= left - 1) {
        const int64_t t = word * 64 + std::countr_zero(left);
        const host::KeyBlock seen = keys_[static_cast<size_t>(t)].block(number);
        if (seen.length == 0) continue;  // a page outside the pool
        block.first = seen.first;
        block.keys = std::max(block.keys, seen.length);
        entries_.push_back({t, ranks_[static_cast<size_t>(t)]++, seen.length});
      }
    }
    block.end = static_cast<int64_t>(entries_.size());
    if (block.end > block.begin) blocks_.push_back(block);
  }
}

}  // namespace openmsa::cpu
