// Host side of attend.
#pragma once

#include <cstdint>

#include "api/stages.h"

namespace openmsa::cuda::sm90 {

// Bytes that a call of these shapes needs, whatever the values behind its pointers.
int64_t attend_workspace(const AttendParams& params);

// Queues attention over params.indices, out and lse, on params.execution.stream of the current device. `params` has
// passed the backend's check; `workspace` has the bytes above and is aligned to 256.
void launch_attend(const AttendParams& params, void* workspace);

namespace attend {

// A kernel of one storage type, head dimension and block size.
struct AttendKernel {
  const void* entry;
  int shared_bytes;
};

AttendKernel attend_bfloat16(int64_t head_dim, int64_t block_size);
AttendKernel attend_float16(int64_t head_dim, int64_t block_size);

}  // namespace attend
}  // namespace openmsa::cuda::sm90
