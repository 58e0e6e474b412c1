// The select kernels of one storage type.
#pragma once

#include "cuda/sm90/select/kernel.cuh"
#include "cuda/sm90/select/launch.h"

namespace openmsa::cuda::sm90 {

template <typename Element, int kHeadDim, int kBlock>
SelectKernel select_kernel_entry(bool paged) {
  void (*const kernel)(SelectArguments) = paged ? &select_kernel<PagedKeys<Element, kBlock>, kHeadDim, kBlock>
                                                : &select_kernel<ContiguousKeys<Element, kBlock>, kHeadDim, kBlock>;
  return {reinterpret_cast<const void*>(kernel), &select_shared_bytes<kHeadDim, kBlock>};
}

template <typename Element>
SelectKernel select_kernel_of(int64_t head_dim, int64_t block_size, bool paged) {
  if (head_dim == 128) {
    return block_size == 128 ? select_kernel_entry<Element, 128, 128>(paged)
                             : select_kernel_entry<Element, 128, 64>(paged);
  }
  return block_size == 128 ? select_kernel_entry<Element, 64, 128>(paged) : select_kernel_entry<Element, 64, 64>(paged);
}

}  // namespace openmsa::cuda::sm90
