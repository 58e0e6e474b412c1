#include "emulate/tensor_map.h"

#include <cstring>

#include "emulate/block.h"

namespace openmsa::emulate {
namespace {

constexpr uint16_t kSeal = 0x746d;

int element_bytes(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      return 4;
    default:
      return 0;  // not emulated
  }
}

int64_t swizzle_bytes(CUtensorMapSwizzle swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_32B:
      return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B:
      return 64;
    case CU_TENSOR_MAP_SWIZZLE_128B:
      return 128;
    default:
      return 0;
  }
}

}  // namespace

int64_t TensorMap::box_bytes() const {
  int64_t bytes = element_bytes;
  for (int axis = 0; axis < rank; ++axis) bytes *= box[axis];
  return bytes;
}

TensorMap read_tensor_map(const CUtensorMap* map) {
  TensorMap result;
  std::memcpy(&result, map, sizeof(result));
  if (result.seal != kSeal) Block::current().fault("a bulk copy's tensor map was not made by cuTensorMapEncodeTiled");
  return result;
}

}  // namespace openmsa::emulate

// The driver's own conditions (CUDA Driver API, "Tensor Map Object Managment").
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                                const cuuint64_t* lengths, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion /*promotion*/,
                                CUtensorMapFloatOOBfill fill) {
  using openmsa::emulate::TensorMap;
  const int bytes = openmsa::emulate::element_bytes(type);
  const auto address = reinterpret_cast<uintptr_t>(base);
  if (bytes == 0 || rank < 1 || rank > openmsa::emulate::kMostMapAxes || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      base == nullptr || address % 16 != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  TensorMap result{};
  result.base = address;
  result.rank = static_cast<uint8_t>(rank);
  result.element_bytes = static_cast<uint8_t>(bytes);
  result.swizzle = static_cast<uint8_t>(swizzle);
  result.fill_nan = fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ? 0 : 1;
  result.seal = openmsa::emulate::kSeal;
  for (cuuint32_t axis = 0; axis < rank; ++axis) {
    if (lengths[axis] < 1 || lengths[axis] > uint64_t{1} << 32 || box[axis] < 1 || box[axis] > 256 ||
        element_strides[axis] != 1) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    result.lengths[axis] = lengths[axis];
    result.box[axis] = static_cast<uint16_t>(box[axis]);
    if (axis == 0) continue;
    if (strides[axis - 1] % 16 != 0 || strides[axis - 1] >= uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
    result.strides[axis - 1] = strides[axis - 1];
  }
  const int64_t widest = openmsa::emulate::swizzle_bytes(swizzle);
  if (result.row_bytes() % 16 != 0 || (widest != 0 && result.row_bytes() > widest)) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &result, sizeof(result));
  return CUDA_SUCCESS;
}
