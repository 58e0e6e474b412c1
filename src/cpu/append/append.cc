// Writes the new rows of each request into its pages. Requests may share pages, and then the order of the rows decides
// what stays: a page's rows are written by one thread, in the order of the queries.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/append/kernels.h"
#include "cpu/common/tensor_rows.h"
#include "cpu/stages.h"
#include "host/elements.h"
#include "host/parallel.h"
#include "host/sequences.h"

namespace openmsa::cpu {
namespace {

// Consecutive queries and the consecutive rows of one page that they are written to.
struct Run {
  int64_t query, slot, length;
};

std::vector<Run> runs_of(const host::Sequences& sequences, int64_t page_size) {
  std::vector<Run> runs;
  for (int64_t query = 0; query < sequences.queries_end(); ++query) {
    const host::QueryKeys keys = sequences.keys_of(query);
    const host::KeyBlock own = keys.block(keys.blocks() - 1);
    if (own.length == 0) continue;  // padding, a row before the first key, or a page outside the pool
    const int64_t slot = own.first + own.length - 1;
    if (!runs.empty()) {
      Run& last = runs.back();
      const bool follows = query == last.query + last.length && slot == last.slot + last.length;
      if (follows && slot % page_size != 0) {
        ++last.length;
        continue;
      }
    }
    runs.push_back({query, slot, 1});
  }
  return runs;
}

// What goes into one of the caches.
class Rows {
 public:
  Rows(const Tensor& rows, const Tensor& cache, float factor)
      : rows_(rows), cache_(cache), factor_(factor), same_type_(rows.dtype == cache.dtype) {}

  int64_t bytes() const { return rows_.shape[1] * rows_.shape[2] * dtype_size(rows_.dtype); }

  void append(const Run& run) const {
    for (int64_t head = 0; head < rows_.shape[1]; ++head) {
      StoredRows from = token_rows(rows_, run.query, head);
      OutputRows to = output_token_rows(cache_, run.slot, head);
      for (int64_t at = 0; at < run.length; ++at) {
        if (same_type_) {
          std::memcpy(to.data, from.data, static_cast<size_t>(from.columns * dtype_size(from.dtype)));
        } else {
          append_quotients(from, factor_, static_cast<uint8_t*>(to.data));
        }
        from = rows_at(from, from.stride);
        to = rows_at(to, to.stride);
      }
    }
  }

 private:
  Tensor rows_, cache_;
  float factor_;
  bool same_type_;
};

}  // namespace

void append(const AppendParams& params) {
  const int64_t page_size = params.k_cache.shape[1];
  const host::Sequences sequences(params.layout, page_size);
  const Rows k(params.k, params.k_cache, host::factor_of(params.k_scale));
  const Rows v(params.v, params.v_cache, host::factor_of(params.v_scale));
  const Rows index_k(params.index_k, params.index_k_cache, 1.0F);

  std::vector<Run> runs = runs_of(sequences, page_size);
  const auto page_of = [&](const Run& run) { return run.slot / page_size; };
  std::stable_sort(runs.begin(), runs.end(), [&](const Run& a, const Run& b) { return page_of(a) < page_of(b); });
  std::vector<size_t> first_of_page;
  for (size_t at = 0; at < runs.size(); ++at) {
    if (at == 0 || page_of(runs[at]) != page_of(runs[at - 1])) first_of_page.push_back(at);
  }
  first_of_page.push_back(runs.size());

  const auto pages = static_cast<int64_t>(first_of_page.size()) - 1;
  const auto write_page = [&](int64_t page) {
    for (size_t at = first_of_page[static_cast<size_t>(page)]; at < first_of_page[static_cast<size_t>(page) + 1];
         ++at) {
      k.append(runs[at]);
      v.append(runs[at]);
      index_k.append(runs[at]);
    }
  };
  // The few rows of a decode step are written before other threads wake up.
  constexpr int64_t kWorthThreads = int64_t{1} << 18;
  if (params.layout.tokens_q * (k.bytes() + v.bytes() + index_k.bytes()) < kWorthThreads) {
    for (int64_t page = 0; page < pages; ++page) write_page(page);
  } else {
    host::parallel_for(pages, write_page);
  }
}

}  // namespace openmsa::cpu
