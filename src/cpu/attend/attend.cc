// Attention over selected blocks. A key block is packed once for all query tokens of a tile that selected it, and every
// query row meets its blocks in ascending order with a running softmax, so that tiles change no bit.
#include "cpu/decode/attend.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/attend/tile.h"
#include "cpu/stages.h"
#include "host/elements.h"
#include "host/parallel.h"

namespace openmsa::cpu {
namespace {

// Query tokens of a tile: enough that about kPairs of them meet in a block when selections have nothing in common, so
// that packing it costs little beside its products. Longer ones gain nothing, and leave fewer items for threads to
// share. What a tile accumulates stays within 4 MB.
int64_t tile_length(const AttendCall& call) {
  constexpr int64_t kPairs = 32, kShortest = 64, kLongest = 512, kMostFloats = int64_t{1} << 20;
  const AttendParams& p = call.params;
  const int64_t blocks = call.sequences.most_keys() / p.block_size + 1;
  const int64_t selected = p.indices != nullptr ? std::clamp<int64_t>(p.indices->shape[2], 1, blocks) : blocks;
  const int64_t length = std::clamp(kPairs * blocks / selected, kShortest, kLongest);
  return std::clamp<int64_t>(kMostFloats / (call.heads.group() * call.sums_stride), 1, length);
}

}  // namespace

void attend(const AttendParams& params) {
  AttendCall call(params);
  std::vector<QueryTile> long_tiles, short_tiles;
  for (const QueryTile& tile : query_tiles(call.sequences, params.layout.tokens_q, tile_length(call))) {
    const bool few = tile.sequence >= 0 && tile.sequence_queries <= kFewQueries;
    (few ? short_tiles : long_tiles).push_back(tile);
  }

  // Last tiles first: they see the most keys.
  const int64_t index_heads = call.heads.index, items = static_cast<int64_t>(long_tiles.size()) * index_heads;
  host::parallel_for<TileWorker>(items, [&](int64_t item, TileWorker& worker) {
    const QueryTile& tile = long_tiles[static_cast<size_t>((items - 1 - item) / index_heads)];
    const int64_t index_head = item % index_heads;
    worker.plan.build(call.sequences, params.indices, index_head, tile);
    const TileState state = TileState::start(call, tile.queries, worker.own_state(call, tile.queries));
    worker.walk(call, index_head, tile, worker.plan, 0, static_cast<int64_t>(worker.plan.blocks().size()), state);
    worker.finish(call, index_head, tile, worker.plan, state);
  });
  attend_few_queries(call, short_tiles);

  if (params.kl == nullptr) return;
  const double sum = std::accumulate(call.kl.begin(), call.kl.end(), 0.0);
  host::element(*params.kl) = call.kl.empty() ? 0.0F : static_cast<float>(sum / static_cast<double>(call.kl.size()));
}

}  // namespace openmsa::cpu
