#include "cuda/sm90/plan/tile_launch.h"

#include <algorithm>
#include <bit>

#include "cuda/common/launch.h"
#include "cuda/sm90/plan/launch.h"

namespace openmsa::cuda::sm90 {
namespace {

// Lists of a chunk: enough tiles that the last ones of a chunk cost nothing beside the rest, and within the smallest
// bound of a workspace (1 GiB) whatever the shape.
constexpr int64_t kMostListBytes = int64_t{256} << 20;

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

struct Shape {
  int64_t tiles, lists, capacity;
  int64_t blocks_bytes, more_bytes, counts_bytes, reaches_bytes, owners_bytes;
  static constexpr int64_t kNextBytes = 256;

  int64_t bytes() const {
    return blocks_bytes + more_bytes + counts_bytes + reaches_bytes + owners_bytes + kNextBytes;
  }
};

int64_t entry_bytes(int32_t tile_tokens) {
  return static_cast<int64_t>(sizeof(TileBlock)) + more_member_words(tile_tokens) * 4;
}

Shape shape_of(const TilePlanParams& params, int64_t tokens) {
  constexpr int64_t kWord = sizeof(int32_t);
  Shape shape{};
  shape.tiles = (tokens + params.tile_tokens - 1) / params.tile_tokens;
  shape.lists = shape.tiles * params.indices.shape[0];
  shape.capacity = params.tile_tokens * params.indices.shape[2];
  const int64_t entries = shape.lists * shape.capacity;
  shape.blocks_bytes = aligned(entries * static_cast<int64_t>(sizeof(TileBlock)));
  shape.more_bytes = aligned(entries * more_member_words(params.tile_tokens) * kWord);
  shape.counts_bytes = aligned(shape.lists * kWord);
  shape.reaches_bytes = aligned(shape.tiles * params.tile_tokens * kWord);
  shape.owners_bytes = params.layout.cu_seqlens_q != nullptr ? aligned(tokens * kWord) : 0;
  return shape;
}

}  // namespace

int64_t tile_plan_chunk(const TilePlanParams& params) {
  const int64_t list = params.indices.shape[0] * params.indices.shape[2] * params.tile_tokens;
  return std::max<int64_t>(kMostListBytes / (list * entry_bytes(params.tile_tokens)), 1) * params.tile_tokens;
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
  args.heads = static_cast<int32_t>(params.indices.shape[0]);
  args.topk = static_cast<int32_t>(params.indices.shape[2]);
  args.tile_tokens = params.tile_tokens;
  args.more_words = more_member_words(params.tile_tokens);
  args.sorted = static_cast<int32_t>(std::bit_ceil(static_cast<uint64_t>(shape.capacity)));
  args.first_token = params.first_token;
  args.tiles = shape.tiles;
  args.next_tile = static_cast<int32_t*>(take(Shape::kNextBytes));
  args.first_next = params.first_next;
  args.blocks = static_cast<TileBlock*>(take(shape.blocks_bytes));
  args.more_members = static_cast<uint32_t*>(take(shape.more_bytes));
  args.counts = static_cast<int32_t*>(take(shape.counts_bytes));
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
  launch_kernel("plan_tiles", plan_tiles_kernel(), launch, params.stream, &args);
  return {args.blocks, args.more_members, args.counts, args.reaches, args.next_tile, shape.tiles, shape.capacity};
}

}  // namespace openmsa::cuda::sm90
