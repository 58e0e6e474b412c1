// Select: tiles, constants, what each launch reads and writes.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace openmsa::cuda::sm90 {

inline constexpr int kMaxTopk = 64;
inline constexpr int kMaxIndexHeads = 16;
inline constexpr int64_t kMostTokens = (int64_t{1} << 31) - 1024;  // so that a block past the end still has a number

// ---- Tiles ----------------------------------------------------------------------------------------------------------

// A warpgroup forms two products of 64 rows with 128 keys at a time: 128 sums per thread.
inline constexpr int kProductRows = 64;
inline constexpr int kGroupRows = 2 * kProductRows;
inline constexpr int kStepKeys = 128;
// Block maxima travel to the keepers in batches of this many blocks, of which at most kRing are on their way.
inline constexpr int kBatchBlocks = 4;
inline constexpr int kRing = 4;
inline constexpr int kUnitRing = 2;

// Tiles by what they hold. `stages` is for rows of 256 bytes (16-bit, head dimension 128): one more stage passes the
// 227 KB of a thread block.
struct TileChoice {
  int groups;        // product warpgroups of 128 rows
  int other_groups;  // warpgroups of one copying warp and keeper warps
  int most_topk;
  int stages;  // keys of 128 rows in flight
};
// Two warpgroups share each key block: the products of one run under the maxima of the other. Lists of more than 16
// entries take the room of the second warpgroup's queries. Seven keeper warps, since a thread with three rows of a tile
// cannot keep up with the first blocks, which enter most lists.
inline constexpr TileChoice kWideTile = {2, 2, 16, 3};
inline constexpr TileChoice kNarrowTile = {1, 1, kMaxTopk, 3};

// Key stages of a row width: never more bytes than the 256-byte rows take, and at most 6.
constexpr int stages_for(const TileChoice& tile, int row_bytes) {
  const int stages = tile.stages * 256 / row_bytes;
  return stages < 6 ? stages : 6;
}

// ---- Arguments ------------------------------------------------------------------------------------------------------

// An axis of a tensor map. Bulk copies know positive strides only: a tensor with a negative one is described from its
// last element, and counted backwards.
struct MapAxis {
  int32_t length;
  bool backwards;
};

// Which keys each query sees. All counts are below 2^31 (checked); values behind pointers are not trusted.
struct SelectLayout {
  int32_t batch, tokens_q, tokens_k;
  const int32_t* cu_seqlens_q;  // [batch + 1], or null: one sequence
  const int32_t* cu_seqlens_k;  // [batch + 1], or null
  const int32_t* k_starts;      // [batch], or null
  const int32_t* block_table;   // [batch, max_pages]; null: contiguous
  int64_t block_table_stride;
  int64_t max_pages;
  int32_t pages;
  const int32_t* seq_lens;  // [batch], paged
  int32_t block_size;
};

// Keys [block_begin, block_end) x block_size of a sequence against the index heads of one index key head of a tile of
// its tokens.
struct alignas(16) WorkUnit {
  int32_t sequence;  // kNoSequence: rows that see no key. kNoMoreWork: the end
  int32_t first_token, tokens;
  int32_t key_head;
  int32_t k_begin;   // contiguous: row of the sequence's key 0
  int32_t diagonal;  // token t sees max(0, t + diagonal) keys
  int32_t block_begin, block_end;
  int32_t partial;  // where its lists go when other units have the rest of the blocks, or kWhole
  int32_t pieces;   // in a SplitTile: units that share the tile
  int32_t unused[2];
};
static_assert(sizeof(WorkUnit) == 48);
inline constexpr int32_t kNoSequence = -1;
inline constexpr int32_t kNoMoreWork = -2;
inline constexpr int32_t kWhole = -1;

// Units of one call aim at this many pieces of equal cost, two per multiprocessor; tiles that are longer are split.
inline constexpr int kTargetPieces = 264;
// A tile of n blocks is split into at most n / chunk + 1/2 pieces, and only when that is at least 2: at most 4/3 of the
// target in all.
inline constexpr int kMostPieces = kTargetPieces * 4 / 3;
// Shorter pieces cost more to merge than they save.
inline constexpr int kLeastPieceBlocks = 8;

struct ScheduleHeader {
  int32_t units;   // in the list
  int32_t next;    // unit that the next free thread block takes
  int32_t splits;  // split tiles
};

// Entries of partial lists: (forced, score, complement of the block) in one number that orders as the list does.
using PartialEntry = uint64_t;

struct ScheduleArguments {
  SelectLayout layout;
  int32_t init_blocks, local_blocks, topk;
  int32_t key_heads;
  int32_t tile_tokens;
  int32_t thread_blocks;  // of the select kernel, each of which starts with the unit of its own number
  int32_t most_units;
  ScheduleHeader* header;
  WorkUnit* units;   // [most_units]
  WorkUnit* splits;  // [kMostPieces]; `partial` is the first of its `pieces`
};

struct SelectArguments {
  CUtensorMap queries;  // {Di, index head, token}
  CUtensorMap keys;     // {Di, index key head, token} or paged {Di, index key head, row, page}
  MapAxis q_heads, q_tokens, k_heads, k_rows, k_pages;
  int32_t heads;        // index heads of one index key head
  int32_t tile_tokens;  // kTileRows / heads

  SelectLayout layout;
  int32_t topk, init_blocks, local_blocks;

  ScheduleHeader* header;
  const WorkUnit* units;
  const WorkUnit* splits;
  PartialEntry* partials;  // [piece][tile row][topk]

  void* indices;  // [Hi, Tq, topk]
  int64_t indices_stride_head, indices_stride_token, indices_stride_slot;
  bool indices_are_int64;
};

struct MergeArguments {
  SelectArguments select;
  int32_t tile_rows;
};

}  // namespace openmsa::cuda::sm90
