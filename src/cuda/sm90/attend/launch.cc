#include "cuda/sm90/attend/launch.h"

#include <algorithm>
#include <array>
#include <numbers>

#include "api/dtype.h"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/common/tensor_map.h"
#include "cuda/sm90/attend/config.h"
#include "cuda/sm90/plan/tile_launch.h"

namespace openmsa::cuda::sm90 {
namespace {

using namespace attend;

int32_t group_of(const AttendParams& params) { return static_cast<int32_t>(params.q.shape[1] / params.index_heads); }

TilePlanParams plan_params(const AttendParams& params) {
  TilePlanParams plan;
  plan.layout = params.layout;
  plan.block_size = params.block_size;
  plan.indices = *params.indices;
  plan.tile_tokens = kTileRows / group_of(params);
  plan.stream = params.execution.stream;
  return plan;
}

AttendKernel kernel_for(const AttendParams& params) {
  const int64_t head_dim = params.q.shape[2];
  return params.q.dtype == OPENMSA_BFLOAT16 ? attend_bfloat16(head_dim, params.block_size)
                                            : attend_float16(head_dim, params.block_size);
}

CUtensorMap map_queries(const AttendParams& params, int32_t tile_tokens) {
  const Tensor& q = params.q;
  const std::array<TensorMapAxis, 3> axes = {{{q.shape[2], 0, kPanelColumns},
                                              tensor_map_axis(q, 1, group_of(params)),
                                              tensor_map_axis(q, 0, tile_tokens)}};
  return make_tensor_map("q", q.data, static_cast<int>(dtype_size(q.dtype)), axes);
}

// A block of keys or values of one KV head. Without keys or pages nothing is copied; a map still needs an address.
CUtensorMap map_blocks(const AttendParams& params, const Tensor& tensor, const char* name) {
  const bool paged = params.layout.paged;
  const auto rows = static_cast<int32_t>(params.block_size);
  const std::array<TensorMapAxis, 4> axes = {{{tensor.shape[tensor.rank - 1], 0, kPanelColumns},
                                              tensor_map_axis(tensor, paged ? 2 : 1, 1),
                                              tensor_map_axis(tensor, paged ? 1 : 0, rows),
                                              tensor_map_axis(tensor, 0, 1)}};
  return make_tensor_map(name, tensor.shape[0] > 0 ? tensor.data : params.q.data,
                         static_cast<int>(dtype_size(tensor.dtype)), std::span(axes).first(paged ? 4 : 3));
}

}  // namespace

int64_t attend_workspace(const AttendParams& params) {
  return params.layout.tokens_q == 0 ? 0 : tile_plan_workspace(plan_params(params));
}

void launch_attend(const AttendParams& params, void* workspace) {
  const int64_t tokens_q = params.layout.tokens_q;
  TilePlanParams plan = plan_params(params);
  plan.workspace = workspace;
  const int64_t chunk = tile_plan_chunk(plan);
  const int64_t multiprocessors = device_info(params.q.device_index).multiprocessors;
  const AttendKernel kernel = kernel_for(params);
  const bool paged = params.layout.paged;

  Arguments args{};
  args.queries = map_queries(params, plan.tile_tokens);
  args.keys = map_blocks(params, params.k, paged ? "k_cache" : "k");
  args.values = map_blocks(params, params.v, paged ? "v_cache" : "v");
  args.paged = paged;
  args.heads = static_cast<int32_t>(params.index_heads);
  args.kv_heads = static_cast<int32_t>(params.k.shape[paged ? 2 : 1]);
  args.group = group_of(params);
  args.tile_tokens = plan.tile_tokens;
  args.more_words = more_member_words(plan.tile_tokens);
  args.factor = static_cast<float>(params.scale * std::numbers::log2e);
  args.out_stride_token = params.out.strides[0];
  args.out_stride_head = params.out.strides[1];
  for (int64_t first = 0; first < tokens_q; first += chunk) {
    plan.first_token = first;
    plan.tokens = std::min(chunk, tokens_q - first);
    const int64_t tiles = (plan.tokens + plan.tile_tokens - 1) / plan.tile_tokens;
    const int64_t thread_blocks = std::min(multiprocessors, tiles * params.index_heads);
    plan.first_next = static_cast<int32_t>(thread_blocks);
    const TilePlan planned = launch_tile_plan(plan);
    args.tokens = static_cast<int32_t>(plan.tokens);
    args.first_token = static_cast<int32_t>(first);
    args.tiles = static_cast<int32_t>(planned.tiles);
    args.capacity = static_cast<int32_t>(planned.capacity);
    args.blocks = planned.blocks;
    args.more_members = planned.more_members;
    args.counts = planned.counts;
    args.reaches = planned.reaches;
    args.next_tile = planned.next_tile;
    args.out = static_cast<char*>(params.out.data) + first * params.out.strides[0] * dtype_size(params.out.dtype);
    if (params.lse != nullptr) {
      args.lse = static_cast<float*>(params.lse->data) + first * params.lse->strides[1];
      args.lse_stride_head = params.lse->strides[0];
      args.lse_stride_token = params.lse->strides[1];
    }
    LaunchShape shape;
    shape.blocks_x = thread_blocks;
    shape.threads = kThreads;
    shape.shared_bytes = kernel.shared_bytes;
    launch_kernel("attend", kernel.entry, shape, params.execution.stream, &args);
  }
}

}  // namespace openmsa::cuda::sm90
