// Bulk copies of contiguous bytes, 16 at least: PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk".
#pragma once

#include <cstdint>

#include "cuda/common/instructions/shared_address.cuh"

namespace openmsa::cuda {

// From shared to global memory, both aligned to 16 bytes. One thread issues it, after a fence_proxy_async of those that
// wrote the bytes.
__device__ inline void store_bulk(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}

// The same of bytes that L2 need not keep ("createpolicy"): what else lies there stays longer.
__device__ inline void store_bulk_streaming(void* global, const void* shared, uint32_t bytes) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, policy;\n"
      "}" ::"l"(global),
      "r"(shared_address(shared)), "r"(bytes)
      : "memory");
}

// cp.async.bulk.commit_group: the thread's stores since the last call form a group.
__device__ inline void store_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: the thread's stores have read their shared memory, which may be written again.
__device__ inline void store_bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// cp.async.bulk.wait_group: the thread's stores are done.
__device__ inline void store_bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace openmsa::cuda
