#include "cuda/sm90/captured_mass/instantiate.cuh"
#include "cuda/sm90/captured_mass/sums.cuh"

namespace openmsa::cuda::sm90::captured_mass {

MassKernel masses_bfloat16(int64_t head_dim, int64_t block_size) { return masses_of<Bfloat16>(head_dim, block_size); }

const void* sums_kernel_entry() { return reinterpret_cast<const void*>(&sums_kernel); }

}  // namespace openmsa::cuda::sm90::captured_mass
