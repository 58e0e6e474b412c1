// openmsa: MiniMax Sparse Attention, C++ interface. Shapes, types and meanings are those of openmsa.h; every function
// throws openmsa::Error instead of returning a status, and argument structures start with the documented defaults.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "openmsa/openmsa.h"

namespace openmsa {

using Tensor = ::openmsa_tensor;
using Status = ::openmsa_status;
using DataType = ::openmsa_dtype;

class OPENMSA_API Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

// A row-major view of CPU memory: make_tensor(data, OPENMSA_FLOAT32, {Tq, Hq, D}). Shapes longer than OPENMSA_MAX_RANK
// keep their rank, which every operation refuses.
inline Tensor make_tensor(const void* data, DataType dtype, std::initializer_list<int64_t> shape) {
  Tensor tensor{};
  tensor.data = const_cast<void*>(data);
  tensor.rank = static_cast<int32_t>(shape.size());
  tensor.dtype = dtype;
  tensor.device_type = OPENMSA_CPU;
  int32_t axis = 0;
  for (int64_t length : shape) {
    if (axis < OPENMSA_MAX_RANK) tensor.shape[axis++] = length;
  }
  uint64_t stride = 1;  // wraps for sizes beyond 64 bits, which every operation refuses
  while (axis > 0) {
    --axis;
    tensor.strides[axis] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(tensor.shape[axis]);
  }
  return tensor;
}

inline constexpr openmsa_selection kDefaultSelection{16, 0, 1};

struct SelectBlocksArgs : openmsa_select_blocks_args {
  SelectBlocksArgs() : openmsa_select_blocks_args{} {
    selection = kDefaultSelection;
    block_size = 128;
  }
};
struct SparseAttentionArgs : openmsa_sparse_attention_args {
  SparseAttentionArgs() : openmsa_sparse_attention_args{} { block_size = 128; }
};
struct SparseAttentionBackwardArgs : openmsa_sparse_attention_backward_args {
  SparseAttentionBackwardArgs() : openmsa_sparse_attention_backward_args{} { block_size = 128; }
};
struct MsaAttentionArgs : openmsa_msa_attention_args {
  MsaAttentionArgs() : openmsa_msa_attention_args{} {
    selection = kDefaultSelection;
    block_size = 128;
  }
};
struct MsaAttentionBackwardArgs : openmsa_msa_attention_backward_args {
  MsaAttentionBackwardArgs() : openmsa_msa_attention_backward_args{} { block_size = 128; }
};
struct PagedSelectBlocksArgs : openmsa_paged_select_blocks_args {
  PagedSelectBlocksArgs() : openmsa_paged_select_blocks_args{} { selection = kDefaultSelection; }
};
struct PagedSparseAttentionArgs : openmsa_paged_sparse_attention_args {
  PagedSparseAttentionArgs() : openmsa_paged_sparse_attention_args{} {}
};
struct PagedMsaAttentionArgs : openmsa_paged_msa_attention_args {
  PagedMsaAttentionArgs() : openmsa_paged_msa_attention_args{} { selection = kDefaultSelection; }
};
struct CombineArgs : openmsa_combine_args {
  CombineArgs() : openmsa_combine_args{} {}
};
struct CapturedMassArgs : openmsa_captured_mass_args {
  CapturedMassArgs() : openmsa_captured_mass_args{} { block_size = 128; }
};
struct PagedAppendArgs : openmsa_paged_append_args {
  PagedAppendArgs() : openmsa_paged_append_args{} {}
};

OPENMSA_API void select_blocks(const openmsa_select_blocks_args& args);
OPENMSA_API void sparse_attention(const openmsa_sparse_attention_args& args);
OPENMSA_API void sparse_attention_backward(const openmsa_sparse_attention_backward_args& args);
OPENMSA_API void msa_attention(const openmsa_msa_attention_args& args);
OPENMSA_API void msa_attention_backward(const openmsa_msa_attention_backward_args& args);
OPENMSA_API void paged_select_blocks(const openmsa_paged_select_blocks_args& args);
OPENMSA_API void paged_sparse_attention(const openmsa_paged_sparse_attention_args& args);
OPENMSA_API void paged_msa_attention(const openmsa_paged_msa_attention_args& args);
OPENMSA_API void combine(const openmsa_combine_args& args);
OPENMSA_API void captured_mass(const openmsa_captured_mass_args& args);
OPENMSA_API void paged_append(const openmsa_paged_append_args& args);

OPENMSA_API int64_t workspace_size(const openmsa_select_blocks_args& args);
OPENMSA_API int64_t workspace_size(const openmsa_sparse_attention_args& args);
OPENMSA_API int64_t workspace_size(const openmsa_sparse_attention_backward_args& args);
OPENMSA_API int64_t workspace_size(const openmsa_msa_attention_args& args);
OPENMSA_API int64_t workspace_size(const openmsa_msa_attention_backward_args& args);
OPENMSA_API int64_t workspace_size(const openmsa_paged_select_blocks_args& args);
OPENMSA_API int64_t workspace_size(const openmsa_paged_sparse_attention_args& args);
OPENMSA_API int64_t workspace_size(const openmsa_paged_msa_attention_args& args);
OPENMSA_API int64_t workspace_size(const openmsa_combine_args& args);
OPENMSA_API int64_t workspace_size(const openmsa_captured_mass_args& args);
OPENMSA_API int64_t workspace_size(const openmsa_paged_append_args& args);

OPENMSA_API void set_workspace_limit(int64_t bytes);
OPENMSA_API int64_t workspace_limit() noexcept;
OPENMSA_API void set_check_inputs(bool enabled) noexcept;
OPENMSA_API bool check_inputs() noexcept;
OPENMSA_API void set_num_threads(int32_t threads);
OPENMSA_API int32_t num_threads() noexcept;

// One line of JSON: what this build holds and this machine offers.
OPENMSA_API std::string info();

}  // namespace openmsa
