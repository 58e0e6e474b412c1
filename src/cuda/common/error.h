// Every CUDA call goes through check_cuda, into the library's one error path.
#pragma once

#include <cuda_runtime.h>

namespace openmsa::cuda {

// Throws openmsa::Error when `code` is a failure: OPENMSA_OUT_OF_MEMORY or OPENMSA_DEVICE_ERROR, with the call's name
// and the runtime's message.
void check_cuda(cudaError_t code, const char* call);

}  // namespace openmsa::cuda
