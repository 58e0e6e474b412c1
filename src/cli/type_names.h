// Short names of element types, as tables and options use them.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

#include "openmsa/openmsa.hpp"

namespace openmsa::cli {

inline constexpr std::array<std::pair<std::string_view, DataType>, 4> kShortTypeNames{{
    {"fp32", OPENMSA_FLOAT32},
    {"bf16", OPENMSA_BFLOAT16},
    {"fp16", OPENMSA_FLOAT16},
    {"fp8", OPENMSA_FLOAT8_E4M3},
}};

constexpr std::string_view short_type_name(int32_t dtype) {
  for (const auto& [name, type] : kShortTypeNames) {
    if (type == dtype) return name;
  }
  return "?";
}

// -1 for an unknown name.
constexpr int32_t dtype_of_short_name(std::string_view wanted) {
  for (const auto& [name, type] : kShortTypeNames) {
    if (name == wanted) return type;
  }
  return -1;
}

}  // namespace openmsa::cli
