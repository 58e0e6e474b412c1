// The sm90 backend: Hopper GPUs. Select for now; the other stages answer that they are unsupported.
#include <algorithm>
#include <string>
#include <vector>

#include "api/dtype.h"
#include "api/error.h"
#include "api/stages.h"
#include "cuda/common/checks.h"
#include "cuda/common/device.h"
#include "cuda/common/stream_memory.h"
#include "cuda/sm90/select/config.h"
#include "cuda/sm90/select/launch.h"
#include "cuda/sm90/select/lse.h"

namespace openmsa {
namespace {

constexpr const char* kName = "sm90";

constexpr DataTypeSet kIndexTypes{OPENMSA_FLOAT16, OPENMSA_BFLOAT16, OPENMSA_FLOAT8_E4M3};

constexpr int64_t kMostStrideBytes = int64_t{1} << 40;  // of a bulk copy

void check_index_tensor(const char* name, const Tensor& tensor) {
  if (!kIndexTypes.contains(tensor.dtype)) {
    fail_unsupported(name, ": backend ", kName, " does not support ", dtype_name(tensor.dtype), "; it supports ",
                     kIndexTypes.names());
  }
  const int64_t head_dim = tensor.shape[tensor.rank - 1];
  if (head_dim != 64 && head_dim != 128) {
    fail_unsupported(name, ": backend ", kName, " does not support head dimension ", head_dim,
                     "; it supports 64 and 128");
  }
  cuda::check_vector_alignment(kName, name, tensor);
  for (int32_t axis = 0; axis + 1 < tensor.rank; ++axis) {
    const int64_t elements = tensor.strides[axis] < 0 ? -tensor.strides[axis] : tensor.strides[axis];
    if (tensor.shape[axis] > 1 && elements >= kMostStrideBytes / dtype_size(tensor.dtype)) {
      fail_unsupported(name, ": backend ", kName, " does not support a stride of ", tensor.strides[axis],
                       " elements (axis ", axis, "); it supports less than 2^40 bytes");
    }
  }
}

void check_layout(const SequenceLayout& layout) {
  const auto check = [](const char* name, const int32_t* data) {
    cuda::check_type_alignment(kName, name, data, sizeof(int32_t));
  };
  check("cu_seqlens_q", layout.cu_seqlens_q);
  check("cu_seqlens_k", layout.cu_seqlens_k);
  check("k_starts", layout.k_starts);
  check("block_table", layout.block_table);
  check("seq_lens", layout.seq_lens);
}

cuda::sm90::LseParams lse_of(const SelectParams& params) {
  cuda::sm90::LseParams lse;
  lse.layout = params.layout;
  lse.index_q = params.index_q;
  lse.index_k = params.index_k;
  lse.block_size = params.block_size;
  lse.scale = params.scale;
  lse.indices = params.indices;
  lse.index_lse = *params.index_lse;
  lse.stream = params.execution.stream;
  return lse;
}

// Its kernels and those of index_lse run one after the other.
int64_t select_bytes(const SelectParams& params) {
  const int64_t bytes = cuda::sm90::select_workspace(params);
  return params.index_lse == nullptr ? bytes : std::max(bytes, cuda::sm90::selected_lse_workspace(lse_of(params)));
}

class Sm90Backend final : public Backend {
 public:
  const char* name() const override { return kName; }
  openmsa_device_type device() const override { return OPENMSA_GPU; }
  const char* operations() const override { return "select_blocks, paged_select_blocks"; }

  bool available() const override {
    for (int i = 0; i < cuda::device_count(); ++i) {
      if (cuda::device_info(i).capability_major == 9) return true;
    }
    return false;
  }

  Limits limits() const override {
    Limits limits;
    limits.types = "float16, bfloat16, float8_e4m3";
    limits.block_sizes = "64, 128";
    limits.head_dims = "64, 128";
    limits.topk = "1-64";
    return limits;
  }

  std::vector<std::string> device_names() const override {
    std::vector<std::string> names;
    for (int i = 0; i < cuda::device_count(); ++i) names.push_back(cuda::device_info(i).name);
    return names;
  }

  void copy_to_host(void* destination, const void* source, int64_t bytes, void* stream) const override {
    cuda::copy_to_host(destination, source, bytes, stream);
  }

  using Backend::check;
  void check(const SelectParams& params) const override {
    const SequenceLayout& layout = params.layout;
    const char* const k_name = layout.paged ? "index_k_cache" : "index_k";
    check_index_tensor("index_q", params.index_q);
    check_index_tensor(k_name, params.index_k);
    if (params.block_size != 128 && params.block_size != 64) {
      fail_unsupported("block_size: backend ", kName, " does not support ", params.block_size,
                       "; it supports 128 and 64");
    }
    if (params.topk < 1 || params.topk > cuda::sm90::kMaxTopk) {
      fail_unsupported("topk: backend ", kName, " does not support ", params.topk, "; it supports 1 to ",
                       cuda::sm90::kMaxTopk);
    }
    const int64_t index_heads = params.index_q.shape[1];
    if (index_heads < 1 || index_heads > cuda::sm90::kMaxIndexHeads) {
      fail_unsupported("index_q: backend ", kName, " does not support ", index_heads, " index heads; it supports 1 to ",
                       cuda::sm90::kMaxIndexHeads);
    }
    // Kernels count tokens in int32, as offsets and lengths do; 2^31 rows of 64 bytes are the memory of a device.
    if (layout.tokens_q > cuda::sm90::kMostTokens) {
      fail_unsupported("index_q: backend ", kName, " does not support ", layout.tokens_q,
                       " queries; it supports at most ", cuda::sm90::kMostTokens);
    }
    if (!layout.paged && layout.tokens_k > cuda::sm90::kMostTokens) {
      fail_unsupported(k_name, ": backend ", kName, " does not support ", layout.tokens_k,
                       " keys; it supports at most ", cuda::sm90::kMostTokens);
    }
    cuda::check_type_alignment(kName, "indices", params.indices.data, dtype_size(params.indices.dtype));
    if (params.index_lse != nullptr) {
      cuda::check_type_alignment(kName, "index_lse", params.index_lse->data, sizeof(float));
    }
    check_layout(layout);
    cuda::check_sm90_device(kName, "index_q", params.index_q);
  }

  using Backend::workspace;
  int64_t workspace(const SelectParams& params) const override {
    return cuda::workspace_with_alignment(select_bytes(params));
  }

  void select(const SelectParams& params) const override {
    if (params.layout.tokens_q == 0) return;
    const cuda::DeviceGuard guard(params.index_q.device_index);
    const cuda::StreamMemory memory(params.execution.workspace, select_bytes(params), params.execution.stream);
    cuda::sm90::launch_select(params, memory.data());
    if (params.index_lse == nullptr) return;
    // From the selected blocks: the scoring pass forms no exponential.
    cuda::sm90::LseParams lse = lse_of(params);
    lse.workspace = memory.data();
    cuda::sm90::launch_selected_lse(lse);
  }
};

}  // namespace

const Backend& sm90_backend() {
  static const Sm90Backend backend;
  return backend;
}

}  // namespace openmsa
