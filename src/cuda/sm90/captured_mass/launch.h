// Host side of captured_mass.
#pragma once

#include <cstdint>

#include "api/stages.h"

namespace openmsa::cuda::sm90 {

int64_t captured_mass_workspace(const CapturedMassParams& params);

// Queues everything on params.execution.stream of the current device. `params` has passed the backend's check;
// `workspace` has the bytes above and is aligned to 256.
void launch_captured_mass(const CapturedMassParams& params, void* workspace);

namespace captured_mass {

// A kernel of one storage type, head dimension and block size.
struct MassKernel {
  const void* entry;
  int64_t shared_bytes;
};
MassKernel masses_bfloat16(int64_t head_dim, int64_t block_size);
MassKernel masses_float16(int64_t head_dim, int64_t block_size);
const void* sums_kernel_entry();  // bfloat16.cu

}  // namespace captured_mass
}  // namespace openmsa::cuda::sm90
