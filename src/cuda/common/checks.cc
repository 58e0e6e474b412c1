#include "cuda/common/checks.h"

#include "api/dtype.h"
#include "api/error.h"
#include "cuda/common/device.h"

namespace openmsa::cuda {
namespace {

constexpr int64_t kVectorBytes = 16;
constexpr int kCapabilityMajor = 9;

bool is_aligned(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
}

}  // namespace

void check_vector_alignment(const char* backend, const char* name, const Tensor& tensor) {
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] == 0) return;  // no element, no access
  }
  if (!is_aligned(tensor.data, kVectorBytes)) {
    fail_unsupported(name, ": its data at ", tensor.data, " is not aligned to ", kVectorBytes, " bytes, which backend ",
                     backend, " needs");
  }
  const int64_t element = dtype_size(tensor.dtype);
  for (int32_t axis = 0; axis + 1 < tensor.rank; ++axis) {
    // The remainder of the stride alone: stride times size may exceed int64 for an axis whose length allows it.
    if (tensor.shape[axis] > 1 && tensor.strides[axis] % (kVectorBytes / element) != 0) {
      fail_unsupported(name, ": the stride of axis ", axis, ", ", tensor.strides[axis], " elements of ", element,
                       " bytes, is no multiple of ", kVectorBytes, " bytes, which backend ", backend, " needs");
    }
  }
}

void check_type_alignment(const char* backend, const char* name, const void* data, int64_t bytes) {
  if (is_aligned(data, bytes)) return;
  fail_unsupported(name, ": its data at ", data, " is not aligned to its type's ", bytes, " bytes, which backend ",
                   backend, " needs");
}

void check_sm90_device(const char* backend, const char* name, const Tensor& tensor) {
  const int count = device_count();
  if (tensor.device_index < 0 || tensor.device_index >= count) {
    fail_unsupported(name, ": device gpu:", tensor.device_index, " does not exist; this machine has ", count,
                     count == 1 ? " GPU" : " GPUs", " that the CUDA driver offers");
  }
  const DeviceInfo& info = device_info(tensor.device_index);
  if (info.capability_major != kCapabilityMajor) {
    fail_unsupported(name, ": device gpu:", tensor.device_index, " (", info.name, ") has compute capability ",
                     info.capability_major, ".", info.capability_minor, "; backend ", backend, " supports ",
                     kCapabilityMajor, ".x");
  }
}

}  // namespace openmsa::cuda
