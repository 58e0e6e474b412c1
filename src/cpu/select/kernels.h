// What the vector code of select is given: the query rows of one tile and key blocks, one after the other.
#pragma once

#include <cstdint>

#include "cpu/common/rows.h"
#include "cpu/common/running_sum.h"
#include "cpu/plan/plan.h"

namespace openmsa::cpu {

// Query rows of a tile that read the same index key head: row = token * heads + head. Each is divided by a power of
// two, its unit, so that its largest element is in [1, 2): products with keys then neither overflow nor vanish where
// the exact ones would not be that far from each other, and a row's order of scores is the same.
struct ScoreRows {
  const float* queries = nullptr;  // [rows][dim]
  int64_t rows = 0;
  int64_t dim = 0;
};

// `count` rows of one head to queries[row * stride], units to units[row * units_stride].
void select_load_queries(const StoredRows& rows, int64_t count, float* queries, int64_t stride, float* units,
                         int64_t units_stride);

struct ScoreBlock {
  StoredRows keys;
  int64_t count = 0;                // keys that are read
  int64_t first_row = 0;            // rows before it do not ask
  const int32_t* limits = nullptr;  // [rows] keys that each row sees; null: all `count`
};

// scores[block * rows + row] = the largest product of the row and a key of the block that it sees; -inf for NaN.
// `scratch` holds select_scratch_floats(rows, dim), aligned.
void select_score_blocks(const ScoreRows& rows, const ScoreBlock* blocks, int64_t count, float* scratch, float* scores);
int64_t select_scratch_floats(int64_t rows, int64_t dim);

// Rows that one product of select_add_scores takes.
inline constexpr int64_t kLseRows = 96;

// Takes the scores of one block's `count` keys into running[token], for the tokens of `entries`: rows of one index
// head. factors[token]: what a product is worth as a score. `scratch` holds select_lse_scratch_floats(block_size, dim),
// aligned.
void select_add_scores(const ScoreRows& rows, const float* factors, const StoredRows& keys, int64_t count,
                       const PlanEntry* entries, int64_t entry_count, float* scratch, RunningSum* running);
int64_t select_lse_scratch_floats(int64_t block_size, int64_t dim);

}  // namespace openmsa::cpu
