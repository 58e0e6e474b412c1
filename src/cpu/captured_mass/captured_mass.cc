// How much of the dense attention of each row lies in its selected blocks, and how much as many blocks could hold.
//
// A tile of queries meets every block once: what stays of its scores is each row's log-sum-exp of each block, from
// which the masses follow when the last block is in.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "cpu/captured_mass/kernels.h"
#include "cpu/common/aligned.h"
#include "cpu/common/tensor_rows.h"
#include "cpu/plan/plan.h"
#include "cpu/stages.h"
#include "host/elements.h"
#include "host/heads.h"
#include "host/parallel.h"
#include "host/sequences.h"

namespace openmsa::cpu {
namespace {

// The log-sum-exp of all blocks of a row, in float64: -inf without mass, NaN with a NaN score.
double log_sum_exp(const RunningSum* blocks, int64_t count) {
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t b = 0; b < count; ++b) {
    if (std::isnan(blocks[b].largest)) return blocks[b].largest;
    largest = std::max<double>(largest, blocks[b].largest);
  }
  if (std::isinf(largest)) return largest;
  double sum = 0;
  for (int64_t b = 0; b < count; ++b) sum += blocks[b].sum * std::exp(blocks[b].largest - largest);
  return largest + std::log(sum);
}

// The block's part of a softmax with that log-sum-exp.
double mass_of(const RunningSum& block, double lse) {
  if (std::isnan(lse)) return lse;
  if (block.largest == -std::numeric_limits<float>::infinity()) return 0.0;
  // A score of +inf is no number less than another one, and leaves nothing to the others.
  if (std::isinf(lse)) return std::isinf(block.largest) ? std::numeric_limits<double>::quiet_NaN() : 0.0;
  return block.sum * std::exp(block.largest - lse);
}

// The most that `count` of the blocks hold together; NaN where any mass is NaN.
double largest_sum(std::vector<double>* mass, size_t count) {
  for (const double m : *mass) {
    if (std::isnan(m)) return m;
  }
  const auto end = mass->begin() + static_cast<std::ptrdiff_t>(count);
  std::partial_sort(mass->begin(), end, mass->end(), std::greater<>());
  double sum = 0;
  for (auto m = mass->begin(); m != end; ++m) sum += *m;
  return sum;
}

class MassWorker {
 public:
  void run(const CapturedMassParams& params, const host::Sequences& sequences, const host::Heads& heads,
           const QueryTile& tile, int64_t index_head) {
    const int64_t group = heads.group(), dim = params.q.shape[2], rows = tile.queries * group;
    const host::QueryKeys last = sequences.keys_of(tile.first_query + tile.queries - 1);
    const int64_t blocks = last.blocks();

    float* queries = queries_.require(rows * dim);
    counts_.resize(static_cast<size_t>(tile.queries));
    for (int64_t t = 0; t < tile.queries; ++t) {
      counts_[static_cast<size_t>(t)] = sequences.keys_of(tile.first_query + t).count;
      const auto scale = static_cast<float>(params.scale);
      mass_queries(head_rows(params.q, tile.first_query + t, index_head * group, scale), group,
                   queries + t * group * dim);
    }
    const int64_t score_stride = mass_score_stride(params.block_size);
    row_keys_.resize(static_cast<size_t>(rows));
    sums_.resize(static_cast<size_t>(rows * blocks));
    for (int64_t number = 0; number < blocks; ++number) {
      const host::KeyBlock block = last.block(number);
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t seen = counts_[static_cast<size_t>(row / group)] - number * params.block_size;
        row_keys_[static_cast<size_t>(row)] = std::clamp<int64_t>(seen, 0, block.length);
      }
      mass_block({.queries = queries,
                  .rows = rows,
                  .k = token_rows(params.k, block.first, heads.kv_head(index_head)),
                  .keys = block.length,
                  .row_keys = row_keys_.data(),
                  .panels = panels_.require(mass_panels(dim, score_stride)),
                  .scores = scores_.require(rows * score_stride),
                  .sums = sums_.data() + number,
                  .sums_stride = blocks});
    }
    for (int64_t t = 0; t < tile.queries; ++t)
      finish(params, sequences, group, tile.first_query + t, index_head, t, blocks);
  }

 private:
  void finish(const CapturedMassParams& params, const host::Sequences& sequences, int64_t group, int64_t query,
              int64_t index_head, int64_t t, int64_t stride) {
    const host::QueryKeys keys = sequences.keys_of(query);
    const int64_t blocks = keys.blocks();
    mass_.assign(static_cast<size_t>(blocks), 0.0);
    for (int64_t h = 0; h < group; ++h) {
      const RunningSum* row = sums_.data() + (t * group + h) * stride;
      const double lse = log_sum_exp(row, blocks);
      for (int64_t b = 0; b < blocks; ++b)
        mass_[static_cast<size_t>(b)] += mass_of(row[b], lse) / static_cast<double>(group);
    }
    host::selected_blocks(&params.indices, index_head, query, keys, &selected_);
    double share = 0;
    for (const int64_t number : selected_) share += mass_[static_cast<size_t>(number)];
    host::element(params.share, index_head, query) = static_cast<float>(share);
    host::element(params.best, index_head, query) = static_cast<float>(largest_sum(&mass_, selected_.size()));
  }

  AlignedFloats queries_, panels_, scores_;
  std::vector<int64_t> counts_, row_keys_, selected_;
  std::vector<RunningSum> sums_;  // [rows][blocks]
  std::vector<double> mass_;
};

}  // namespace

void captured_mass(const CapturedMassParams& params) {
  const host::Sequences sequences(params.layout, params.block_size);
  const host::Heads heads{params.q.shape[1], params.k.shape[1], params.indices.shape[0], 1};
  if (heads.index == 0) return;

  // Enough rows that packing a block is little beside their product, and no more sums than 8 MiB hold.
  constexpr int64_t kRows = 96, kSums = int64_t{1} << 20;
  const int64_t blocks = sequences.most_keys() / params.block_size + 1;
  const int64_t length = std::max<int64_t>(1, std::min(kRows, kSums / blocks) / heads.group());
  const std::vector<QueryTile> tiles = query_tiles(sequences, params.layout.tokens_q, length);
  const int64_t items = static_cast<int64_t>(tiles.size()) * heads.index;
  host::parallel_for<MassWorker>(items, [&](int64_t item, MassWorker& worker) {
    // Last tiles first: they see the most keys.
    const QueryTile& tile = tiles[static_cast<size_t>((items - 1 - item) / heads.index)];
    worker.run(params, sequences, heads, tile, item % heads.index);
  });
}

}  // namespace openmsa::cpu
