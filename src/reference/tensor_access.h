// Reading and writing tensors of any strides and storage type as doubles.
#pragma once

#include <cstdint>
#include <cstring>

#include "api/dtype.h"
#include "api/error.h"
#include "api/numeric.h"
#include "api/stages.h"

namespace openmsa::reference {

// The rows [token][head] of a tensor [tokens, heads, dim]; of a tensor of rank 4, [pages, page size, heads, dim],
// tokens count through the pages.
class Rows {
 public:
  // `factor` multiplies what is read (the scale of a float8 cache).
  explicit Rows(const Tensor& tensor, double factor = 1.0) : tensor_(tensor), factor_(factor) {}

  int64_t heads() const { return tensor_.shape[tensor_.rank - 2]; }
  int64_t dim() const { return tensor_.shape[tensor_.rank - 1]; }

  void load(int64_t token, int64_t head, double* row) const {
    const int64_t start = offset(token, head);
    switch (tensor_.dtype) {
      case OPENMSA_FLOAT32:
        return load_as<float>(start, row, [](float stored) { return stored; });
      case OPENMSA_FLOAT16:
        return load_as<uint16_t>(start, row, float16_to_float);
      case OPENMSA_BFLOAT16:
        return load_as<uint16_t>(start, row, bfloat16_to_float);
      case OPENMSA_FLOAT8_E4M3:
        return load_as<uint8_t>(start, row, float8_e4m3_to_float);
      default:
        fail_type();
    }
  }

  // Copies a row of the same type bit by bit.
  void copy(int64_t token, int64_t head, const Rows& from, int64_t from_token) const {
    const int64_t bytes = dtype_size(tensor_.dtype);
    std::memcpy(static_cast<char*>(tensor_.data) + bytes * offset(token, head),
                static_cast<const char*>(from.tensor_.data) + bytes * from.offset(from_token, head),
                static_cast<size_t>(bytes * dim()));
  }

  // Values round to float32 first, as every kernel's do.
  void store(int64_t token, int64_t head, const double* row) const {
    const int64_t start = offset(token, head);
    switch (tensor_.dtype) {
      case OPENMSA_FLOAT32:
        return store_as<float>(start, row, [](float value) { return value; });
      case OPENMSA_FLOAT16:
        return store_as<uint16_t>(start, row, float_to_float16);
      case OPENMSA_BFLOAT16:
        return store_as<uint16_t>(start, row, float_to_bfloat16);
      case OPENMSA_FLOAT8_E4M3:
        return store_as<uint8_t>(start, row, float_to_float8_e4m3);
      default:
        fail_type();
    }
  }

 private:
  int64_t offset(int64_t token, int64_t head) const {
    const int64_t* strides = tensor_.strides;
    if (tensor_.rank == 3) return token * strides[0] + head * strides[1];
    const int64_t page_size = tensor_.shape[1];
    return token / page_size * strides[0] + token % page_size * strides[1] + head * strides[2];
  }

  template <typename Stored, typename Convert>
  void load_as(int64_t start, double* row, Convert to_float) const {
    const Stored* stored = static_cast<const Stored*>(tensor_.data) + start;
    const int64_t length = dim();
    for (int64_t d = 0; d < length; ++d) row[d] = factor_ * static_cast<double>(to_float(stored[d]));
  }

  template <typename Stored, typename Convert>
  void store_as(int64_t start, const double* row, Convert from_float) const {
    Stored* stored = static_cast<Stored*>(tensor_.data) + start;
    const int64_t length = dim();
    for (int64_t d = 0; d < length; ++d) stored[d] = from_float(static_cast<float>(row[d]));
  }

  [[noreturn]] void fail_type() const {
    fail(OPENMSA_INTERNAL_ERROR, "backend reference: ", dtype_name(tensor_.dtype),
         " rows hold no numbers to compute with");
  }

  Tensor tensor_;
  double factor_;
};

}  // namespace openmsa::reference
