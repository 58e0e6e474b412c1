#include "cuda/common/tensor_map.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>

#include "api/dtype.h"
#include "api/error.h"
#include "cuda/common/error.h"

namespace openmsa::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver, at run time: the library links the runtime only and loads without a driver.
Encode encoder() {
  static const Encode function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
               "cudaGetDriverEntryPointByVersion");
#else
    check_cuda(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found),
               "cudaGetDriverEntryPoint");
#endif
    if (found != cudaDriverEntryPointSuccess) fail(OPENMSA_DEVICE_ERROR, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(entry);
  }();
  return function;
}

}  // namespace

TensorMapAxis tensor_map_axis(const Tensor& tensor, int axis, int32_t box) {
  const int64_t length = tensor.shape[axis];
  const int64_t stride = length > 1 ? tensor.strides[axis] * dtype_size(tensor.dtype) : 0;
  return {std::max<int64_t>(length, 1), stride, box};
}

CUtensorMap make_tensor_map(const char* name, const void* base, int element_bytes,
                            std::span<const TensorMapAxis> axes) {
  constexpr size_t kMostAxes = 5;
  std::array<cuuint64_t, kMostAxes> lengths{}, strides{};
  std::array<cuuint32_t, kMostAxes> box{}, steps{};
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    lengths[axis] = static_cast<cuuint64_t>(axes[axis].length);
    box[axis] = static_cast<cuuint32_t>(axes[axis].box);
    steps[axis] = 1;
    if (axis > 0) strides[axis - 1] = static_cast<cuuint64_t>(axes[axis].stride);
  }
  const bool wide = axes[0].box * element_bytes == 128;
  CUtensorMap map{};
  const CUresult result = encoder()(
      &map, element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
      static_cast<cuuint32_t>(axes.size()), const_cast<void*>(base), lengths.data(), strides.data(), box.data(),
      steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail(OPENMSA_DEVICE_ERROR, name, ": the driver refuses its strides for bulk copies (code ",
         static_cast<int>(result), ")");
  }
  return map;
}

}  // namespace openmsa::cuda
