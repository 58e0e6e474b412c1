// Emulates src/cuda/common/instructions/copy_async.cuh.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/shared_address.cuh"
#include "emulate/copies.h"

namespace openmsa::cuda {

inline void copy_async(void* shared, const void* global, bool present) {
  emulate::copy_piece(shared, present ? global : nullptr, 16);
}

inline void copy_async_wait_all() { emulate::wait_pieces(); }

inline void copy_async_arrive(uint64_t* barrier) { emulate::arrive_after_pieces(barrier); }

}  // namespace openmsa::cuda
