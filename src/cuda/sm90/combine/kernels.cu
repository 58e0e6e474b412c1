#include "cuda/sm90/combine/kernel.cuh"
#include "cuda/sm90/combine/launch.h"

namespace openmsa::cuda::sm90::combine {

const void* combine_bfloat16() { return reinterpret_cast<const void*>(&combine_kernel<Bfloat16>); }
const void* combine_float16() { return reinterpret_cast<const void*>(&combine_kernel<Float16>); }

}  // namespace openmsa::cuda::sm90::combine
