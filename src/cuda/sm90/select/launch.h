// Host side of select.
#pragma once

#include <cstdint>

#include "api/stages.h"

namespace openmsa::cuda::sm90 {

// Bytes that a call of these shapes needs, whatever the values behind its pointers.
int64_t select_workspace(const SelectParams& params);

// Queues the selection, without index_lse, on params.execution.stream of the current device. `params` has passed the
// backend's check; `workspace` has the bytes above and is aligned to 256.
void launch_select(const SelectParams& params, void* workspace);

// A kernel of one storage type, head dimension, block size and tile width.
struct SelectKernel {
  const void* entry;
  int threads;
  int shared_bytes;
};

SelectKernel select_kernel_bfloat16(int64_t head_dim, int64_t block_size, bool wide);
SelectKernel select_kernel_float16(int64_t head_dim, int64_t block_size, bool wide);
SelectKernel select_kernel_float8_e4m3(int64_t head_dim, int64_t block_size, bool wide);

}  // namespace openmsa::cuda::sm90
