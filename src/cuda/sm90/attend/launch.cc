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

// How a call is worked off: chunks of queries of one index head, or of all of them.
struct Division {
  bool has_rest;
  int64_t heads;  // index heads of a chunk
  TilePlanParams plan;
  int64_t tokens;  // queries of a chunk, the last one has fewer
  // The workspace: the plan's, and with a rest, partials, their log-sum-exps and those of the tiles.
  int64_t plan_bytes, partial_bytes, partial_lse_bytes, tile_lse_bytes;

  int64_t bytes() const { return plan_bytes + partial_bytes + partial_lse_bytes + tile_lse_bytes; }
};

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

Division divide(const AttendParams& params) {
  const AttendTuning& tuning = attend_tuning();
  const int64_t tokens_q = params.layout.tokens_q, group = group_of(params), topk = params.indices->shape[2];
  Division division{};
  division.has_rest = tuning.least_members > 1 && group >= kLeastRestGroup && tokens_q >= tuning.least_tokens;
  division.heads = division.has_rest ? 1 : params.index_heads;
  TilePlanParams& plan = division.plan;
  plan.layout = params.layout;
  plan.block_size = params.block_size;
  plan.indices = *params.indices;
  plan.heads = static_cast<int32_t>(division.heads);
  plan.tile_tokens = static_cast<int32_t>(kTileRows / group);
  plan.stream = params.execution.stream;
  const int64_t partial = topk * group * params.q.shape[2] * dtype_size(params.q.dtype);  // of a query
  if (division.has_rest) {
    plan.least_members = tuning.least_members;
    plan.most_alone = static_cast<int32_t>(tuning.least_spread * topk);
    const int64_t partial_bytes = std::min(tuning.partial_bytes, workspace_limit() / 8 * 7);
    constexpr int64_t kStep = kMostTileTokens;  // whole tiles of any group
    plan.most_tokens = std::clamp<int64_t>(partial_bytes / partial / kStep * kStep, kStep, kPlanTokens);
  }
  division.tokens = std::min(tile_plan_chunk(plan), tokens_q);
  division.plan_bytes = tile_plan_workspace(plan);
  if (division.has_rest) {
    constexpr int64_t kFloat = sizeof(float);
    division.partial_bytes = aligned(division.tokens * partial);
    division.partial_lse_bytes = aligned(division.tokens * topk * group * kFloat);
    division.tile_lse_bytes = aligned(division.tokens * group * kFloat);
  }
  return division;
}

AttendKernel kernel_for(const AttendParams& params) {
  const int64_t head_dim = params.q.shape[2];
  return params.q.dtype == OPENMSA_BFLOAT16 ? attend_bfloat16(head_dim, params.block_size)
                                            : attend_float16(head_dim, params.block_size);
}

// The query heads of an index head, of so many tokens.
CUtensorMap map_queries(const AttendParams& params, int32_t tokens) {
  const Tensor& q = params.q;
  const std::array<TensorMapAxis, 3> axes = {
      {{q.shape[2], 0, kPanelColumns}, tensor_map_axis(q, 1, group_of(params)), tensor_map_axis(q, 0, tokens)}};
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

const char* advance(const Tensor& tensor, int axis, int64_t by) {
  return static_cast<const char*>(tensor.data) + by * tensor.strides[axis] * dtype_size(tensor.dtype);
}

class AttendCall {
 public:
  AttendCall(const AttendParams& params, void* workspace)
      : params_(params),
        division_(divide(params)),
        kernel_(kernel_for(params)),
        multiprocessors_(device_info(params.q.device_index).multiprocessors),
        is_bfloat16_(params.q.dtype == OPENMSA_BFLOAT16) {
    auto* const memory = static_cast<unsigned char*>(workspace);
    division_.plan.workspace = memory;
    partials_ = memory + division_.plan_bytes;
    partial_lses_ = reinterpret_cast<float*>(memory + division_.plan_bytes + division_.partial_bytes);
    tile_lse_ =
        reinterpret_cast<float*>(memory + division_.plan_bytes + division_.partial_bytes + division_.partial_lse_bytes);
    const bool paged = params.layout.paged;
    args_.queries = map_queries(params, division_.plan.tile_tokens);
    args_.keys = map_blocks(params, params.k, paged ? "k_cache" : "k");
    args_.values = map_blocks(params, params.v, paged ? "v_cache" : "v");
    args_.paged = paged;
    args_.heads = static_cast<int32_t>(division_.heads);
    args_.index_heads = static_cast<int32_t>(params.index_heads);
    args_.kv_heads = static_cast<int32_t>(params.k.shape[paged ? 2 : 1]);
    args_.group = group_of(params);
    args_.tile_tokens = division_.plan.tile_tokens;
    args_.more_words = more_member_words(division_.plan.tile_tokens);
    args_.factor = static_cast<float>(params.scale * std::numbers::log2e);
    args_.out_stride_token = params.out.strides[0];
    args_.out_stride_head = params.out.strides[1];
    if (division_.has_rest) rest_queries_ = map_queries(params, 1);
  }

  void launch() {
    const int64_t tokens_q = params_.layout.tokens_q;
    for (int64_t head = 0; head < params_.index_heads; head += division_.heads) {
      for (int64_t first = 0; first < tokens_q; first += division_.tokens) {
        launch_chunk(head, first, std::min(division_.tokens, tokens_q - first));
      }
    }
  }

 private:
  void launch_chunk(int64_t head, int64_t first, int64_t tokens) {
    TilePlanParams& plan = division_.plan;
    plan.first_head = static_cast<int32_t>(head);
    plan.first_token = first;
    plan.tokens = tokens;
    const int64_t tiles = (tokens + plan.tile_tokens - 1) / plan.tile_tokens;
    const int64_t thread_blocks = std::min(multiprocessors_, tiles * division_.heads);
    plan.first_next = static_cast<int32_t>(thread_blocks);
    const TilePlan planned = launch_tile_plan(plan);
    if (division_.has_rest) launch_rest(planned, head, first);

    args_.first_head = static_cast<int32_t>(head);
    args_.tokens = static_cast<int32_t>(tokens);
    args_.first_token = static_cast<int32_t>(first);
    args_.tiles = static_cast<int32_t>(planned.tiles);
    args_.capacity = static_cast<int32_t>(planned.capacity);
    args_.blocks = planned.blocks;
    args_.more_members = planned.more_members;
    args_.counts = planned.counts;
    args_.all_counts = planned.all_counts;
    args_.reaches = planned.reaches;
    args_.suspects = planned.suspects;
    args_.header = planned.header;
    args_.out = const_cast<char*>(advance(params_.out, 0, first));
    if (division_.has_rest) {
      // The kernel counts heads from the call's first.
      args_.lse = tile_lse_ - head * args_.group * tokens;
      args_.lse_stride_head = tokens;
      args_.lse_stride_token = 1;
    } else if (params_.lse != nullptr) {
      args_.lse = lse_of(first);
      args_.lse_stride_head = params_.lse->strides[0];
      args_.lse_stride_token = params_.lse->strides[1];
    }
    LaunchShape shape;
    shape.blocks_x = thread_blocks;
    shape.threads = kThreads;
    shape.shared_bytes = kernel_.shared_bytes;
    launch_kernel("attend", kernel_.entry, shape, params_.execution.stream, &args_);
    if (division_.has_rest) launch_join(planned, head, first, tokens);
    launch_repair(first, thread_blocks);
  }

  float* lse_of(int64_t token) const {
    return static_cast<float*>(params_.lse->data) + token * params_.lse->strides[1];
  }

  void launch_rest(const TilePlan& planned, int64_t head, int64_t first) const {
    RestArguments args{};
    args.queries = rest_queries_;
    args.keys = args_.keys;
    args.values = args_.values;
    args.paged = args_.paged;
    args.first_head = static_cast<int32_t>(head);
    args.heads = args_.heads;
    args.index_heads = args_.index_heads;
    args.kv_heads = args_.kv_heads;
    args.group = args_.group;
    args.topk = static_cast<int32_t>(params_.indices->shape[2]);
    args.first_token = static_cast<int32_t>(first);
    args.places = planned.places;
    args.items = planned.items;
    args.count = static_cast<uint32_t>(planned.count);
    args.no_place = planned.no_place;
    args.factor = args_.factor;
    args.partials = partials_;
    args.partial_lses = partial_lses_;
    const AttendKernel kernel = is_bfloat16_ ? rest_bfloat16(params_.q.shape[2], params_.block_size)
                                             : rest_float16(params_.q.shape[2], params_.block_size);
    LaunchShape shape;
    shape.blocks_x = multiprocessors_;
    shape.threads = kThreads;
    shape.shared_bytes = kernel.shared_bytes;
    launch_kernel("attend's rest", kernel.entry, shape, params_.execution.stream, &args);
  }

  void launch_join(const TilePlan& planned, int64_t head, int64_t first, int64_t tokens) const {
    const int64_t first_head = head * args_.group;
    JoinArguments args{};
    args.heads = args_.heads;
    args.group = args_.group;
    args.head_dim = static_cast<int32_t>(params_.q.shape[2]);
    args.topk = static_cast<int32_t>(params_.indices->shape[2]);
    args.tokens = tokens;
    args.rest_slots = planned.rest_slots;
    args.partials = partials_;
    args.partial_lses = partial_lses_;
    args.out = static_cast<char*>(args_.out) + first_head * params_.out.strides[1] * dtype_size(params_.out.dtype);
    args.out_stride_token = args_.out_stride_token;
    args.out_stride_head = args_.out_stride_head;
    args.tile_lse = tile_lse_;
    args.tile_lse_stride_head = tokens;
    args.tile_lse_stride_token = 1;
    if (params_.lse != nullptr) {
      args.lse = lse_of(first) + first_head * params_.lse->strides[0];
      args.lse_stride_head = params_.lse->strides[0];
      args.lse_stride_token = params_.lse->strides[1];
    }
    LaunchShape shape;
    shape.blocks_x = (tokens * args_.heads + kJoinTokens - 1) / kJoinTokens;
    shape.threads = kJoinThreads;
    launch_kernel("attend's join", is_bfloat16_ ? join_bfloat16() : join_float16(), shape, params_.execution.stream,
                  &args);
  }

  void launch_repair(int64_t first_token, int64_t thread_blocks) const {
    const Tensor &q = params_.q, &k = params_.k, &v = params_.v;
    const int row_axis = args_.paged ? 1 : 0;
    RepairArguments args{};
    args.attend = args_;
    args.head_dim = static_cast<int32_t>(q.shape[2]);
    args.block_size = static_cast<int32_t>(params_.block_size);
    args.q = advance(q, 0, first_token);
    args.q_stride_token = q.strides[0];
    args.q_stride_head = q.strides[1];
    args.k = k.data;
    args.k_stride_page = k.strides[0];
    args.k_stride_token = k.strides[row_axis];
    args.k_stride_head = k.strides[row_axis + 1];
    args.v = v.data;
    args.v_stride_page = v.strides[0];
    args.v_stride_token = v.strides[row_axis];
    args.v_stride_head = v.strides[row_axis + 1];
    LaunchShape shape;
    shape.blocks_x = thread_blocks;
    shape.threads = kRepairThreads;
    launch_kernel("attend's repair", is_bfloat16_ ? repair_bfloat16() : repair_float16(), shape,
                  params_.execution.stream, &args);
  }

  const AttendParams& params_;
  Division division_;
  const AttendKernel kernel_;
  const int64_t multiprocessors_;
  const bool is_bfloat16_;
  Arguments args_{};
  CUtensorMap rest_queries_{};
  void* partials_ = nullptr;
  float* partial_lses_ = nullptr;
  float* tile_lse_ = nullptr;
};

}  // namespace

AttendTuning& attend_tuning() {
  static AttendTuning tuning;
  return tuning;
}

int64_t attend_workspace(const AttendParams& params) {
  return params.layout.tokens_q == 0 ? 0 : divide(params).bytes();
}

void launch_attend(const AttendParams& params, void* workspace) { AttendCall(params, workspace).launch(); }

}  // namespace openmsa::cuda::sm90
