// Tiles of queries: constants, what the plan of a tile is, the kernel's arguments.
#pragma once

#include <cstdint>

#include "cuda/sm90/plan/config.h"

namespace openmsa::cuda::sm90 {

inline constexpr int kTileThreads = 128;
// The query heads of one index head and this many of their tokens are the rows of a tile.
inline constexpr int kTileRows = 128;
inline constexpr int kMostTileTokens = kTileRows;

// A block of keys that some token of a tile selected.
struct alignas(16) TileBlock {
  // Its first key: contiguous, a row of k; paged, counted from its request's first key.
  int32_t base;
  int32_t page;  // paged
  uint32_t info;
  uint32_t members;  // bit t: token t selected it, of the first 32 tokens
};
static_assert(sizeof(TileBlock) == 16);

// TileBlock::info: keys that some member sees, which halves of the tile's tokens have members, and for which of them no
// later block of the tile has.
inline constexpr uint32_t kTileKeysMask = 0xff;
inline constexpr int kTileActiveBit = 8;
inline constexpr int kTileLastBit = 10;

// Words of member bits beyond TileBlock::members.
constexpr int more_member_words(int tile_tokens) { return tile_tokens > 32 ? tile_tokens / 32 - 1 : 0; }

// Set up by the plan for the kernels that work its tiles off.
struct TileHeader {
  int32_t next;         // tile that the next free thread block takes; begins at TileArguments::first_next
  int32_t has_suspect;  // 0, until a tile is marked
};

struct TileArguments {
  SequenceLayout layout;
  int64_t block_size;
  IndexView indices;
  int32_t first_head, heads;  // index heads of the indices
  int32_t topk;
  int32_t tile_tokens;         // a power of 2
  int32_t more_words;          // more_member_words(tile_tokens)
  int32_t sorted;              // tile_tokens x topk, rounded up to a power of 2
  int64_t first_token, tiles;  // the chunk's
  // Blocks that fewer tokens of a tile selected, each of whom sees the block whole, are rest: they stand behind the
  // others in the list, and their members in the arrays below. 0: none.
  int32_t least_members;
  int32_t most_alone;      // a tile of no more blocks has no rest
  const uint32_t* owners;  // by query of the chunk; null: one sequence
  TileBlock* blocks;       // [head, tile][tile_tokens x topk]
  uint32_t* more_members;  // beside each block, more_words of them
  int32_t* counts;         // [head, tile]: blocks without the rest
  int32_t* all_counts;     // with it
  uint8_t* suspects;       // 0
  uint32_t* places;        // [query of the chunk, head, slot]: of a rest entry its block's place, else no_place
  uint32_t* items;         // item.cuh
  uint32_t no_place;
  uint64_t* rest_slots;  // [query of the chunk, head]: bit s: the entry in slot s is rest
  // [query of the chunk] one past the last key that it sees, counted as TileBlock::base is.
  int32_t* reaches;
  TileHeader* header;
  int32_t first_next;
};

}  // namespace openmsa::cuda::sm90
