#include "host/sequences.h"

#include <algorithm>

#include "host/elements.h"

namespace openmsa::host {

KeyBlock QueryKeys::block(int64_t number) const {
  if (number < 0 || number >= blocks()) return {};
  const int64_t start = number * block_size;
  const int64_t length = std::min(block_size, count - start);
  if (page_row == nullptr) return {first_row + start, length};
  const int64_t page = page_row[number];
  if (page < 0 || page >= pages) return {};
  return {page * block_size, length};
}

Sequences::Sequences(const SequenceLayout& layout, int64_t block_size) : layout_(layout), block_size_(block_size) {
  for (int64_t number = 0; number < layout.batch; ++number) {
    const Sequence s = sequence(number);
    queries_end_ = std::max(queries_end_, s.first_query + s.queries);
  }
  sequence_of_.assign(static_cast<size_t>(queries_end_), -1);
  // Last to first: a row that offsets out of order give to several sequences belongs to the first of them.
  for (int64_t number = layout.batch - 1; number >= 0; --number) {
    const Sequence s = sequence(number);
    std::fill_n(sequence_of_.begin() + s.first_query, s.queries, number);
    most_keys_ = std::max(most_keys_, s.keys);
  }
}

// Offsets clamp into their tensors and a sequence that falls is empty: values behind pointers are not trusted.
Sequences::Sequence Sequences::sequence(int64_t number) const {
  const auto within = [](int64_t offset, int64_t total) { return std::clamp<int64_t>(offset, 0, total); };
  const SequenceLayout& l = layout_;

  Sequence s;
  s.first_query = l.cu_seqlens_q != nullptr ? within(l.cu_seqlens_q[number], l.tokens_q) : 0;
  const int64_t query_end = l.cu_seqlens_q != nullptr ? within(l.cu_seqlens_q[number + 1], l.tokens_q) : l.tokens_q;
  s.queries = std::max<int64_t>(0, query_end - s.first_query);

  if (l.paged) {
    s.keys = within(l.seq_lens[number], l.max_pages * block_size_);
    return s;
  }
  if (l.k_starts != nullptr) {
    s.first_key = within(l.k_starts[number], l.tokens_k);
  } else if (l.cu_seqlens_k != nullptr) {
    s.first_key = within(l.cu_seqlens_k[number], l.tokens_k);
  }
  const int64_t key_end = l.cu_seqlens_k != nullptr ? within(l.cu_seqlens_k[number + 1], l.tokens_k) : l.tokens_k;
  s.keys = std::max<int64_t>(0, key_end - s.first_key);
  return s;
}

QueryKeys Sequences::keys_of(int64_t query) const {
  QueryKeys keys;
  keys.block_size = block_size_;
  const int64_t number = sequence_of(query);
  if (number < 0) return keys;
  const Sequence s = sequence(number);
  // Causal, aligned at the bottom right: the sequence's last query sees every key.
  const int64_t position = s.keys - s.queries + (query - s.first_query);
  keys.count = std::max<int64_t>(0, position + 1);
  keys.first_row = s.first_key;
  if (layout_.paged) {
    keys.page_row = layout_.block_table + number * layout_.block_table_stride;
    keys.pages = layout_.pages;
  }
  return keys;
}

void selected_blocks(const Tensor* indices, int64_t index_head, int64_t query, const QueryKeys& keys,
                     std::vector<int64_t>* blocks) {
  // Marks, not the entries themselves: there may be far more entries than blocks.
  std::vector<bool> selected(static_cast<size_t>(keys.blocks()), indices == nullptr);
  const int64_t slots = indices != nullptr ? indices->shape[2] : 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t number = load_index(*indices, index_head, query, slot);
    if (number >= 0 && number < keys.blocks()) selected[static_cast<size_t>(number)] = true;
  }
  blocks->clear();
  for (int64_t number = 0; number < keys.blocks(); ++number) {
    if (selected[static_cast<size_t>(number)] && keys.block(number).length > 0) blocks->push_back(number);
  }
}

void visible_tokens(const QueryKeys& keys, const std::vector<int64_t>& blocks, std::vector<int64_t>* tokens) {
  tokens->clear();
  for (const int64_t number : blocks) {
    const KeyBlock block = keys.block(number);
    for (int64_t t = 0; t < block.length; ++t) tokens->push_back(block.first + t);
  }
}

}  // namespace openmsa::host
