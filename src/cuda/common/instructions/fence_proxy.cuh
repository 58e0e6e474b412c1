#pragma once

namespace openmsa::cuda {

// PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence". What this thread wrote to shared
// memory by ordinary stores is visible to matrix products and bulk copies that come after the next barrier.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace openmsa::cuda
