// Memory of the first GPU that the sm90 backend runs on, and a stream of its own.
#include <cuda_runtime.h>

#include "cli/device.h"
#include "cuda/common/device.h"
#include "cuda/common/error.h"

namespace openmsa::cli {
namespace {

using cuda::check_cuda;
using cuda::DeviceGuard;

class GpuDevice final : public Device {
 public:
  explicit GpuDevice(int index) : index_(index) {
    const DeviceGuard guard(index_);
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  // The stream stays: at exit the runtime may be gone.

  openmsa_device_type type() const override { return OPENMSA_GPU; }
  int32_t index() const override { return index_; }
  void* stream() const override { return stream_; }

  int64_t available_bytes() const override {
    const DeviceGuard guard(index_);
    size_t available = 0, total = 0;
    check_cuda(cudaMemGetInfo(&available, &total), "cudaMemGetInfo");
    return static_cast<int64_t>(available);
  }

  std::shared_ptr<void> allocate(int64_t bytes) override {
    const DeviceGuard guard(index_);
    void* pointer = nullptr;
    check_cuda(cudaMalloc(&pointer, static_cast<size_t>(bytes > 0 ? bytes : 1)), "cudaMalloc");
    return {pointer, [](void* memory) { static_cast<void>(cudaFree(memory)); }};
  }

  void upload(void* to, const void* from_host, int64_t bytes) override {
    copy(to, from_host, bytes, cudaMemcpyHostToDevice);
  }
  void download(void* to_host, const void* from, int64_t bytes) override {
    copy(to_host, from, bytes, cudaMemcpyDeviceToHost);
  }
  void synchronize() override {
    const DeviceGuard guard(index_);
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

 private:
  void copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) {
    const DeviceGuard guard(index_);
    check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, stream_), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  int index_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

Device* gpu_device() {
  for (int i = 0; i < cuda::device_count(); ++i) {
    if (cuda::device_info(i).capability_major != 9) continue;
    static GpuDevice device(i);
    return &device;
  }
  return nullptr;
}

}  // namespace openmsa::cli
