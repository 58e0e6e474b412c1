#include "cuda/sm90/plan/tile_kernel.cuh"
#include "cuda/sm90/plan/tile_launch.h"

namespace openmsa::cuda::sm90 {

const void* plan_tiles_kernel() { return reinterpret_cast<const void*>(&plan_tiles); }

}  // namespace openmsa::cuda::sm90
