#include "cuda/sm90/select/instantiate.cuh"

namespace openmsa::cuda::sm90 {

SelectKernel select_kernel_bfloat16(int64_t head_dim, int64_t block_size, bool wide) {
  return select_kernel_of<Bfloat16>(head_dim, block_size, wide);
}

}  // namespace openmsa::cuda::sm90
