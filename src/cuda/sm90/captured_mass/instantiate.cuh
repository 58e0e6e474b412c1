// The mass kernels of one storage type.
#pragma once

#include "cuda/sm90/captured_mass/launch.h"
#include "cuda/sm90/captured_mass/masses.cuh"

namespace openmsa::cuda::sm90::captured_mass {

template <typename Element, int kHeadDim, int kBlock>
MassKernel masses_entry() {
  // Dynamic shared memory starts at a multiple of 16 bytes only; the kernel moves up to one of 1024.
  return {reinterpret_cast<const void*>(&masses_kernel<Element, kHeadDim, kBlock>),
          static_cast<int64_t>(sizeof(Shared<kHeadDim, kBlock>)) + 1008};
}

template <typename Element>
MassKernel masses_of(int64_t head_dim, int64_t block_size) {
  if (head_dim == 128) {
    return block_size == 128 ? masses_entry<Element, 128, 128>() : masses_entry<Element, 128, 64>();
  }
  return block_size == 128 ? masses_entry<Element, 64, 128>() : masses_entry<Element, 64, 64>();
}

}  // namespace openmsa::cuda::sm90::captured_mass
