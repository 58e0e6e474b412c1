#include "cuda/sm90/captured_mass/instantiate.cuh"

namespace openmsa::cuda::sm90::captured_mass {

MassKernel masses_float16(int64_t head_dim, int64_t block_size) { return masses_of<Float16>(head_dim, block_size); }

}  // namespace openmsa::cuda::sm90::captured_mass
