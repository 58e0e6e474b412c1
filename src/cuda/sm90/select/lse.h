// Host side of index_lse: the natural log-sum-exp of the scaled index scores, over selected blocks or whole prefixes.
#pragma once

#include <cstdint>

#include "api/stages.h"

namespace openmsa::cuda::sm90 {

struct LseParams {
  SequenceLayout layout;
  Tensor index_q{};  // [Tq, Hi, Di]
  Tensor index_k{};  // [Tk, Hik, Di], or paged [pages, block, Hik, Di]
  int64_t block_size = 128;
  double scale = 1.0;
  Tensor indices{};    // [Hi, Tq, topk] int32 or int64; for the selected form only
  Tensor index_lse{};  // out [Hi, Tq]
  void* stream = nullptr;
  void* workspace = nullptr;  // the bytes that the form declares, aligned to 256
};

// index_lse over the visible tokens of the blocks that `indices` names: in any order, entries below 0 or beyond the
// visible blocks ignored, repeated ones counted once. `params` without workspace, stream and data will do for the
// bytes: they depend on shapes and types alone, and have a bound of their own (about 50 MB) whatever the sizes.
int64_t selected_lse_workspace(const LseParams& params);
void launch_selected_lse(const LseParams& params);

// index_lse over every visible key of a query, for warm-up. 4 bytes of workspace per query when there are offsets.
int64_t prefix_lse_workspace(const LseParams& params);
void launch_prefix_lse(const LseParams& params);

}  // namespace openmsa::cuda::sm90
