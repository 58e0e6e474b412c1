// The argument checks of every operation. Each failure names the argument, what came and what is supported, and happens
// before anything is written. On success a check costs no allocation: calls may be a few microseconds apart.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "api/dtype.h"
#include "api/error.h"
#include "api/stages.h"

namespace openmsa {

// Lengths that the arguments of a call share, called as in openmsa.h. `offsets` is B + 1.
enum class Axis : uint8_t {
  splits,
  tokens_q,
  tokens_k,
  heads_q,
  heads_kv,
  heads_index,
  heads_index_k,
  dim,
  dim_v,
  dim_index,
  topk,
  batch,
  offsets,
  pages,
  page_rows,
  max_pages,
  bytes,
  count
};
using Shape = std::initializer_list<Axis>;

enum class Purpose : uint8_t {
  run,
  workspace_size  // nothing is read or written, so outputs may lack memory
};

// Checks the arguments of one call as they are met: the first tensor fixes the device, and the first tensor with an
// axis fixes its length.
class Arguments {
 public:
  explicit Arguments(Purpose purpose) : purpose_(purpose) {}

  const Tensor& input(const char* name, const Tensor* tensor, Shape shape, DataTypeSet types);
  const Tensor* optional_input(const char* name, const Tensor* tensor, Shape shape, DataTypeSet types);
  const Tensor& output(const char* name, const Tensor* tensor, Shape shape, DataTypeSet types);
  const Tensor* optional_output(const char* name, const Tensor* tensor, Shape shape, DataTypeSet types);

  // Fixes a length that no tensor of the call has carried yet; `name` is the argument it came from.
  void set_length(const char* name, Axis axis, int64_t length);
  int64_t length(Axis axis) const { return lengths_[static_cast<size_t>(axis)]; }

  // Hkv | Hi | Hq and Hik | Hi, for those of them that the call has. Call after the tensors that carry them.
  void check_head_groups() const;

  int64_t block_size(int64_t block_size) const;
  // The rows of a page, once a cache has fixed them.
  int64_t page_size() const;
  // topk and the forced blocks, into `params`.
  void selection(const openmsa_selection& selection, SelectParams& params);
  // The given scale or 1 / sqrt(dim).
  double scale(const char* name, const double* value, Axis dim) const;
  CacheScale cache_scale(const char* name, const openmsa_cache_scale& scale, const char* cache_name,
                         const Tensor& cache);

  // Offsets of contiguous sequences, after the tensors that carry Tq and Tk.
  SequenceLayout sequences(const openmsa_sequences& sequences, int64_t block_size);
  // Tables and lengths of paged requests, after the tensors that carry Tq and the pages.
  SequenceLayout requests(const openmsa_requests& requests);

  // `bytes_needed` is asked only when the caller brings a workspace.
  template <typename BytesNeeded>
  Execution execution(const openmsa_execution& execution, const BytesNeeded& bytes_needed) {
    Execution result;
    result.stream = execution.stream;
    if (execution.workspace != nullptr) set_workspace(*execution.workspace, bytes_needed(), result);
    return result;
  }

  openmsa_device_type device() const { return device_type_; }
  // The argument that fixed the device.
  const char* device_argument() const { return device_argument_; }

 private:
  enum class Access : uint8_t { read, write };

  const Tensor& require(const char* name, const Tensor* tensor, Shape shape, DataTypeSet types, Access access);
  void check_tensor(const char* name, const Tensor& tensor, Shape shape, DataTypeSet types, Access access);
  void check_device(const char* name, const Tensor& tensor);
  void check_shape(const char* name, const Tensor& tensor, Shape shape);
  void check_divides(Axis divisor, Axis multiple) const;
  void set_workspace(const Tensor& workspace, int64_t bytes_needed, Execution& execution);

  static constexpr size_t kAxisCount = static_cast<size_t>(Axis::count);
  static constexpr int64_t kUnset = -1;
  static constexpr std::array<int64_t, kAxisCount> unset_lengths() {
    std::array<int64_t, kAxisCount> lengths{};
    lengths.fill(kUnset);
    return lengths;
  }

  Purpose purpose_;
  openmsa_device_type device_type_ = OPENMSA_CPU;
  int32_t device_index_ = 0;
  const char* device_argument_ = nullptr;
  std::array<int64_t, kAxisCount> lengths_ = unset_lengths();
  std::array<const char*, kAxisCount> origins_{};  // the argument that fixed each length
};

// `tensor` must have the type of `other`.
void check_same_type(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other);
// `cache` must have the type of `rows`, or be float8.
void check_cache_type(const char* name, const Tensor& cache, const char* rows_name, const Tensor& rows);
// A float8 tensor has no gradient.
void check_has_gradient(const char* name, const Tensor& tensor);

// Values of offsets, lengths, tables and cache scales: always on the CPU, and on the GPU with check_inputs (the backend
// then copies them, which waits for `stream`).
void check_layout_values(const Backend& backend, const SequenceLayout& layout, int64_t page_size, void* stream);
void check_cache_scale_values(const Backend& backend, const char* name, const CacheScale& scale, void* stream);

}  // namespace openmsa
