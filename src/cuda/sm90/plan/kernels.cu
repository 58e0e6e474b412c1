#include <cub/device/device_radix_sort.cuh>

#include "cuda/common/error.h"
#include "cuda/sm90/plan/kernel.cuh"
#include "cuda/sm90/plan/launch.h"

namespace openmsa::cuda::sm90 {
namespace {

using Sorted = cub::DoubleBuffer<uint32_t>;

void sort(void* scratch, size_t* bytes, Sorted* keys, Sorted* values, int64_t count, int first_bit, int last_bit,
          void* stream) {
  check_cuda(cub::DeviceRadixSort::SortPairs(scratch, *bytes, *keys, *values, static_cast<int>(count), first_bit,
                                             last_bit, static_cast<cudaStream_t>(stream)),
             "sort");
}

}  // namespace

int64_t sort_workspace(int64_t count, int first_bit, int last_bit) {
  Sorted keys, values;
  size_t bytes = 0;
  sort(nullptr, &bytes, &keys, &values, count, first_bit, last_bit, nullptr);
  return static_cast<int64_t>(bytes);
}

bool sort_pairs(uint32_t* const (&keys)[2], uint32_t* const (&values)[2], int64_t count, int first_bit, int last_bit,
                void* scratch, int64_t scratch_bytes, void* stream) {
  Sorted sorted_keys(keys[0], keys[1]), sorted_values(values[0], values[1]);
  auto bytes = static_cast<size_t>(scratch_bytes);
  sort(scratch, &bytes, &sorted_keys, &sorted_values, count, first_bit, last_bit, stream);
  // Both have made the same passes.
  return sorted_keys.Current() == keys[1];
}

PlanKernels plan_kernels() {
  return {reinterpret_cast<const void*>(&find_owners), reinterpret_cast<const void*>(&list_items)};
}

}  // namespace openmsa::cuda::sm90
