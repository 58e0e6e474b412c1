// Which keys each query sees, in packed sequences and in paged requests.
#pragma once

#include <cstdint>
#include <vector>

#include "api/stages.h"

namespace openmsa::host {

// The visible keys of one block: rows first .. first + length - 1 of the key tensor (paged: counted through the pool).
// Length 0: none is visible.
struct KeyBlock {
  int64_t first = 0;
  int64_t length = 0;
};

// The keys that one query sees: the first `count` keys of its sequence, without those on pages outside the pool.
struct QueryKeys {
  int64_t count = 0;
  int64_t block_size = 128;
  int64_t first_row = 0;              // contiguous: row of the sequence's key 0
  const int32_t* page_row = nullptr;  // paged: the request's row of the block table
  int64_t pages = 0;                  // paged: size of the pool

  // Blocks that hold keys up to the query's position; the last one is the query's own.
  int64_t blocks() const { return (count + block_size - 1) / block_size; }
  KeyBlock block(int64_t number) const;
};

class Sequences {
 public:
  Sequences(const SequenceLayout& layout, int64_t block_size);

  QueryKeys keys_of(int64_t query) const;
  // The sequence that a query row belongs to, -1: none.
  int64_t sequence_of(int64_t query) const {
    return query < queries_end_ ? sequence_of_[static_cast<size_t>(query)] : -1;
  }

  int64_t most_keys() const { return most_keys_; }      // of any sequence
  int64_t queries_end() const { return queries_end_; }  // rows from here on are padding: they belong to no sequence

 private:
  struct Sequence {
    int64_t first_query = 0, queries = 0, first_key = 0, keys = 0;
  };
  Sequence sequence(int64_t number) const;

  SequenceLayout layout_;
  int64_t block_size_;
  int64_t most_keys_ = 0;
  int64_t queries_end_ = 0;
  std::vector<int64_t> sequence_of_;  // [queries_end]; -1 for rows of no sequence, which see no key
};

// The distinct visible blocks among a query's entries in `indices`, ascending, so that neither order nor repetition of
// the entries has an effect. Without indices: every visible block.
void selected_blocks(const Tensor* indices, int64_t index_head, int64_t query, const QueryKeys& keys,
                     std::vector<int64_t>* blocks);

// Rows of the visible keys of these blocks: the set T of docs/definition.md.
void visible_tokens(const QueryKeys& keys, const std::vector<int64_t>& blocks, std::vector<int64_t>* tokens);

}  // namespace openmsa::host
