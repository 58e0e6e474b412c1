#include "cpp/sm90_lse_problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace openmsa::testing {
namespace {

using cases::cpu_memory;
using cases::gpu_memory;
using cases::make_host_tensor;
using cuda::sm90::LseParams;

HostTensor index_tensor(const Options& o) {
  return make_host_tensor(o.indices_dtype, {o.index_heads, o.tokens_q, o.topk}, o.indices_strides, 0x7f);
}

void set_index(HostTensor& indices, int64_t head, int64_t query, int64_t slot, int64_t block) {
  unsigned char* const at = indices.element(head, query, slot);
  if (indices.view.dtype == OPENMSA_INT64) {
    std::memcpy(at, &block, sizeof(block));
  } else {
    const auto narrow = static_cast<int32_t>(block);
    std::memcpy(at, &narrow, sizeof(narrow));
  }
}

int64_t longest_keys(const Options& o) {
  return o.pages > 0 ? *std::max_element(o.seq_lens.begin(), o.seq_lens.end()) : o.tokens_k;
}

}  // namespace

HostTensor any_indices(const Options& o, uint64_t seed) {
  HostTensor indices = index_tensor(o);
  std::mt19937_64 random(seed);
  const auto blocks = static_cast<uint64_t>(std::clamp<int64_t>(longest_keys(o), 0, 1 << 20) / o.block_size + 2);
  constexpr int64_t kNone[] = {-1, -2, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
  constexpr int64_t kNoneOf64[] = {int64_t{1} << 32, -(int64_t{1} << 32), std::numeric_limits<int64_t>::min(),
                                   std::numeric_limits<int64_t>::max()};
  for (int64_t head = 0; head < o.index_heads; ++head) {
    for (int64_t query = 0; query < o.tokens_q; ++query) {
      for (int64_t slot = 0; slot < o.topk; ++slot) {
        auto block = static_cast<int64_t>(random() % blocks);
        if (random() % 8 == 0) block = (o.indices_dtype == OPENMSA_INT64 ? kNoneOf64 : kNone)[random() % 4];
        set_index(indices, head, query, slot, block);
      }
    }
  }
  return indices;
}

HostTensor selected_indices(const SelectProblem& problem) {
  HostTensor indices = index_tensor(problem.options);
  const std::vector<int64_t> chosen = run_on_reference(problem).indices;
  size_t i = 0;
  for (int64_t head = 0; head < problem.options.index_heads; ++head) {
    for (int64_t query = 0; query < problem.options.tokens_q; ++query) {
      for (int64_t slot = 0; slot < problem.options.topk; ++slot) set_index(indices, head, query, slot, chosen[i++]);
    }
  }
  return indices;
}

HostTensor index_rows(const HostTensor& indices, int64_t begin, int64_t rows) {
  const int64_t* shape = indices.view.shape;
  HostTensor part = make_host_tensor(static_cast<DataType>(indices.view.dtype), {shape[0], rows, shape[2]}, {}, 0x7f);
  const size_t bytes = indices.view.dtype == OPENMSA_INT64 ? sizeof(int64_t) : sizeof(int32_t);
  for (int64_t head = 0; head < shape[0]; ++head) {
    for (int64_t query = 0; query < rows; ++query) {
      for (int64_t slot = 0; slot < shape[2]; ++slot) {
        std::memcpy(part.element(head, query, slot), indices.element(head, begin + query, slot), bytes);
      }
    }
  }
  return part;
}

PlacedLse::PlacedLse(DeviceMemory& memory, const SelectProblem& problem, const HostTensor& indices, double scale)
    : placed_(memory, problem), indices_(memory, indices) {
  const Options& o = problem.options;
  lse_ = PlacedTensor(memory, make_host_tensor(OPENMSA_FLOAT32, {o.index_heads, o.tokens_q}, o.lse_strides, 0x55));
  const SelectParams select = placed_.params();
  params_.layout = select.layout;
  params_.index_q = select.index_q;
  params_.index_k = select.index_k;
  params_.block_size = select.block_size;
  params_.scale = scale > 0 ? scale : select.scale;
  if (indices_.present()) params_.indices = *indices_.tensor();
  params_.index_lse = *lse_.tensor();
  params_.stream = memory.stream();
}

std::vector<float> PlacedLse::result() const {
  const std::vector<unsigned char> bytes = packed_bytes(lse_.fetch());
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

int64_t PlacedLse::workspace() const {
  return selected() ? cuda::sm90::selected_lse_workspace(params_) : cuda::sm90::prefix_lse_workspace(params_);
}

void PlacedLse::launch(void* workspace) const {
  LseParams params = params_;
  params.workspace = workspace;
  selected() ? cuda::sm90::launch_selected_lse(params) : cuda::sm90::launch_prefix_lse(params);
}

std::vector<float> lse_on_gpu(const PlacedLse& placed) {
  const GuardedWorkspace workspace(gpu_memory(), placed.workspace());
  placed.launch(workspace.data());
  std::vector<float> result = placed.result();
  workspace.expect_guards_as_they_were();
  return result;
}

std::vector<float> lse_on_gpu(const SelectProblem& problem, const HostTensor& indices, double scale) {
  return lse_on_gpu(PlacedLse(gpu_memory(), problem, indices, scale));
}

// The reference forms index_lse beside attention, here one of zeros of head dimension 1.
std::vector<float> lse_on_reference(const SelectProblem& problem, const HostTensor& indices, double scale) {
  const PlacedLse placed(cpu_memory(), problem, indices, scale);
  const LseParams& lse = placed.params();
  const Options& o = problem.options;
  const auto zeros = [](const std::vector<int64_t>& shape) {
    return PlacedTensor(cpu_memory(), make_host_tensor(OPENMSA_FLOAT32, shape, {}, 0));
  };
  const PlacedTensor q = zeros({o.tokens_q, o.index_heads, 1}), out = zeros({o.tokens_q, o.index_heads, 1});
  const PlacedTensor k = o.pages > 0 ? zeros({o.pages, o.block_size, 1, 1}) : zeros({o.tokens_k, 1, 1});
  const IndexBranch index{lse.index_q, lse.index_k, lse.scale};
  AttendParams params;
  params.layout = lse.layout;
  params.q = *q.tensor();
  params.k = params.v = *k.tensor();
  params.out = *out.tensor();
  if (placed.selected()) params.indices = &lse.indices;
  params.index_heads = o.index_heads;
  params.block_size = o.block_size;
  params.index = &index;
  params.index_lse = &lse.index_lse;
  reference_backend().attend(params);
  return placed.result();
}

void expect_close_lse(const std::vector<float>& got, const std::vector<float>& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  constexpr float kTolerance = 2e-5F;
  int faults = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const float a = got[i], b = expected[i];
    const bool same = std::isfinite(b) ? std::abs(a - b) <= kTolerance * std::max(1.0F, std::abs(b))
                      : std::isnan(b)  ? std::isnan(a)
                                       : a == b;
    if (!same && ++faults <= 3) ADD_FAILURE() << what << ": row " << i << " is " << a << ", not " << b;
  }
  EXPECT_EQ(faults, 0) << what;
}

void expect_same_lse(const std::vector<float>& got, const std::vector<float>& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  int faults = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::bit_cast<uint32_t>(got[i]) != std::bit_cast<uint32_t>(expected[i]) && ++faults <= 3) {
      ADD_FAILURE() << what << ": row " << i << " is " << got[i] << ", not the bits of " << expected[i];
    }
  }
  EXPECT_EQ(faults, 0) << what;
}

void compare_lse(const SelectProblem& problem, const HostTensor& indices, const std::string& what, double scale) {
  const std::string form = (indices.present() ? "selected, " : "prefix, ") + what;
  expect_close_lse(lse_on_gpu(problem, indices, scale), lse_on_reference(problem, indices, scale), form);
}

void compare_both_lse(const SelectProblem& problem, const std::string& what, double scale) {
  compare_lse(problem, any_indices(problem.options), what, scale);
  if (problem.options.pages == 0) compare_lse(problem, {}, what, scale);
}

std::vector<float> lse_rows(const std::vector<float>& all, int64_t heads, int64_t begin, int64_t rows) {
  const auto of = static_cast<int64_t>(all.size()) / heads;
  std::vector<float> part;
  for (int64_t head = 0; head < heads; ++head) {
    part.insert(part.end(), all.begin() + head * of + begin, all.begin() + head * of + begin + rows);
  }
  return part;
}

}  // namespace openmsa::testing
