#include "cpu/select/lse.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/common/aligned.h"
#include "cpu/common/tensor_rows.h"
#include "cpu/plan/plan.h"
#include "cpu/select/kernels.h"
#include "host/elements.h"
#include "host/heads.h"
#include "host/parallel.h"

namespace openmsa::cpu {
namespace {

// A query's own blocks are few: tiles long enough that several of their queries share a block that is packed.
constexpr int64_t kTileTokens = 256;

struct Worker {
  TilePlan plan;
  AlignedFloats queries, scratch;
  std::vector<float> factors;
  std::vector<RunningSum> running;
};

// What products of rows with this unit are worth, kept finite: 0 stays 0.
float factor_of_unit(double scale, float unit) {
  return static_cast<float>(std::min(scale * unit, static_cast<double>(std::numeric_limits<float>::max())));
}

}  // namespace

void write_index_lse(const SelectParams& params, const host::Sequences& sequences) {
  const int64_t index_heads = params.index_q.shape[1], dim = params.index_q.shape[2];
  const host::Heads heads{.index = index_heads, .index_key = params.index_k.shape[params.index_k.rank - 2]};
  const std::vector<QueryTile> tiles = query_tiles(sequences, params.layout.tokens_q, kTileTokens);

  host::parallel_for<Worker>(static_cast<int64_t>(tiles.size()) * index_heads, [&](int64_t item, Worker& worker) {
    const QueryTile& tile = tiles[static_cast<size_t>(item / index_heads)];
    const int64_t head = item % index_heads, key_head = heads.index_key_head(head);
    const auto tokens = static_cast<size_t>(tile.queries);
    worker.plan.build(sequences, &params.indices, head, tile);
    worker.factors.resize(tokens);
    worker.running.assign(tokens, {});
    const ScoreRows rows{worker.queries.require(tile.queries * dim), tile.queries, dim};
    float* scratch = worker.scratch.require(select_lse_scratch_floats(params.block_size, dim));
    select_load_queries(token_rows(params.index_q, tile.first_query, head), tile.queries, worker.queries.require(0),
                        dim, worker.factors.data(), 1);
    for (float& unit : worker.factors) unit = factor_of_unit(params.scale, unit);

    for (const PlanBlock& block : worker.plan.blocks()) {
      select_add_scores(rows, worker.factors.data(), token_rows(params.index_k, block.first, key_head), block.keys,
                        worker.plan.entries().data() + block.begin, block.end - block.begin, scratch,
                        worker.running.data());
    }
    for (int64_t t = 0; t < tile.queries; ++t) {
      host::element(*params.index_lse, head, tile.first_query + t) =
          log_sum_exp(worker.running[static_cast<size_t>(t)]);
    }
  });
}

}  // namespace openmsa::cpu
