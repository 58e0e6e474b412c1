#include "cpp/sm90_times.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/common/error.h"

namespace openmsa::testing {

using cases::gpu_memory;
using cuda::check_cuda;

void* random_rows(int64_t elements) {
  constexpr int64_t kPeriod = (1 << 20) + 128;
  std::mt19937_64 random(9);
  HostTensor values = cases::make_host_tensor(OPENMSA_BFLOAT16, {1, 1, kPeriod}, {}, 0);
  for (int64_t i = 0; i < kPeriod; ++i) set_element(values, normal(random), 0, 0, i);
  void* const rows = gpu_memory().allocate(2 * elements);
  for (int64_t at = 0; at < elements; at += kPeriod) {
    gpu_memory().upload(static_cast<char*>(rows) + 2 * at, values.element(), 2 * std::min(kPeriod, elements - at));
  }
  return rows;
}

double median_milliseconds(const std::function<void()>& call) {
  const auto stream = static_cast<cudaStream_t>(gpu_memory().stream());
  cudaEvent_t begin = nullptr, end = nullptr;
  check_cuda(cudaEventCreate(&begin), "cudaEventCreate");
  check_cuda(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times;
  for (int i = 0; i < 23; ++i) {
    check_cuda(cudaEventRecord(begin, stream), "cudaEventRecord");
    call();
    check_cuda(cudaEventRecord(end, stream), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end), "cudaEventSynchronize");
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    if (i >= 3) times.push_back(milliseconds);
  }
  std::sort(times.begin(), times.end());
  check_cuda(cudaEventDestroy(begin), "cudaEventDestroy");
  check_cuda(cudaEventDestroy(end), "cudaEventDestroy");
  return times[times.size() / 2];
}

}  // namespace openmsa::testing
