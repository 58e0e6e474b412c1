// Which query tokens of a tile selected which key block.
//
// A tile is a run of query tokens of one sequence. Its plan lists the blocks that any of them selected, ascending, and
// for each block its tokens, ascending: a block is read once for all of them, and every token meets its blocks in the
// same order whatever the tile.
#pragma once

#include <cstdint>
#include <vector>

#include "api/stages.h"
#include "host/sequences.h"

namespace openmsa::cpu {

struct QueryTile {
  int64_t first_query = 0;
  int64_t queries = 0;
  int64_t sequence = -1;       // -1: rows of no sequence, which see no key
  int64_t sequence_first = 0;  // the first query of the run of the sequence's queries that the tile is cut from
  int64_t sequence_queries = 0;
};

// All rows [0, tokens_q), each run of one sequence's rows cut from its first one on into tiles of `length` (the last
// one may be shorter): where tiles begin depends on the sequence alone.
std::vector<QueryTile> query_tiles(const host::Sequences& sequences, int64_t tokens_q, int64_t length);

struct PlanEntry {
  int64_t token;  // offset from the tile's first query
  int64_t rank;   // of the block among those that this token selected, from 0
  int64_t keys;   // of the block that the token sees, > 0
};

struct PlanBlock {
  int64_t number;  // within the sequence's keys
  int64_t first;   // row of its first key (paged: counted through the pool)
  int64_t keys;    // the most that any of its tokens sees
  int64_t begin;   // its entries are [begin, end)
  int64_t end;
};

class TilePlan {
 public:
  // indices [Hi, Tq, topk], or null: every visible block.
  void build(const host::Sequences& sequences, const Tensor* indices, int64_t index_head, const QueryTile& tile);

  const std::vector<PlanBlock>& blocks() const { return blocks_; }
  const std::vector<PlanEntry>& entries() const { return entries_; }
  // How many blocks token `t` selected.
  int64_t blocks_of(int64_t t) const { return ranks_[static_cast<size_t>(t)]; }

 private:
  std::vector<uint64_t> marks_;  // [block][words of tokens]: duplicates count once, and both lists come out in order
  std::vector<host::QueryKeys> keys_;
  std::vector<int64_t> ranks_;
  std::vector<PlanBlock> blocks_;
  std::vector<PlanEntry> entries_;
};

}  // namespace openmsa::cpu
