// The select kernels of one storage type.
#pragma once

#include "cuda/sm90/select/kernel.cuh"
#include "cuda/sm90/select/launch.h"

namespace openmsa::cuda::sm90 {

template <typename Element, int kHeadDim, int kBlock>
SelectKernel select_kernel_entry(bool wide) {
  using Wide = SelectConfig<Element, kHeadDim, kBlock, 2>;
  using Narrow = SelectConfig<Element, kHeadDim, kBlock, 1>;
  return wide ? SelectKernel{reinterpret_cast<const void*>(&select_kernel<Wide>), Wide::kThreads, kSharedBytes<Wide>}
              : SelectKernel{reinterpret_cast<const void*>(&select_kernel<Narrow>), Narrow::kThreads,
                             kSharedBytes<Narrow>};
}

template <typename Element>
SelectKernel select_kernel_of(int64_t head_dim, int64_t block_size, bool wide) {
  if (head_dim == 128) {
    return block_size == 128 ? select_kernel_entry<Element, 128, 128>(wide)
                             : select_kernel_entry<Element, 128, 64>(wide);
  }
  return block_size == 128 ? select_kernel_entry<Element, 64, 128>(wide) : select_kernel_entry<Element, 64, 64>(wide);
}

}  // namespace openmsa::cuda::sm90
