#include "cuda/common/stream_memory.h"

#include <cuda_runtime.h>

#include "cuda/common/error.h"

namespace openmsa::cuda {

StreamMemory::StreamMemory(void* workspace, int64_t bytes, void* stream) : data_(workspace), stream_(stream) {
  if (data_ != nullptr || bytes == 0) return;
  check_cuda(cudaMallocAsync(&data_, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)), "cudaMallocAsync");
  owned_ = true;
}

void* StreamMemory::data() const {
  const auto address = reinterpret_cast<uintptr_t>(data_);
  return static_cast<char*>(data_) + (-address) % kWorkspaceAlignment;
}

StreamMemory::~StreamMemory() {
  // A destructor cannot report; a failure here comes back from the caller's next CUDA call.
  if (owned_) static_cast<void>(cudaFreeAsync(data_, static_cast<cudaStream_t>(stream_)));
}

}  // namespace openmsa::cuda
