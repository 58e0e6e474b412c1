// What the vector code of the backward pass receives: one query tile of one index head, and one key block of its plan.
#pragma once

#include <cstdint>

#include "cpu/common/rows.h"
#include "cpu/plan/plan.h"

namespace openmsa::cpu {

// float32 matrices of the pass are row-major. Their rows are padded to whole panels of every instruction set and stand
// an odd number of cache lines apart, so that one column of a tile does not compete for a few places of the cache.
constexpr int64_t backward_padded(int64_t columns) { return (columns + 31) / 32 * 32; }
constexpr int64_t backward_stride(int64_t columns) { return backward_padded(columns) + 16; }

// (query, head) rows whose products are formed at a time, and query tokens whose index products are. A multiple of
// every target's tile of rows.
inline constexpr int64_t kBackwardRows = 96;
inline constexpr int64_t kBackwardTokens = 96;

// The rows of a tile's queries: `heads` of token 0, and so on every `token_stride` elements.
struct TokenRows {
  StoredRows heads;
  int64_t token_stride = 0;

  int64_t columns() const { return heads.columns; }
};

// Gradients of one key block, sums over a tile's queries: rows backward_stride() apart. Not yet times scale,
// coefficient.
struct KeyGradients {
  float* k = nullptr;        // [keys][D]; null without d_out
  float* v = nullptr;        // [keys][Dv]
  float* index_k = nullptr;  // [keys][Di]; null without a gradient of the index branch
};

// What a thread works in; sizes in backward_floats().
struct BackwardBuffers {
  float *keys_transposed, *values_transposed, *keys;  // panels, panels, rows: of the block
  float *index_keys_transposed, *index_keys;          // panels, rows
  float *queries, *d_outputs;                         // [kBackwardRows][D], [kBackwardRows][Dv]
  float *probabilities, *d_scores;                    // [kBackwardRows][block]
  float *index_queries, *teacher;                     // [kBackwardTokens][Di], [kBackwardTokens][block]
  float *d_q, *d_index_q;                             // [tile's rows][D], [tile's queries][Di]
  float *lse, *delta;                                 // [tile's rows]
  float* index_lse;                                   // [tile's queries]
  KeyGradients block;                                 // of the block at hand
};

struct BackwardTile {
  int64_t queries = 0;
  int64_t group = 1;  // G; row t * group + h belongs to query t, head h
  bool has_d_out = false;
  bool has_kl = false;              // the sum of divergences is asked for
  bool has_index_gradient = false;  // d_kl is there, and not 0
  float scale = 1, index_scale = 1;
  TokenRows q, out, d_out, index_q;
  StoredRows k, v, index_k;  // from key row 0 of the call on
  BackwardBuffers buffers{};
  double divergence = 0;  // sum over the rows so far
};

// Instruction sets are chosen at the call.
//
// delta[row] = <d_out, out>.
void backward_delta(BackwardTile& tile);
// One block: probabilities and the gradients of scores of its entries; adds to d_q, d_index_q and divergence, sets the
// block's own gradients.
void backward_block(BackwardTile& tile, const PlanBlock& block, const PlanEntry* entries);
// sums += block, for `keys` rows.
void backward_add(const KeyGradients& block, int64_t keys, int64_t dim, int64_t v_dim, int64_t index_dim,
                  const KeyGradients& sums);
// `count` rows of `stride`, times `factor`, to storage. May leave other numbers in the rows.
void backward_store(float* rows, int64_t stride, int64_t count, float factor, const OutputRows& output);

}  // namespace openmsa::cpu
