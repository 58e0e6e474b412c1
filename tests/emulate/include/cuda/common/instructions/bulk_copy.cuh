// Emulates src/cuda/common/instructions/bulk_copy.cuh.
#pragma once

#include <cstdint>

#include "emulate/copies.h"

namespace openmsa::cuda {

inline void store_bulk(void* global, const void* shared, uint32_t bytes) {
  emulate::store_bytes(global, shared, bytes);
}
inline void store_bulk_streaming(void* global, const void* shared, uint32_t bytes) {
  emulate::store_bytes(global, shared, bytes);
}
inline void store_bulk_commit() { emulate::commit_stores(); }
inline void store_bulk_wait_read() { emulate::wait_stores(0); }
inline void store_bulk_wait() { emulate::wait_stores(0); }

}  // namespace openmsa::cuda
