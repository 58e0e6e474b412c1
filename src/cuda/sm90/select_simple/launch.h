// Host side of select.
#pragma once

#include <cstdint>

#include "api/stages.h"

namespace openmsa::cuda::sm90 {

// Queues the selection on params.execution.stream of index_q's device. Needs no workspace. `params` has passed the
// backend's check.
void launch_select(const SelectParams& params);

// A kernel of one storage type, head dimension, block size and layout, and its dynamic shared memory.
struct SelectKernel {
  const void* entry;
  int64_t (*shared_bytes)(int64_t topk, bool with_lse);
};

SelectKernel select_kernel_bfloat16(int64_t head_dim, int64_t block_size, bool paged);
SelectKernel select_kernel_float16(int64_t head_dim, int64_t block_size, bool paged);
SelectKernel select_kernel_float8_e4m3(int64_t head_dim, int64_t block_size, bool paged);

}  // namespace openmsa::cuda::sm90
