// Copies that run beside the threads: of tensor boxes, and of 16 bytes by each thread.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>

namespace openmsa::emulate {

// cp.async.bulk.tensor, from global to shared memory. The box lands late; until then its place holds poison.
void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, std::span<const int32_t> coordinates);
// From shared to global memory. Shared memory is read late.
void store_box(const CUtensorMap* map, const void* shared, std::span<const int32_t> coordinates);
// cp.async.bulk without a tensor map.
void copy_bytes(void* shared, const void* global, uint32_t bytes, uint64_t* barrier);
void store_bytes(void* global, const void* shared, uint32_t bytes);
// Groups of a thread's bulk stores.
void commit_stores();
void wait_stores(int pending);

// cp.async. `global` is null for zeros.
void copy_piece(void* shared, const void* global, uint32_t bytes);
void wait_pieces();
// cp.async.mbarrier.arrive.noinc
void arrive_after_pieces(uint64_t* barrier);

}  // namespace openmsa::emulate
