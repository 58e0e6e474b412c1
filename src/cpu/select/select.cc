// Selection. A tile of queries walks the key blocks: its products with a block leave one score a row, of which the
// row's list keeps the best. Few queries over many keys are the same walk, cut into ranges of blocks whose lists are
// merged.
#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/common/aligned.h"
#include "cpu/common/tensor_rows.h"
#include "cpu/select/best_blocks.h"
#include "cpu/select/kernels.h"
#include "cpu/select/lse.h"
#include "cpu/stages.h"
#include "host/elements.h"
#include "host/heads.h"
#include "host/parallel.h"

namespace openmsa::cpu {
namespace {

// Rows (query, index head) of a tile: packing a block of keys costs as much as kPackingRows of them, and their queries
// stay in the second level of the caches.
constexpr int64_t kTileRows = 256, kPackingRows = 5;
// Blocks that are scored before their scores go to the lists.
constexpr int64_t kBatch = 16;

struct SelectCall {
  explicit SelectCall(const SelectParams& select_params)
      : params(select_params),
        rule{params.topk, params.init_blocks, params.local_blocks},
        sequences(params.layout, params.block_size) {}

  const SelectParams& params;
  SelectionRule rule;
  host::Sequences sequences;
};

// Queries x index heads that read the same index key head.
struct ScoreTile {
  QueryTile tokens;
  int64_t key_head = 0, first_head = 0, heads = 1;
  int64_t blocks = 0;      // before this one, some query asks for scores
  int64_t first_item = 0;  // it is cut into items [first_item, end_item)
  int64_t end_item = 0;

  int64_t rows() const { return tokens.queries * heads; }
  int64_t cost() const { return blocks * (rows() + kPackingRows); }
};

// Blocks [first, end) for one tile.
struct ScoreItem {
  int64_t tile = 0, first = 0, end = 0;
};

std::vector<ScoreTile> score_tiles(const SelectCall& call) {
  const Tensor& index_q = call.params.index_q;
  const int64_t key_heads = call.params.index_k.shape[call.params.index_k.rank - 2];
  const int64_t shared = index_q.shape[1] / key_heads, heads = std::min(shared, kTileRows);
  std::vector<ScoreTile> tiles;
  for (const QueryTile& tokens : query_tiles(call.sequences, call.params.layout.tokens_q, kTileRows / heads)) {
    int64_t blocks = 0;
    for (int64_t t = 0; t < tokens.queries; ++t) {
      const Candidates candidates(call.rule, call.sequences.keys_of(tokens.first_query + t));
      blocks = std::max(blocks, candidates.scored_end);
    }
    for (int64_t key_head = 0; key_head < key_heads; ++key_head) {
      for (int64_t head = 0; head < shared; head += heads) {
        tiles.push_back({tokens, key_head, key_head * shared + head, std::min(heads, shared - head), blocks});
      }
    }
  }
  // The longest first.
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const ScoreTile& a, const ScoreTile& b) { return a.cost() > b.cost(); });
  return tiles;
}

// Cuts tiles where there would be too few of them to share among threads. A list for each range costs little beside
// ranges of this length.
std::vector<ScoreItem> score_items(const SelectCall& call, std::vector<ScoreTile>* tiles) {
  constexpr int64_t kItems = 64, kLeastKeys = 4096;
  const int64_t least_blocks = std::max(kLeastKeys / call.params.block_size, 2 * call.rule.topk);
  const int64_t total = std::accumulate(tiles->begin(), tiles->end(), int64_t{0},
                                        [](int64_t sum, const ScoreTile& tile) { return sum + tile.cost(); });
  const int64_t fair = std::max<int64_t>(1, total / kItems);
  std::vector<ScoreItem> items;
  for (ScoreTile& tile : *tiles) {
    const int64_t wanted = (tile.cost() + fair - 1) / fair;
    const int64_t ranges = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, tile.blocks / least_blocks));
    tile.first_item = static_cast<int64_t>(items.size());
    tile.end_item = tile.first_item + ranges;
    for (int64_t range = 0; range < ranges; ++range) {
      items.push_back({&tile - tiles->data(), tile.blocks * range / ranges, tile.blocks * (range + 1) / ranges});
    }
  }
  return items;
}

// One thread's view of a tile.
class TileScorer {
 public:
  // Scores the item's blocks into lists.
  void score(const SelectCall& call, const ScoreTile& tile, const ScoreItem& item, BestBlocks* lists);

  // Writes the tile's rows of indices from the lists of its items.
  void finish(const SelectCall& call, const ScoreTile& tile, const BestBlocks* lists);

 private:
  struct Token {
    host::QueryKeys keys;
    Candidates candidates;
  };
  void look_at(const SelectCall& call, const ScoreTile& tile);
  void load_queries(const SelectCall& call, const ScoreTile& tile);
  void add_block(const SelectCall& call, const ScoreTile& tile, int64_t number);
  void score_batch(const SelectCall& call, const ScoreTile& tile, BestBlocks* lists);

  std::vector<Token> tokens_;
  int64_t init_end_ = 0;      // of any token
  int64_t first_asking_ = 0;  // token
  AlignedFloats queries_, scratch_;
  std::vector<float> units_, scores_;
  std::vector<int32_t> limits_;  // [kBatch][rows]
  std::vector<ScoreBlock> batch_;
  std::vector<int32_t> numbers_;  // of the batch's blocks
  std::vector<ScoredBlock> init_, others_;
  std::vector<int64_t> row_;
};

void TileScorer::look_at(const SelectCall& call, const ScoreTile& tile) {
  tokens_.clear();
  init_end_ = 0;
  for (int64_t t = 0; t < tile.tokens.queries; ++t) {
    const host::QueryKeys keys = call.sequences.keys_of(tile.tokens.first_query + t);
    tokens_.push_back({keys, Candidates(call.rule, keys)});
    init_end_ = std::max(init_end_, tokens_.back().candidates.init_end);
  }
}

void TileScorer::load_queries(const SelectCall& call, const ScoreTile& tile) {
  const int64_t dim = call.params.index_q.shape[2], rows = tile.rows();
  float* queries = queries_.require(rows * dim);
  scratch_.require(select_scratch_floats(rows, dim));
  units_.resize(static_cast<size_t>(rows));
  scores_.resize(static_cast<size_t>(kBatch * rows));
  limits_.resize(static_cast<size_t>(kBatch * rows));
  for (int64_t h = 0; h < tile.heads; ++h) {
    select_load_queries(token_rows(call.params.index_q, tile.tokens.first_query, tile.first_head + h),
                        tile.tokens.queries, queries + h * dim, tile.heads * dim, units_.data() + h, tile.heads);
  }
}

// The batch gets one more block, for the queries whose local blocks begin after it: the last ones of the tile.
void TileScorer::add_block(const SelectCall& call, const ScoreTile& tile, int64_t number) {
  while (tokens_[static_cast<size_t>(first_asking_)].candidates.first_local <= number) ++first_asking_;
  const host::KeyBlock seen = tokens_.back().keys.block(number);
  if (seen.length == 0) return;
  ScoreBlock block{token_rows(call.params.index_k, seen.first, tile.key_head), seen.length, first_asking_ * tile.heads,
                   nullptr};
  // Only an own block that is not forced is seen in part.
  if (tokens_[static_cast<size_t>(first_asking_)].keys.block(number).length < call.params.block_size) {
    int32_t* limits = limits_.data() + static_cast<int64_t>(batch_.size()) * tile.rows();
    for (int64_t row = block.first_row; row < tile.rows(); ++row) {
      limits[row] = static_cast<int32_t>(tokens_[static_cast<size_t>(row / tile.heads)].keys.block(number).length);
    }
    block.limits = limits;
  }
  batch_.push_back(block);
  numbers_.push_back(static_cast<int32_t>(number));
}

void TileScorer::score_batch(const SelectCall& call, const ScoreTile& tile, BestBlocks* lists) {
  const int64_t rows = tile.rows();
  const ScoreRows queries{queries_.require(0), rows, call.params.index_q.shape[2]};
  select_score_blocks(queries, batch_.data(), static_cast<int64_t>(batch_.size()), scratch_.require(0), scores_.data());
  for (size_t b = 0; b < batch_.size(); ++b) {
    const float* scores = scores_.data() + static_cast<int64_t>(b) * rows;
    if (numbers_[b] >= call.rule.init_blocks) {
      lists->add(numbers_[b], scores, batch_[b].first_row, rows);
      continue;
    }
    for (int64_t row = batch_[b].first_row; row < rows; ++row) {
      if (numbers_[b] < tokens_[static_cast<size_t>(row / tile.heads)].candidates.init_end) {
        lists->add_init(row, numbers_[b], scores[row]);
      }
    }
  }
  batch_.clear();
  numbers_.clear();
}

void TileScorer::score(const SelectCall& call, const ScoreTile& tile, const ScoreItem& item, BestBlocks* lists) {
  look_at(call, tile);
  const int64_t blocks = item.end - item.first;
  int64_t capacity = 0;
  for (const Token& token : tokens_) {
    capacity = std::max(capacity, std::min(blocks, token.candidates.init + token.candidates.best));
  }
  lists->start(tile.rows(), capacity);
  for (int64_t row = 0; row < tile.rows(); ++row) {
    lists->open(row, std::min(blocks, tokens_[static_cast<size_t>(row / tile.heads)].candidates.best));
  }
  if (blocks == 0) return;

  load_queries(call, tile);
  first_asking_ = 0;
  for (int64_t number = item.first; number < item.end; ++number) {
    if (number >= init_end_ && number < call.rule.init_blocks) continue;  // an init block for which no slot is left
    add_block(call, tile, number);
    if (batch_.size() == kBatch) score_batch(call, tile, lists);
  }
  score_batch(call, tile, lists);
}

void TileScorer::finish(const SelectCall& call, const ScoreTile& tile, const BestBlocks* lists) {
  look_at(call, tile);
  for (int64_t row = 0; row < tile.rows(); ++row) {
    const Token& token = tokens_[static_cast<size_t>(row / tile.heads)];
    init_.clear();
    others_.clear();
    for (int64_t item = 0; item < tile.end_item - tile.first_item; ++item) {
      lists[item].append_init(row, &init_);
      lists[item].append_best(row, &others_);
    }
    choose(token.candidates, token.keys, &init_, &others_, &row_);
    const auto filled = static_cast<int64_t>(row_.size());
    const int64_t query = tile.tokens.first_query + row / tile.heads, head = tile.first_head + row % tile.heads;
    for (int64_t slot = 0; slot < call.params.topk; ++slot) {
      host::store_index(call.params.indices, head, query, slot, slot < filled ? row_[static_cast<size_t>(slot)] : -1);
    }
  }
}

struct Worker {
  TileScorer scorer;
  BestBlocks lists;
};

}  // namespace

void select(const SelectParams& params) {
  const SelectCall call(params);
  std::vector<ScoreTile> tiles = score_tiles(call);
  const std::vector<ScoreItem> items = score_items(call, &tiles);
  const bool any_cut = items.size() > tiles.size();
  std::vector<BestBlocks> parts(any_cut ? items.size() : 0);  // of tiles that are cut

  host::parallel_for<Worker>(static_cast<int64_t>(items.size()), [&](int64_t number, Worker& worker) {
    const ScoreItem& item = items[static_cast<size_t>(number)];
    const ScoreTile& tile = tiles[static_cast<size_t>(item.tile)];
    if (tile.end_item - tile.first_item > 1) {
      worker.scorer.score(call, tile, item, &parts[static_cast<size_t>(number)]);
      return;
    }
    worker.scorer.score(call, tile, item, &worker.lists);
    worker.scorer.finish(call, tile, &worker.lists);
  });
  if (any_cut) {
    host::parallel_for<TileScorer>(static_cast<int64_t>(tiles.size()), [&](int64_t number, TileScorer& scorer) {
      const ScoreTile& tile = tiles[static_cast<size_t>(number)];
      if (tile.end_item - tile.first_item > 1) scorer.finish(call, tile, &parts[static_cast<size_t>(tile.first_item)]);
    });
  }
  if (params.index_lse != nullptr) write_index_lse(params, call.sequences);
}

}  // namespace openmsa::cpu
