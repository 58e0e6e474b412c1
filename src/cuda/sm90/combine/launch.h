// Host side of combine.
#pragma once

#include "api/stages.h"

namespace openmsa::cuda::sm90 {

// Queues the merge on params.execution.stream of the current device. `params` has passed the backend's check.
void launch_combine(const CombineParams& params);

namespace combine {
const void* combine_bfloat16();  // kernels.cu
const void* combine_float16();
}  // namespace combine

}  // namespace openmsa::cuda::sm90
