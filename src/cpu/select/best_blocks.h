// Which blocks a query may choose from, and the lists of its best ones while blocks pass by.
#pragma once

#include <cstdint>
#include <vector>

#include "host/sequences.h"

namespace openmsa::cpu {

struct SelectionRule {
  int64_t topk = 16, init_blocks = 0, local_blocks = 1;
};

// What a query's position alone decides. Blocks are numbered within its keys; invisible ones (pages outside the pool)
// take no slot.
struct Candidates {
  Candidates() = default;
  Candidates(const SelectionRule& rule, const host::QueryKeys& keys);

  int64_t blocks = 0;       // up to the query's own
  int64_t first_local = 0;  // from here on: the local blocks
  int64_t local = 0;        // how many of them get a slot, the last ones
  int64_t init_end = 0;     // init blocks before this one get a slot
  int64_t init = 0;         // how many
  int64_t best = 0;         // slots for the best-scored of the others before first_local
  int64_t scored_end = 0;   // scores are asked of blocks before this one
};

struct ScoredBlock {
  float score;
  int32_t number;
};

// The order of the contract. Scores are never NaN, and +0 equals -0.
inline bool stands_before(const ScoredBlock& a, const ScoredBlock& b) {
  return a.score > b.score || (a.score == b.score && a.number < b.number);
}

// Lists of a tile's rows: the init blocks met so far and the best of the others. Blocks come in ascending order, so
// that one which equals the worst of a full list is not taken.
class BestBlocks {
 public:
  // `capacity`: the most slots that a row's list may fill.
  void start(int64_t rows, int64_t capacity);

  // Row `row` from now on: how many slots its list has beside init blocks.
  void open(int64_t row, int64_t slots);

  void add_init(int64_t row, int32_t number, float score);

  // scores[row] for rows [first, end) of one block that is no init block.
  void add(int32_t number, const float* scores, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      if (!(scores[row] <= limits_[static_cast<size_t>(row)])) insert(row, {scores[row], number});
    }
  }

  // Row `row`'s init blocks, then the others, to the end of `list`; the latter in no certain order.
  void append_init(int64_t row, std::vector<ScoredBlock>* list) const;
  void append_best(int64_t row, std::vector<ScoredBlock>* list) const;

 private:
  struct Row {
    int32_t init = 0;   // entries before this one are init blocks
    int32_t end = 0;    // of the list
    int32_t slots = 0;  // entries that it may have beside init blocks
  };
  void insert(int64_t row, ScoredBlock block);
  ScoredBlock* list(int64_t row) { return entries_.data() + row * capacity_; }
  const ScoredBlock* list(int64_t row) const { return entries_.data() + row * capacity_; }

  int64_t capacity_ = 0;
  std::vector<ScoredBlock> entries_;  // [rows][capacity]
  std::vector<Row> rows_;
  std::vector<float> limits_;  // a score must exceed it; NaN while every block is taken
};

// The valid entries of a row of `indices`: init blocks and the best of the others in order, then the local blocks.
// Reorders the lists.
void choose(const Candidates& candidates, const host::QueryKeys& keys, std::vector<ScoredBlock>* init,
            std::vector<ScoredBlock>* others, std::vector<int64_t>* row);

}  // namespace openmsa::cpu
