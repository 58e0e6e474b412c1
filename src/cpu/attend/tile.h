// One index head and one tile of query tokens: the walks over its key blocks and what they leave behind.
#pragma once

#include <cstdint>
#include <vector>

#include "api/stages.h"
#include "cpu/attend/kernels.h"
#include "cpu/common/aligned.h"
#include "cpu/plan/plan.h"
#include "host/heads.h"
#include "host/sequences.h"

namespace openmsa::cpu {

// What is the same for all tiles of a call.
struct AttendCall {
  explicit AttendCall(const AttendParams& attend_params);

  const AttendParams& params;
  host::Sequences sequences;
  host::Heads heads;
  int64_t key_columns, value_columns;  // D, Dv
  int64_t sums_stride;                 // floats of an accumulated row
  float k_factor, v_factor;
  std::vector<double> kl;  // [Tq][Hi], with the KL only
};

// The running softmax of a tile's rows.
struct TileState {
  float* sums;                // [tokens][G][sums_stride]
  RunningSum* running;        // [tokens][G]
  RunningSum* index_running;  // [tokens], null without an index branch

  // Bytes that `tokens` query tokens take, and the state before any block in zeroed memory of that size.
  static int64_t floats(const AttendCall& call, int64_t tokens);
  static TileState start(const AttendCall& call, int64_t tokens, float* memory);
};

// One thread's buffers.
class TileWorker {
 public:
  // Memory for a state that no other thread needs.
  float* own_state(const AttendCall& call, int64_t tokens);

  // Takes the plan's blocks [first, end) into the state.
  void walk(const AttendCall& call, int64_t index_head, const QueryTile& tile, const TilePlan& plan, int64_t first,
            int64_t end, const TileState& state);

  // Writes out, lse, index_lse and the rows of the KL.
  void finish(AttendCall& call, int64_t index_head, const QueryTile& tile, const TilePlan& plan,
              const TileState& state);

  TilePlan plan;

 private:
  AttendTile prepare(const AttendCall& call, int64_t index_head, const QueryTile& tile);
  void walk_kl(AttendCall& call, int64_t index_head, const QueryTile& tile, const TilePlan& plan);

  AlignedFloats state_, k_panels_, v_panels_, index_k_panels_, queries_, index_queries_, scores_, index_scores_;
  std::vector<float> corrections_, lse_, index_lse_, factors_;
  std::vector<float*> sums_;
  std::vector<int64_t> keys_;
  std::vector<double> kl_;
};

}  // namespace openmsa::cpu
