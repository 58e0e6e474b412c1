#include "cuda/common/device.h"

#include <cuda_runtime.h>

#include <vector>

#include "api/error.h"
#include "cuda/common/error.h"

namespace openmsa::cuda {
namespace {

int attribute(cudaDeviceAttr attr, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attr, device), "cudaDeviceGetAttribute");
  return value;
}

DeviceInfo read_device(int index) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  DeviceInfo info;
  info.name = properties.name;
  info.capability_major = properties.major;
  info.capability_minor = properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  info.l2_bytes = attribute(cudaDevAttrL2CacheSize, index);
  info.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  info.shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  return info;
}

const std::vector<DeviceInfo>& devices() {
  static const std::vector<DeviceInfo> list = [] {
    std::vector<DeviceInfo> found(static_cast<size_t>(device_count()));
    for (size_t i = 0; i < found.size(); ++i) found[i] = read_device(static_cast<int>(i));
    return found;
  }();
  return list;
}

}  // namespace

int device_count() {
  static const int count = [] {
    int found = 0;
    if (cudaGetDeviceCount(&found) == cudaSuccess) return found;
    // No driver, a driver too old, or no device: the library works without its GPU backend.
    static_cast<void>(cudaGetLastError());
    return 0;
  }();
  return count;
}

const DeviceInfo& device_info(int index) { return devices().at(static_cast<size_t>(index)); }

DeviceGuard::DeviceGuard(int device) {
  check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
  if (previous_ == device) return;
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  switched_ = true;
}

DeviceGuard::~DeviceGuard() {
  // A destructor cannot report; a failure here comes back from the caller's next CUDA call.
  if (switched_) static_cast<void>(cudaSetDevice(previous_));
}

void copy_to_host(void* destination, const void* source, int64_t bytes, void* stream) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, source), "cudaPointerGetAttributes");
  if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) {
    fail_argument("a GPU tensor's data at ", source, " is not GPU memory");
  }
  const DeviceGuard guard(attributes.device);
  const auto queue = static_cast<cudaStream_t>(stream);
  check_cuda(cudaMemcpyAsync(destination, source, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, queue),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(queue), "cudaStreamSynchronize");
}

}  // namespace openmsa::cuda
