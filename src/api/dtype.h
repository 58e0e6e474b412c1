// Names, sizes and sets of element types.
#pragma once

#include <cstdint>
#include <string>

#include "openmsa/openmsa.hpp"

namespace openmsa {

inline constexpr int32_t kDataTypeCount = 7;

constexpr bool is_data_type(int32_t dtype) { return dtype >= 0 && dtype < kDataTypeCount; }

// Takes any value, so that messages can name what came.
constexpr const char* dtype_name(int32_t dtype) {
  constexpr const char* kNames[kDataTypeCount] = {"float32", "float16", "bfloat16", "float8_e4m3",
                                                  "int32",   "int64",   "uint8"};
  return is_data_type(dtype) ? kNames[dtype] : "an unknown type";
}

// Bytes of one element.
constexpr int64_t dtype_size(int32_t dtype) {
  constexpr int64_t kSizes[kDataTypeCount] = {4, 2, 2, 1, 4, 8, 1};
  return is_data_type(dtype) ? kSizes[dtype] : 0;
}

constexpr bool is_float8(int32_t dtype) { return dtype == OPENMSA_FLOAT8_E4M3; }

constexpr const char* device_name(openmsa_device_type device) { return device == OPENMSA_CPU ? "cpu" : "gpu"; }

class DataTypeSet {
 public:
  template <typename... Types>
  constexpr explicit DataTypeSet(Types... types) : bits_(((1u << types) | ...)) {}

  constexpr bool contains(int32_t dtype) const { return is_data_type(dtype) && ((bits_ >> dtype) & 1u) != 0; }

  // "float32, float16 or bfloat16"
  std::string names() const {
    std::string text;
    uint32_t left = bits_;
    for (int32_t dtype = 0; left != 0; ++dtype) {
      if ((left & (1u << dtype)) == 0) continue;
      left &= ~(1u << dtype);
      if (!text.empty()) text += left == 0 ? " or " : ", ";
      text += dtype_name(dtype);
    }
    return text;
  }

 private:
  uint32_t bits_;
};

inline constexpr DataTypeSet kAttentionTypes{OPENMSA_FLOAT32, OPENMSA_FLOAT16, OPENMSA_BFLOAT16};
inline constexpr DataTypeSet kIndexBranchTypes{OPENMSA_FLOAT32, OPENMSA_FLOAT16, OPENMSA_BFLOAT16, OPENMSA_FLOAT8_E4M3};
inline constexpr DataTypeSet kBlockNumberTypes{OPENMSA_INT32, OPENMSA_INT64};
inline constexpr DataTypeSet kFloat32Type{OPENMSA_FLOAT32};
inline constexpr DataTypeSet kInt32Type{OPENMSA_INT32};
inline constexpr DataTypeSet kUint8Type{OPENMSA_UINT8};

}  // namespace openmsa
