// Where a tile's rows stand. The quadruple of lanes that shares rows of the products spreads their maxima so that each
// thread ends up with one row: the rows' order in a batch, the lists and partial lists.
#pragma once

#include "cuda/sm90/select/config.h"

namespace openmsa::cuda::sm90 {

// Position: group, warp, lane = 4 x (row % 8) + 2 x half + upper; row: group, half, warp, upper, row % 8.
__device__ inline int tile_row(int position) {
  const int lane = position % 32;
  return position / kGroupRows * kGroupRows + lane / 2 % 2 * kProductRows + position / 32 % 4 * 16 + lane % 2 * 8 +
         lane / 4;
}

__device__ inline int tile_position(int row) {
  return row / kGroupRows * kGroupRows + row / 16 % 4 * 32 + row % 8 * 4 + row / kProductRows % 2 * 2 + row / 8 % 2;
}

}  // namespace openmsa::cuda::sm90
