// The index_lse kernels of one storage type, and their dynamic shared memory. One translation unit for each type.
#pragma once

#include <cstdint>

#include "cuda/sm90/select/lse_config.h"

namespace openmsa::cuda::sm90::lse {

struct LseKernel {
  const void* entry;
  int64_t shared_bytes;
};

LseKernel partial_lse_bfloat16(int64_t head_dim, int64_t block_size);
LseKernel partial_lse_float16(int64_t head_dim, int64_t block_size);
LseKernel partial_lse_float8_e4m3(int64_t head_dim, int64_t block_size);
LseKernel prefix_lse_bfloat16(int64_t head_dim);
LseKernel prefix_lse_float16(int64_t head_dim);
LseKernel prefix_lse_float8_e4m3(int64_t head_dim);
const void* merge_lse_kernel();

}  // namespace openmsa::cuda::sm90::lse
