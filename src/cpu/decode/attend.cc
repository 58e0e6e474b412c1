#include "cpu/decode/attend.h"

#include <algorithm>

#include "host/parallel.h"

namespace openmsa::cpu {
namespace {

// Two blocks each at topk 16: many more parts than cores, at a merge that costs little beside two blocks.
constexpr int64_t kParts = 8;

// Partial results of a wave of items, in floats. More items than fit go in several waves.
constexpr int64_t kWaveFloats = int64_t{8} << 20;

// An index head of one tile.
struct Item {
  const QueryTile* tile = nullptr;
  int64_t index_head = 0;
  float* memory = nullptr;  // kParts states
  TilePlan plan;

  int64_t blocks_before(int64_t part) const { return static_cast<int64_t>(plan.blocks().size()) * part / kParts; }
};

void merge(const RunningSum& from, RunningSum* into, float* into_factor, float* from_factor) {
  const float largest = merged_largest(into->largest, from.largest);
  *into_factor = rescaling(into->largest, largest);
  *from_factor = rescaling(from.largest, largest);
  *into = {largest, into->sum * *into_factor + from.sum * *from_factor};
}

void merge_state(const AttendCall& call, int64_t tokens, const TileState& from, const TileState& into) {
  float into_factor = 1.0F, from_factor = 1.0F;
  for (int64_t row = 0; row < tokens * call.heads.group(); ++row) {
    merge(from.running[row], into.running + row, &into_factor, &from_factor);
    attend_merge(into.sums + row * call.sums_stride, into_factor, from.sums + row * call.sums_stride, from_factor,
                 call.sums_stride);
  }
  if (into.index_running == nullptr) return;
  for (int64_t t = 0; t < tokens; ++t) {
    merge(from.index_running[t], into.index_running + t, &into_factor, &from_factor);
  }
}

void run_wave(AttendCall& call, std::vector<Item>& wave) {
  const auto items = static_cast<int64_t>(wave.size());
  std::vector<TileState> states(static_cast<size_t>(items * kParts));
  host::parallel_for(items, [&](int64_t at) {
    Item& item = wave[static_cast<size_t>(at)];
    item.plan.build(call.sequences, call.params.indices, item.index_head, *item.tile);
  });
  host::parallel_for<TileWorker>(items * kParts, [&](int64_t at, TileWorker& worker) {
    const Item& item = wave[static_cast<size_t>(at / kParts)];
    const int64_t part = at % kParts, tokens = item.tile->queries;
    TileState& state = states[static_cast<size_t>(at)];
    state = TileState::start(call, tokens, item.memory + part * TileState::floats(call, tokens));
    worker.walk(call, item.index_head, *item.tile, item.plan, item.blocks_before(part), item.blocks_before(part + 1),
                state);
  });
  host::parallel_for<TileWorker>(items, [&](int64_t at, TileWorker& worker) {
    const Item& item = wave[static_cast<size_t>(at)];
    const TileState& state = states[static_cast<size_t>(at * kParts)];
    for (int64_t part = 1; part < kParts; ++part) {
      merge_state(call, item.tile->queries, states[static_cast<size_t>(at * kParts + part)], state);
    }
    worker.finish(call, item.index_head, *item.tile, item.plan, state);
  });
}

}  // namespace

void attend_few_queries(AttendCall& call, const std::vector<QueryTile>& tiles) {
  AlignedFloats memory;
  std::vector<Item> wave;
  const int64_t items = static_cast<int64_t>(tiles.size()) * call.heads.index;
  for (int64_t first = 0; first < items;) {
    wave.clear();
    std::vector<int64_t> offsets;
    int64_t used = 0;
    for (int64_t at = first; at < items; ++at) {
      const QueryTile& tile = tiles[static_cast<size_t>(at / call.heads.index)];
      const int64_t needed = kParts * TileState::floats(call, tile.queries);
      if (!wave.empty() && used + needed > kWaveFloats) break;
      offsets.push_back(used);
      used += needed;
      wave.emplace_back();
      wave.back().tile = &tile;
      wave.back().index_head = at % call.heads.index;
    }
    float* floats = memory.require(used);
    for (size_t at = 0; at < wave.size(); ++at) wave[at].memory = floats + offsets[at];
    run_wave(call, wave);
    first += static_cast<int64_t>(wave.size());
  }
}

}  // namespace openmsa::cpu
