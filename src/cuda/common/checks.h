// What GPU tensors need beyond the checks of src/api.
#pragma once

#include <cstdint>

#include "openmsa/openmsa.hpp"

namespace openmsa::cuda {

// Refuses, by name, a tensor whose base or whose stride of an axis longer than 1 is no multiple of 16 bytes: kernels
// load and store 16 bytes at a time. The last axis is contiguous already.
void check_vector_alignment(const char* backend, const char* name, const Tensor& tensor);

// Refuses, by name, data that is not aligned to `bytes`, its type's size.
void check_type_alignment(const char* backend, const char* name, const void* data, int64_t bytes);

// Refuses a device that is not there or is not of capability 9.x.
void check_sm90_device(const char* backend, const char* name, const Tensor& tensor);

}  // namespace openmsa::cuda
