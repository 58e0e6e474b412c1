// The kernel that lists a call's work units.
#pragma once

#include "cuda/sm90/select/config.h"

namespace openmsa::cuda::sm90 {

// A __global__ function of ScheduleArguments, for one thread block of schedule_threads() threads.
const void* schedule_kernel_entry();
int schedule_threads();

}  // namespace openmsa::cuda::sm90
