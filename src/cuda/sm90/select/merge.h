// The kernel that merges the lists of split tiles.
#pragma once

#include <cstdint>

#include "cuda/sm90/select/config.h"

namespace openmsa::cuda::sm90 {

// A __global__ function of MergeArguments, for thread blocks of merge_threads() threads.
const void* merge_kernel_entry(int64_t topk);
int merge_threads();

}  // namespace openmsa::cuda::sm90
