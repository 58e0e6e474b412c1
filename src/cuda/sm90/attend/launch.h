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

// How attention is divided; what a call gets is launch.cc's choice. Tests and measurements set it, before any call.
struct AttendTuning {
  // Blocks that fewer of a tile's tokens selected are read block by block instead (rest.cuh). 0: none.
  int32_t least_members = 3;
  int64_t least_tokens = 65536;  // of a call, for that: below, it costs more than it saves where neighbours agree
  int64_t partial_bytes = int64_t{896} << 20;
  // A tile has a rest where its tokens selected more than so many times topk blocks.
  int64_t least_spread = 3;
};
AttendTuning& attend_tuning();

namespace attend {

// A kernel of one storage type, head dimension and block size.
struct AttendKernel {
  const void* entry;
  int shared_bytes;
};

const void* repair_bfloat16();  // bfloat16.cu
const void* repair_float16();

AttendKernel rest_bfloat16(int64_t head_dim, int64_t block_size);  // rest_bfloat16.cu
AttendKernel rest_float16(int64_t head_dim, int64_t block_size);
const void* join_bfloat16();
const void* join_float16();

AttendKernel attend_bfloat16(int64_t head_dim, int64_t block_size);
AttendKernel attend_float16(int64_t head_dim, int64_t block_size);

}  // namespace attend
}  // namespace openmsa::cuda::sm90
