// The sm90 backend: Hopper GPUs. Stages that it lacks answer that they are unsupported.
#include <algorithm>
#include <string>
#include <vector>

#include "api/stages.h"
#include "cuda/common/device.h"
#include "cuda/common/stream_memory.h"
#include "cuda/sm90/append/launch.h"
#include "cuda/sm90/attend/launch.h"
#include "cuda/sm90/captured_mass/launch.h"
#include "cuda/sm90/checks.h"
#include "cuda/sm90/combine/launch.h"
#include "cuda/sm90/select/launch.h"
#include "cuda/sm90/select/lse.h"

namespace openmsa {
namespace {

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

// Of the blocks that attention is asked for, whoever chose them.
cuda::sm90::LseParams lse_of(const AttendParams& params) {
  cuda::sm90::LseParams lse;
  lse.layout = params.layout;
  lse.index_q = params.index->index_q;
  lse.index_k = params.index->index_k;
  lse.block_size = params.block_size;
  lse.scale = params.index->scale;
  lse.indices = *params.indices;
  lse.index_lse = *params.index_lse;
  lse.stream = params.execution.stream;
  return lse;
}

// A stage's kernels and those of index_lse run one after the other.
int64_t select_bytes(const SelectParams& params) {
  const int64_t bytes = cuda::sm90::select_workspace(params);
  return params.index_lse == nullptr ? bytes : std::max(bytes, cuda::sm90::selected_lse_workspace(lse_of(params)));
}

int64_t attend_bytes(const AttendParams& params) {
  const int64_t bytes = cuda::sm90::attend_workspace(params);
  return params.index_lse == nullptr ? bytes : std::max(bytes, cuda::sm90::selected_lse_workspace(lse_of(params)));
}

class Sm90Backend final : public Backend {
 public:
  const char* name() const override { return cuda::sm90::kBackendName; }
  openmsa_device_type device() const override { return OPENMSA_GPU; }
  const char* operations() const override {
    return "select_blocks, paged_select_blocks, sparse_attention, paged_sparse_attention, msa_attention, "
           "paged_msa_attention, combine, captured_mass, paged_append";
  }

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
  void check(const SelectParams& params) const override { cuda::sm90::check_select(params); }
  void check(const AttendParams& params) const override { cuda::sm90::check_attend(params); }
  void check(const CombineParams& params) const override { cuda::sm90::check_combine(params); }
  void check(const CapturedMassParams& params) const override { cuda::sm90::check_captured_mass(params); }
  void check(const AppendParams& params) const override { cuda::sm90::check_append(params); }

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

  void combine(const CombineParams& params) const override {
    const cuda::DeviceGuard guard(params.outs.device_index);
    cuda::sm90::launch_combine(params);
  }

  int64_t workspace(const CapturedMassParams& params) const override {
    return cuda::workspace_with_alignment(cuda::sm90::captured_mass_workspace(params));
  }

  void captured_mass(const CapturedMassParams& params) const override {
    if (params.layout.tokens_q == 0) return;
    const cuda::DeviceGuard guard(params.q.device_index);
    const int64_t bytes = cuda::sm90::captured_mass_workspace(params);
    const cuda::StreamMemory memory(params.execution.workspace, bytes, params.execution.stream);
    cuda::sm90::launch_captured_mass(params, memory.data());
  }

  int64_t workspace(const AppendParams& params) const override {
    return cuda::workspace_with_alignment(cuda::sm90::append_workspace(params));
  }

  void append(const AppendParams& params) const override {
    if (params.layout.tokens_q == 0) return;
    const cuda::DeviceGuard guard(params.k.device_index);
    const int64_t bytes = cuda::sm90::append_workspace(params);
    const cuda::StreamMemory memory(params.execution.workspace, bytes, params.execution.stream);
    cuda::sm90::launch_append(params, memory.data());
  }

  int64_t workspace(const AttendParams& params) const override {
    return cuda::workspace_with_alignment(attend_bytes(params));
  }

  void attend(const AttendParams& params) const override {
    if (params.layout.tokens_q == 0) return;
    const cuda::DeviceGuard guard(params.q.device_index);
    const cuda::StreamMemory memory(params.execution.workspace, attend_bytes(params), params.execution.stream);
    cuda::sm90::launch_attend(params, memory.data());
    if (params.index_lse == nullptr) return;
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
