#include "cuda/sm90/attend/instantiate.cuh"
#include "cuda/sm90/attend/repair.cuh"

namespace openmsa::cuda::sm90::attend {

AttendKernel attend_bfloat16(int64_t head_dim, int64_t block_size) { return attend_of<Bfloat16>(head_dim, block_size); }

const void* repair_bfloat16() { return reinterpret_cast<const void*>(&repair_kernel<Bfloat16, Bfloat16>); }

}  // namespace openmsa::cuda::sm90::attend
