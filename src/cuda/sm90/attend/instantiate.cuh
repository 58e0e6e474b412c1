// The attend kernels of one storage type.
#pragma once

#include "cuda/sm90/attend/kernel.cuh"
#include "cuda/sm90/attend/launch.h"

namespace openmsa::cuda::sm90::attend {

template <typename Config>
AttendKernel attend_entry() {
  return {reinterpret_cast<const void*>(&attend_kernel<Config>), kSharedBytes<Config>};
}

template <typename Element>
AttendKernel attend_of(int64_t head_dim, int64_t block_size) {
  if (head_dim == 128) {
    return block_size == 128 ? attend_entry<Config<Element, 128, 128>>() : attend_entry<Config<Element, 128, 64>>();
  }
  return block_size == 128 ? attend_entry<Config<Element, 64, 128>>() : attend_entry<Config<Element, 64, 64>>();
}

}  // namespace openmsa::cuda::sm90::attend
