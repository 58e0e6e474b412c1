// Host side of append.
#pragma once

#include <cstdint>

#include "api/stages.h"

namespace openmsa::cuda::sm90 {

int64_t append_workspace(const AppendParams& params);

// Queues the copies on params.execution.stream of the current device. `params` has passed the backend's check;
// `workspace` has the bytes above and is aligned to 256.
void launch_append(const AppendParams& params, void* workspace);

namespace append {
const void* append_kernel_entry();  // kernels.cu
}  // namespace append

}  // namespace openmsa::cuda::sm90
