#pragma once

namespace openmsa::cuda {

// PTX ISA, "Parallel Synchronization and Communication Instructions: bar". `threads` threads of whole warps meet at
// barrier `id` (1 to 15; __syncthreads uses 0).
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same without waiting: the threads that sync there are let through once all `threads` have come.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace openmsa::cuda
