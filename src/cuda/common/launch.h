// Launches: grids that hold any int64 count, dynamic shared memory, errors.
#pragma once

#include <cstdint>

namespace openmsa::cuda {

struct LaunchShape {
  int64_t blocks_x = 1;  // work items; more than the grid's limit are shared out, so kernels step by gridDim.x
  int blocks_y = 1;
  int threads = 1;
  int64_t shared_bytes = 0;  // dynamic
};

// Queues `kernel`, a __global__ function of one parameter of type Arguments, on the current device. Nothing waits.
void launch_kernel(const char* name, const void* kernel, const LaunchShape& shape, void* stream, void* arguments);

}  // namespace openmsa::cuda
