// What the vector code of attend is given: one index head, one tile of query tokens, one key block at a time.
#pragma once

#include <cstdint>

#include "cpu/common/rows.h"
#include "cpu/common/running_sum.h"
#include "cpu/plan/plan.h"

namespace openmsa::cpu {

// Query rows of a tile: token t's rows begin `token_stride` elements after token t - 1's.
struct QueryRows {
  StoredRows rows;  // of token 0
  int64_t token_stride = 0;
};

// Panels and rows of one thread; sizes in floats, for blocks of at most `block_size` keys and chunks of at most
// `chunk_rows` query rows, all aligned to 64 bytes.
struct AttendBuffers {
  float* k_panels = nullptr;        // [D][block_size] as panels
  float* v_panels = nullptr;        // [block_size][Dv] as panels
  float* index_k_panels = nullptr;  // [Di][block_size] as panels
  float* queries = nullptr;         // [chunk_rows][D]
  float* index_queries = nullptr;   // [chunk tokens][Di]
  float* scores = nullptr;          // [chunk_rows][block_size]
  float* index_scores = nullptr;    // [chunk tokens][block_size]
  float* corrections = nullptr;     // [chunk_rows]
  float** sums = nullptr;           // [chunk_rows] rows of the accumulators
  int64_t* keys = nullptr;          // [chunk_rows]
};

// Query rows that go through a block together: enough that packing stays small beside them in the caches, few enough
// that their queries and scores stay in the second level.
inline constexpr int64_t kChunkRows = 96;

struct AttendTile {
  int64_t group = 1;  // G query heads
  int64_t block_size = 128;
  QueryRows q;        // G rows a token, worth the scale
  QueryRows index_q;  // one row a token; no data without an index branch
  AttendBuffers buffers;

  // First walk.
  float* sums = nullptr;                // [tokens][G][sums_stride] of e^(score - largest) v
  int64_t sums_stride = 0;              // padded_columns(Dv)
  RunningSum* running = nullptr;        // [tokens][G]
  RunningSum* index_running = nullptr;  // [tokens]

  // Second walk, for the KL.
  const float* lse = nullptr;        // [tokens][G]
  const float* index_lse = nullptr;  // [tokens]
  double* kl = nullptr;              // [tokens], added to
};

// One key block for those of the tile's tokens that selected it.
struct AttendBlock {
  StoredRows k, v, index_k;
  int64_t keys = 0;  // the most that any entry sees
  const PlanEntry* entries = nullptr;
  int64_t count = 0;
};

// columns as panels and accumulators hold them.
int64_t attend_padded_columns(int64_t columns);

void attend_block(const AttendTile& tile, const AttendBlock& block);
void attend_kl_block(const AttendTile& tile, const AttendBlock& block);

// out rows = factors[r] * rows [count][stride].
void attend_store(const float* rows, int64_t stride, const float* factors, int64_t count, const OutputRows& out);

// into[c] = into_factor * into[c] + from_factor * from[c]
void attend_merge(float* into, float into_factor, const float* from, float from_factor, int64_t columns);

}  // namespace openmsa::cpu
