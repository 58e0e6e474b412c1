// The index_lse kernels of one storage type.
#pragma once

#include "cuda/sm90/select/lse_kernels.h"
#include "cuda/sm90/select/lse_prefix.cuh"
#include "cuda/sm90/select/lse_selected.cuh"

namespace openmsa::cuda::sm90::lse {

template <typename Element, int kHeadDim, int kBlock>
LseKernel partial_lse_entry() {
  return {reinterpret_cast<const void*>(&partial_lse<Element, kHeadDim, kBlock>),
          sizeof(PartialShared<kHeadDim, kBlock>)};
}

template <typename Element>
LseKernel partial_lse_of(int64_t head_dim, int64_t block_size) {
  if (head_dim == 128) {
    return block_size == 128 ? partial_lse_entry<Element, 128, 128>() : partial_lse_entry<Element, 128, 64>();
  }
  return block_size == 128 ? partial_lse_entry<Element, 64, 128>() : partial_lse_entry<Element, 64, 64>();
}

template <typename Element, int kHeadDim>
LseKernel prefix_lse_entry() {
  return {reinterpret_cast<const void*>(&prefix_lse<Element, kHeadDim>), sizeof(PrefixShared<kHeadDim>)};
}

template <typename Element>
LseKernel prefix_lse_of(int64_t head_dim) {
  return head_dim == 128 ? prefix_lse_entry<Element, 128>() : prefix_lse_entry<Element, 64>();
}

}  // namespace openmsa::cuda::sm90::lse
