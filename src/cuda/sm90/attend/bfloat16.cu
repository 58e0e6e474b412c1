#include "cuda/sm90/attend/instantiate.cuh"

namespace openmsa::cuda::sm90::attend {

AttendKernel attend_bfloat16(int64_t head_dim, int64_t block_size) { return attend_of<Bfloat16>(head_dim, block_size); }

}  // namespace openmsa::cuda::sm90::attend
