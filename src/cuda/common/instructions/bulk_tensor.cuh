// Bulk copies of tensor boxes: PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.tensor". One thread
// issues them. Elements outside the tensor arrive as zeros; they too count among the bytes that the barrier waits for.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/common/instructions/shared_address.cuh"

namespace openmsa::cuda {

// prefetch.tensormap: the map is on its way to the cache.
__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box of a 3-D tensor that starts at these coordinates, to shared memory.
__device__ inline void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, int32_t c0, int32_t c1,
                                int32_t c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

// The same of a 4-D tensor.
__device__ inline void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, int32_t c0, int32_t c1,
                                int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The box on its way to L2 alone.
__device__ inline void prefetch_box(const CUtensorMap* map, int32_t c0, int32_t c1, int32_t c2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(c0), "r"(c1),
               "r"(c2)
               : "memory");
}

}  // namespace openmsa::cuda
