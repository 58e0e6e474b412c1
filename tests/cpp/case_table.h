// The case table (tests/cases/README.md) and its inputs, the C++ twin of tests/python/case_inputs.py: both give the
// same bits, which tests/cases/checksums.json holds.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpp/case_memory.h"

namespace openmsa::cases {

using Range = std::array<int64_t, 2>;  // [first, end)

enum class TensorId {
  q,
  k,
  v,
  index_q,
  index_k,
  d_out,
  new_k,
  new_v,
  new_index_k,
  indices,
  outs,
  lses,
  out,
  lse,
  index_lse
};
const char* tensor_name(TensorId tensor);
TensorId tensor_named(const std::string& name);

struct Edit {
  std::string tensor;
  std::vector<Range> rows;
  std::optional<Range> heads, dims;
  float value = 0;
};

struct Pages {
  int64_t pages = 0, max_pages = 0, table_stride = 0;
  std::vector<std::vector<int32_t>> block_table;
  std::vector<int32_t> seq_lens;
  std::string layout;
  DataType cache_dtype = OPENMSA_FLOAT32;
  std::optional<double> k_scale, v_scale;
  std::string scale_form;  // "none", "value" or "tensor"
};

struct Case {
  std::string name;
  uint64_t seed = 0;
  std::vector<std::string> tags, ops, needs_index, needs_main;
  int64_t heads_q = 0, heads_kv = 0, heads_index = 0, heads_index_k = 0, dim = 0, dim_v = 0, dim_index = 0;
  DataType dtype = OPENMSA_FLOAT32, index_dtype = OPENMSA_FLOAT32, indices_dtype = OPENMSA_INT32;
  int64_t block_size = 128, topk = 0, init_blocks = 0, local_blocks = 1;
  std::optional<double> scale, index_scale;
  int64_t tokens_q = 0, tokens_k = 0;
  std::optional<std::vector<int32_t>> cu_seqlens_q, cu_seqlens_k, k_starts;
  std::optional<Pages> paged;
  std::string layout, values, selection, raises;  // selection and raises: empty = none
  double amplitude = 1;
  std::vector<Edit> edits;
  std::vector<Range> invisible;  // key rows that no query of the call sees
  int64_t splits = 0;

  bool has_tag(const char* tag) const;
  bool runs(const char* op) const;
  bool packed() const { return cu_seqlens_q.has_value(); }
};

const std::vector<Case>& case_table();

// Keys of one sequence by position, -1 where invisible; offsets and lengths clamped as GPUs do.
struct SequenceKeys {
  int64_t first_query = 0, queries = 0;
  std::vector<int64_t> rows;
};
std::vector<SequenceKeys> sequence_keys(const Case& c);
// Per query: position after the last key that it may see, 0 for none.
std::vector<int64_t> visible_keys(const Case& c);

std::vector<int64_t> shape_of(const Case& c, TensorId tensor);
DataType dtype_of(const Case& c, TensorId tensor);

// What fills gaps, guards and memory that is to be written: NaN in every floating-point type.
inline constexpr unsigned char kFill = 0xFF;

// An input in the strides that the case asks for; `poisoned` puts NaN or inf wherever no query of the call sees.
HostTensor make_input(const Case& c, TensorId tensor, bool poisoned);
// An output of the shape and strides of `tensor` (a gradient: of its tensor), every byte `fill`.
HostTensor make_output(const Case& c, TensorId tensor, unsigned char fill);
HostTensor make_int32(const std::vector<int32_t>& values);
HostTensor make_scalar(float value);
HostTensor make_block_table(const Pages& pages);

// Sum of (bits of element i) * (2 i + 1), modulo 2^64, as 16 hexadecimal digits.
std::string checksum(const HostTensor& tensor);
// The names and checksums that tests/cases/checksums.json holds for a case.
std::vector<std::pair<std::string, std::string>> expected_checksums(const std::string& case_name);

}  // namespace openmsa::cases
