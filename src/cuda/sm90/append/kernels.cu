#include "cuda/sm90/append/kernel.cuh"
#include "cuda/sm90/append/launch.h"

namespace openmsa::cuda::sm90::append {

const void* append_kernel_entry() { return reinterpret_cast<const void*>(&append_kernel); }

}  // namespace openmsa::cuda::sm90::append
