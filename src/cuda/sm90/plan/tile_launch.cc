#include "cuda/sm90/plan/tile_launch.h"

#include <algorithm>
#include <bit>

#include "cuda/common/launch.h"
#include "cuda/sm90/plan/launch.h"

namespace openmsa::cuda::sm90 {
namespace {

// Lists of a chunk: enough tiles that the last ones of a chunk cost nothing beside the others.
int64_t most_list_bytes() { return std::min(int64_t{256} << 20, workspace_limit() / 4); }

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

struct Shape {
  int64_t tiles, lists, capacity;
  int64_t blocks_bytes, more_bytes, counts_bytes, suspects_bytes, reaches_bytes, owners_bytes;
  int64_t array_bytes, sort_bytes, slots_bytes;  // of the rest
  uint32_t no_place;
  int first_bit, last_bit;
  static constexpr int64_t kHeaderBytes = 256;
  static_assert(sizeof(TileHeader) <= kHeaderBytes);

  int64_t bytes() const {
    return blocks_bytes + more_bytes + 2 * counts_bytes + suspects_bytes + reaches_bytes + owners_bytes + kHeaderBytes +
           4 * array_bytes + sort_bytes + slots_bytes;
  }
};

int64_t entry_bytes(int32_t tile_tokens) {
  return static_cast<int64_t>(sizeof(TileBlock)) + more_member_words(tile_tokens) * 4;
}

Shape shape_of(const TilePlanParams& params, int64_t tokens) {
  constexpr int64_t kWord = sizeof(int32_t);
  Shape shape{};
  shape.tiles = (tokens + params.tile_tokens - 1) / params.tile_tokens;
  shape.lists = shape.tiles * params.heads;
  shape.capacity = params.tile_tokens * params.indices.shape[2];
  const int64_t entries = shape.lists * shape.capacity;
  shape.blocks_bytes = aligned(entries * static_cast<int64_t>(sizeof(TileBlock)));
  shape.more_bytes = aligned(entries * more_member_words(params.tile_tokens) * kWord);
  shape.counts_bytes = aligned(shape.lists * kWord);
  shape.suspects_bytes = aligned(shape.lists);
  shape.reaches_bytes = aligned(shape.tiles * params.tile_tokens * kWord);
  shape.owners_bytes = params.layout.cu_seqlens_q != nullptr ? aligned(tokens * kWord) : 0;
  if (params.least_members == 0) return shape;
  const int64_t items = tokens * params.heads * params.indices.shape[2];
  // As the plan of items does: neighbours of a sequence follow each other, so a block's interval is enough.
  const int64_t unit = params.layout.paged ? 1 : params.block_size;
  const int64_t places = params.layout.paged ? params.layout.pages : params.layout.tokens_k;
  shape.no_place = static_cast<uint32_t>(std::max<int64_t>((places + unit - 1) / unit, 1) * unit);
  shape.first_bit = std::countr_zero(static_cast<uint64_t>(unit));
  shape.last_bit = static_cast<int>(std::bit_width(uint64_t{shape.no_place}));
  shape.array_bytes = aligned(items * kWord);
  shape.sort_bytes = aligned(sort_workspace(items, shape.first_bit, shape.last_bit));
  shape.slots_bytes = aligned(tokens * params.heads * static_cast<int64_t>(sizeof(uint64_t)));
  return shape;
}

}  // namespace

int64_t tile_plan_chunk(const TilePlanParams& params) {
  const int64_t list = params.heads * params.indices.shape[2] * params.tile_tokens;
  const int64_t tokens =
      std::max<int64_t>(most_list_bytes() / (list * entry_bytes(params.tile_tokens)), 1) * params.tile_tokens;
  return params.most_tokens > 0 ? std::min(tokens, params.most_tokens) : tokens;
}

int64_t tile_plan_workspace(const TilePlanParams& params) {
  return shape_of(params, std::min(params.layout.tokens_q, tile_plan_chunk(params))).bytes();
}

TilePlan launch_tile_plan(const TilePlanParams& params) {
  const Shape shape = shape_of(params, params.tokens);
  auto* next = static_cast<unsigned char*>(params.workspace);
  const auto take = [&next](int64_t bytes) {
    void* const taken = next;
    next += bytes;
    return taken;
  };
  TileArguments args{};
  args.layout = params.layout;
  args.block_size = params.block_size;
  args.indices = index_view(params.indices);
  args.first_head = params.first_head;
  args.heads = params.heads;
  args.topk = static_cast<int32_t>(params.indices.shape[2]);
  args.tile_tokens = params.tile_tokens;
  args.more_words = more_member_words(params.tile_tokens);
  args.sorted = static_cast<int32_t>(std::bit_ceil(static_cast<uint64_t>(shape.capacity)));
  args.first_token = params.first_token;
  args.tiles = shape.tiles;
  args.header = static_cast<TileHeader*>(take(Shape::kHeaderBytes));
  args.first_next = params.first_next;
  args.blocks = static_cast<TileBlock*>(take(shape.blocks_bytes));
  args.more_members = static_cast<uint32_t*>(take(shape.more_bytes));
  args.counts = static_cast<int32_t*>(take(shape.counts_bytes));
  args.all_counts = static_cast<int32_t*>(take(shape.counts_bytes));
  args.suspects = static_cast<uint8_t*>(take(shape.suspects_bytes));
  args.reaches = static_cast<int32_t*>(take(shape.reaches_bytes));
  if (params.layout.cu_seqlens_q != nullptr) {
    auto* const owners = static_cast<uint32_t*>(take(shape.owners_bytes));
    launch_find_owners(params.layout, params.block_size, params.first_token, params.tokens, owners, params.stream);
    args.owners = owners;
  }
  LaunchShape launch;
  launch.blocks_x = shape.lists;
  launch.threads = kTileThreads;
  launch.shared_bytes = args.sorted * static_cast<int64_t>(sizeof(uint64_t) + sizeof(uint8_t));
  uint32_t* places[2] = {};
  uint32_t* items[2] = {};
  if (params.least_members > 0) {
    for (uint32_t*& array : places) array = static_cast<uint32_t*>(take(shape.array_bytes));
    for (uint32_t*& array : items) array = static_cast<uint32_t*>(take(shape.array_bytes));
    args.least_members = params.least_members;
    args.most_alone = params.most_alone;
    args.places = places[0];
    args.items = items[0];
    args.no_place = shape.no_place;
    args.rest_slots = static_cast<uint64_t*>(take(shape.slots_bytes));
  }
  launch_kernel("plan_tiles", plan_tiles_kernel(), launch, params.stream, &args);
  TilePlan plan;
  plan.blocks = args.blocks;
  plan.more_members = args.more_members;
  plan.counts = args.counts;
  plan.reaches = args.reaches;
  plan.all_counts = args.all_counts;
  plan.suspects = args.suspects;
  plan.header = args.header;
  plan.tiles = shape.tiles;
  plan.capacity = shape.capacity;
  if (params.least_members > 0) {
    plan.count = params.tokens * params.heads * params.indices.shape[2];
    const bool second = sort_pairs(places, items, plan.count, shape.first_bit, shape.last_bit, take(shape.sort_bytes),
                                   shape.sort_bytes, params.stream);
    plan.places = places[second ? 1 : 0];
    plan.items = items[second ? 1 : 0];
    plan.rest_slots = args.rest_slots;
    plan.no_place = shape.no_place;
  }
  return plan;
}

}  // namespace openmsa::cuda::sm90
