#include "cuda/sm90/select/lse.h"

#include <algorithm>
#include <limits>
#include <numbers>

#include "api/dtype.h"
#include "api/error.h"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/plan/launch.h"
#include "cuda/sm90/select/lse_kernels.h"

namespace openmsa::cuda::sm90 {
namespace {

using namespace lse;

constexpr int64_t kAlignment = 256;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

LseScale scale_of(double scale) {
  // Between them products with any score that is a sum of 16-bit products stay away from float32's limits, or the
  // result does not.
  constexpr double kSmallest = 0x1p-60, kLargest = 0x1p60;
  if (scale < kSmallest || scale > kLargest) return {scale, std::numbers::log2e_v<float>, true};
  return {scale, static_cast<float>(scale * std::numbers::log2e), false};
}

LseKernel partial_kernel(const LseParams& params) {
  const int64_t head_dim = params.index_q.shape[2];
  switch (params.index_q.dtype) {
    case OPENMSA_BFLOAT16:
      return partial_lse_bfloat16(head_dim, params.block_size);
    case OPENMSA_FLOAT16:
      return partial_lse_float16(head_dim, params.block_size);
    default:
      return partial_lse_float8_e4m3(head_dim, params.block_size);
  }
}

LseKernel prefix_kernel(const LseParams& params) {
  const int64_t head_dim = params.index_q.shape[2];
  switch (params.index_q.dtype) {
    case OPENMSA_BFLOAT16:
      return prefix_lse_bfloat16(head_dim);
    case OPENMSA_FLOAT16:
      return prefix_lse_float16(head_dim);
    default:
      return prefix_lse_float8_e4m3(head_dim);
  }
}

// The data of row `row` along an axis.
const void* advance(const Tensor& tensor, int axis, int64_t row) {
  return static_cast<const char*>(tensor.data) + row * tensor.strides[axis] * dtype_size(tensor.dtype);
}

int64_t key_heads_of(const LseParams& params) { return params.index_k.shape[params.layout.paged ? 2 : 1]; }

PlanParams plan_params(const LseParams& params) {
  PlanParams plan;
  plan.layout = params.layout;
  plan.block_size = params.block_size;
  plan.key_heads = key_heads_of(params);
  plan.indices = params.indices;
  plan.stream = params.stream;
  return plan;
}

// A float for each entry of a chunk's rows.
int64_t partial_bytes(const LseParams& params) {
  const int64_t tokens = std::min(params.layout.tokens_q, plan_chunk(params.indices));
  return aligned(tokens * params.indices.shape[0] * params.indices.shape[2] * static_cast<int64_t>(sizeof(float)));
}

void launch_partials(const LseParams& params, const Plan& plan, int64_t first_token, float* partials) {
  const bool paged = params.layout.paged;
  const Tensor &q = params.index_q, &k = params.index_k;
  PartialArguments args{};
  args.index_q = advance(q, 0, first_token);
  args.q_stride_token = q.strides[0];
  args.q_stride_head = q.strides[1];
  args.index_k = k.data;
  args.k_stride_place = k.strides[0];
  args.k_stride_token = k.strides[paged ? 1 : 0];
  args.k_stride_head = k.strides[paged ? 2 : 1];
  args.rows_end = paged ? std::numeric_limits<int64_t>::max() : params.layout.tokens_k;
  args.scale = scale_of(params.scale);
  args.places = plan.places;
  args.items = plan.items;
  args.places_per_head = plan.places_per_head;
  args.no_place = plan.no_place;
  args.count = static_cast<uint32_t>(plan.count);
  args.heads = static_cast<uint32_t>(q.shape[1]);
  args.topk = static_cast<uint32_t>(params.indices.shape[2]);
  args.partials = partials;
  const LseKernel kernel = partial_kernel(params);
  LaunchShape shape;
  shape.blocks_x = std::min<int64_t>(plan.count, device_info(q.device_index).multiprocessors);
  shape.threads = kPartialThreads;
  shape.shared_bytes = kernel.shared_bytes;
  launch_kernel("partial_lse", kernel.entry, shape, params.stream, &args);
}

void launch_merge(const LseParams& params, int64_t first_token, int64_t tokens, const float* partials) {
  const Tensor& lse = params.index_lse;
  MergeArguments args{};
  args.partials = partials;
  args.tokens = static_cast<uint32_t>(tokens);
  args.heads = static_cast<uint32_t>(params.index_q.shape[1]);
  args.topk = static_cast<uint32_t>(params.indices.shape[2]);
  args.index_lse = static_cast<float*>(lse.data) + first_token * lse.strides[1];
  args.stride_head = lse.strides[0];
  args.stride_token = lse.strides[1];
  LaunchShape shape;
  shape.blocks_x = (tokens * params.index_q.shape[1] + kMergeThreads - 1) / kMergeThreads;
  shape.threads = kMergeThreads;
  launch_kernel("merge_lse", merge_lse_kernel(), shape, params.stream, &args);
}

}  // namespace

int64_t selected_lse_workspace(const LseParams& params) {
  if (params.layout.tokens_q == 0) return 0;
  const DeviceGuard guard(params.index_q.device_index);
  return partial_bytes(params) + plan_workspace(plan_params(params));
}

void launch_selected_lse(const LseParams& params) {
  const DeviceGuard guard(params.index_q.device_index);
  const int64_t chunk = plan_chunk(params.indices);
  auto* const partials = static_cast<float*>(params.workspace);
  PlanParams plan = plan_params(params);
  plan.workspace = static_cast<char*>(params.workspace) + partial_bytes(params);
  for (int64_t first = 0; first < params.layout.tokens_q; first += chunk) {
    plan.first_token = first;
    plan.tokens = std::min(chunk, params.layout.tokens_q - first);
    launch_partials(params, launch_plan(plan), first, partials);
    launch_merge(params, first, plan.tokens, partials);
  }
}

int64_t prefix_lse_workspace(const LseParams& params) {
  if (params.layout.cu_seqlens_q == nullptr) return 0;
  return params.layout.tokens_q * static_cast<int64_t>(sizeof(uint32_t));
}

void launch_prefix_lse(const LseParams& params) {
  const SequenceLayout& layout = params.layout;
  if (layout.paged) fail(OPENMSA_INTERNAL_ERROR, "backend sm90: prefix_lse has no paged form, as warm-up has none");
  if (layout.tokens_q == 0) return;
  const DeviceGuard guard(params.index_q.device_index);
  const Tensor &q = params.index_q, &k = params.index_k;
  PrefixArguments args{};
  args.layout = layout;
  if (layout.cu_seqlens_q != nullptr) {
    auto* const owners = static_cast<uint32_t*>(params.workspace);
    launch_find_owners(layout, params.block_size, 0, layout.tokens_q, owners, params.stream);
    args.owners = owners;
  }
  args.index_q = q.data;
  args.q_stride_token = q.strides[0];
  args.q_stride_head = q.strides[1];
  args.index_k = k.data;
  args.k_stride_token = k.strides[0];
  args.k_stride_head = k.strides[1];
  args.key_heads = static_cast<int32_t>(k.shape[1]);
  args.heads_per_key_head = static_cast<int32_t>(q.shape[1] / k.shape[1]);
  args.tiles = (layout.tokens_q * args.heads_per_key_head + kPrefixRows - 1) / kPrefixRows;
  args.scale = scale_of(params.scale);
  args.index_lse = static_cast<float*>(params.index_lse.data);
  args.lse_stride_head = params.index_lse.strides[0];
  args.lse_stride_token = params.index_lse.strides[1];
  const LseKernel kernel = prefix_kernel(params);
  LaunchShape shape;
  shape.blocks_x = args.tiles * args.key_heads;
  shape.threads = kPrefixThreads;
  shape.shared_bytes = kernel.shared_bytes;
  launch_kernel("prefix_lse", kernel.entry, shape, params.stream, &args);
}

}  // namespace openmsa::cuda::sm90
