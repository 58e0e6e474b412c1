// Memory of the first GPU that the sm90 backend can run on, and a stream of its own.
#include <cuda_runtime.h>

#include <stdexcept>

#include "cpp/case_memory.h"
#include "cuda/common/device.h"
#include "cuda/common/error.h"

namespace openmsa::cases {
namespace {

using cuda::check_cuda;
using cuda::DeviceGuard;

int first_sm90_device() {
  for (int i = 0; i < cuda::device_count(); ++i) {
    if (cuda::device_info(i).capability_major == 9) return i;
  }
  throw std::runtime_error("this machine has no GPU of compute capability 9.x");
}

class GpuMemory final : public DeviceMemory {
 public:
  GpuMemory() : device_(first_sm90_device()) {
    const DeviceGuard guard(device_);
    // Not ordered with the default stream: work on a wrong stream shows as a race.
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  // The stream stays: at exit the runtime may be gone.

  openmsa_device_type device() const override { return OPENMSA_GPU; }
  int32_t device_index() const override { return device_; }
  void* stream() const override { return stream_; }

  void* allocate(int64_t bytes) override {
    const DeviceGuard guard(device_);
    void* pointer = nullptr;
    check_cuda(cudaMalloc(&pointer, static_cast<size_t>(bytes)), "cudaMalloc");
    return pointer;
  }
  void release(void* pointer) noexcept override { static_cast<void>(cudaFree(pointer)); }
  void upload(void* to, const void* from_host, int64_t bytes) override {
    const DeviceGuard guard(device_);
    copy(to, from_host, bytes, cudaMemcpyHostToDevice);
  }
  void download(void* to_host, const void* from, int64_t bytes) override {
    const DeviceGuard guard(device_);
    copy(to_host, from, bytes, cudaMemcpyDeviceToHost);
  }

 private:
  void copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) {
    check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, stream_), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  int device_ = 0;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

DeviceMemory& gpu_memory() {
  static GpuMemory memory;
  return memory;
}

}  // namespace openmsa::cases
