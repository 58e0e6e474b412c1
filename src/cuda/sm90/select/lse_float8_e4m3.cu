#include "cuda/sm90/select/lse_instantiate.cuh"

namespace openmsa::cuda::sm90::lse {

LseKernel partial_lse_float8_e4m3(int64_t head_dim, int64_t block_size) {
  return partial_lse_of<Float8E4m3>(head_dim, block_size);
}

LseKernel prefix_lse_float8_e4m3(int64_t head_dim) { return prefix_lse_of<Float8E4m3>(head_dim); }

}  // namespace openmsa::cuda::sm90::lse
