#include "cuda/common/launch.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <string>

#include "cuda/common/error.h"

namespace openmsa::cuda {

void launch_kernel(const char* name, const void* kernel, const LaunchShape& shape, void* stream, void* arguments) {
  constexpr int64_t kMostBlocks = std::numeric_limits<int32_t>::max();
  // Each launch sets it: the limit belongs to the kernel and the device, and asking is as dear as setting.
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes)),
      "cudaFuncSetAttribute");
  const dim3 grid(static_cast<unsigned>(std::min(shape.blocks_x, kMostBlocks)), static_cast<unsigned>(shape.blocks_y));
  void* parameters[] = {arguments};
  const cudaError_t code = cudaLaunchKernel(kernel, grid, dim3(static_cast<unsigned>(shape.threads)), parameters,
                                            static_cast<size_t>(shape.shared_bytes), static_cast<cudaStream_t>(stream));
  if (code != cudaSuccess) check_cuda(code, (std::string("launch of ") + name).c_str());
}

}  // namespace openmsa::cuda
