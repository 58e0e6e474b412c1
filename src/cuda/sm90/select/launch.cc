#include "cuda/sm90/select/launch.h"

#include <algorithm>
#include <array>
#include <limits>

#include "api/dtype.h"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/common/stream_memory.h"
#include "cuda/common/tensor_map.h"
#include "cuda/sm90/select/config.h"
#include "cuda/sm90/select/merge.h"
#include "cuda/sm90/select/schedule.h"

namespace openmsa::cuda::sm90 {
namespace {

// What follows from shapes alone.
struct Plan {
  bool wide;
  int32_t tile_rows, tile_tokens, heads, key_heads;
  int64_t most_units;
  // The workspace: header, units, split tiles, partial lists, each aligned to 256 bytes.
  int64_t units_at, splits_at, partials_at, bytes;
};

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

Plan plan_of(const SelectParams& params) {
  const SequenceLayout& layout = params.layout;
  const Tensor& k = params.index_k;
  Plan plan{};
  plan.key_heads = static_cast<int32_t>(k.shape[layout.paged ? 2 : 1]);
  plan.heads = static_cast<int32_t>(params.index_q.shape[1]) / plan.key_heads;
  // Sequences of few rows would leave a wide tile empty.
  const int64_t rows_per_sequence = layout.tokens_q / std::max<int64_t>(layout.batch, 1) * plan.heads;
  plan.wide = params.topk <= kWideTile.most_topk && rows_per_sequence > kGroupRows;
  plan.tile_rows = (plan.wide ? kWideTile : kNarrowTile).groups * kGroupRows;
  plan.tile_tokens = plan.tile_rows / plan.heads;
  // A sequence, and the rows before and after all of them, may each end inside a tile.
  const int64_t tiles = layout.tokens_q / plan.tile_tokens + layout.batch + 2;
  plan.most_units = tiles * plan.key_heads + kMostPieces;
  plan.units_at = aligned(sizeof(ScheduleHeader));
  plan.splits_at = plan.units_at + aligned(plan.most_units * static_cast<int64_t>(sizeof(WorkUnit)));
  plan.partials_at = plan.splits_at + aligned(kMostPieces * static_cast<int64_t>(sizeof(WorkUnit)));
  plan.bytes =
      plan.partials_at + kMostPieces * plan.tile_rows * params.topk * static_cast<int64_t>(sizeof(PartialEntry));
  return plan;
}

SelectKernel kernel_for(const SelectParams& params, bool wide) {
  const int64_t head_dim = params.index_q.shape[2];
  switch (params.index_q.dtype) {
    case OPENMSA_BFLOAT16:
      return select_kernel_bfloat16(head_dim, params.block_size, wide);
    case OPENMSA_FLOAT16:
      return select_kernel_float16(head_dim, params.block_size, wide);
    default:
      return select_kernel_float8_e4m3(head_dim, params.block_size, wide);
  }
}

// Describes an axis to the copy engine, which knows positive strides only; an axis that runs backwards moves `base` to
// its last element.
MapAxis map_axis(const Tensor& tensor, int axis, int32_t box, const unsigned char** base, TensorMapAxis* described) {
  const int64_t length = tensor.shape[axis];
  *described = tensor_map_axis(tensor, axis, box);
  const bool backwards = described->stride < 0;
  if (backwards) {
    *base += described->stride * (length - 1);
    described->stride = -described->stride;
  }
  return {static_cast<int32_t>(length), backwards};
}

void map_queries(const SelectParams& params, const Plan& plan, SelectArguments* args) {
  const Tensor& q = params.index_q;
  const int32_t element = static_cast<int32_t>(dtype_size(q.dtype));
  const int64_t dim = q.shape[2];
  const auto* base = static_cast<const unsigned char*>(q.data);
  std::array<TensorMapAxis, 3> axes{};
  axes[0] = {dim, 0, static_cast<int32_t>(std::min<int64_t>(dim, 128 / element))};
  args->q_heads = map_axis(q, 1, plan.heads, &base, &axes[1]);
  args->q_tokens = map_axis(q, 0, plan.tile_tokens, &base, &axes[2]);
  args->queries = make_tensor_map("index_q", base, element, axes);
}

void map_keys(const SelectParams& params, SelectArguments* args) {
  const Tensor& k = params.index_k;
  const int32_t element = static_cast<int32_t>(dtype_size(k.dtype));
  const int64_t dim = k.shape[k.rank - 1];
  const auto* base = static_cast<const unsigned char*>(k.data);
  std::array<TensorMapAxis, 4> axes{};
  axes[0] = {dim, 0, static_cast<int32_t>(std::min<int64_t>(dim, 128 / element))};
  const auto box = static_cast<int32_t>(params.block_size);
  if (params.layout.paged) {
    args->k_heads = map_axis(k, 2, 1, &base, &axes[1]);
    args->k_rows = map_axis(k, 1, box, &base, &axes[2]);
    args->k_pages = map_axis(k, 0, 1, &base, &axes[3]);
    // Without pages or keys nothing is copied; a map still needs an address.
    args->keys = make_tensor_map("index_k_cache", k.shape[0] > 0 ? base : params.index_q.data, element, axes);
  } else {
    args->k_heads = map_axis(k, 1, 1, &base, &axes[1]);
    args->k_rows = map_axis(k, 0, box, &base, &axes[2]);
    args->keys =
        make_tensor_map("index_k", k.shape[0] > 0 ? base : params.index_q.data, element, std::span(axes).first(3));
  }
}

constexpr int kMergeBlocksPerMultiprocessor = 5;  // as many as their registers allow at a time

int32_t saturate(int64_t count) {
  return static_cast<int32_t>(std::min<int64_t>(count, std::numeric_limits<int32_t>::max()));
}

SelectLayout layout_of(const SelectParams& params) {
  const SequenceLayout& from = params.layout;
  SelectLayout layout{};
  layout.batch = static_cast<int32_t>(from.batch);
  layout.tokens_q = static_cast<int32_t>(from.tokens_q);
  layout.tokens_k = from.paged ? 0 : static_cast<int32_t>(from.tokens_k);
  layout.cu_seqlens_q = from.cu_seqlens_q;
  layout.cu_seqlens_k = from.cu_seqlens_k;
  layout.k_starts = from.k_starts;
  if (from.paged) {
    layout.block_table = from.block_table;
    layout.block_table_stride = from.block_table_stride;
    layout.max_pages = from.max_pages;
    layout.pages = saturate(from.pages);
    layout.seq_lens = from.seq_lens;
  }
  layout.block_size = static_cast<int32_t>(params.block_size);
  return layout;
}

}  // namespace

int64_t select_workspace(const SelectParams& params) { return params.layout.tokens_q == 0 ? 0 : plan_of(params).bytes; }

void launch_select(const SelectParams& params, void* workspace) {
  if (params.layout.tokens_q == 0) return;
  const Plan plan = plan_of(params);
  auto* const memory = static_cast<unsigned char*>(workspace);
  void* const stream = params.execution.stream;

  SelectArguments args{};
  args.layout = layout_of(params);
  args.topk = static_cast<int32_t>(params.topk);
  args.init_blocks = saturate(params.init_blocks);
  args.local_blocks = saturate(params.local_blocks);
  args.heads = plan.heads;
  args.tile_tokens = plan.tile_tokens;
  map_queries(params, plan, &args);
  map_keys(params, &args);
  args.header = reinterpret_cast<ScheduleHeader*>(memory);
  auto* const units = reinterpret_cast<WorkUnit*>(memory + plan.units_at);
  auto* const splits = reinterpret_cast<WorkUnit*>(memory + plan.splits_at);
  args.units = units;
  args.splits = splits;
  args.partials = reinterpret_cast<PartialEntry*>(memory + plan.partials_at);
  args.indices = params.indices.data;
  args.indices_stride_head = params.indices.strides[0];
  args.indices_stride_token = params.indices.strides[1];
  args.indices_stride_slot = params.indices.strides[2];
  args.indices_are_int64 = params.indices.dtype == OPENMSA_INT64;

  const int multiprocessors = device_info(params.index_q.device_index).multiprocessors;
  const auto thread_blocks = static_cast<int32_t>(std::min<int64_t>(multiprocessors, plan.most_units));
  ScheduleArguments schedule{};
  schedule.layout = args.layout;
  schedule.init_blocks = args.init_blocks;
  schedule.local_blocks = args.local_blocks;
  schedule.topk = args.topk;
  schedule.key_heads = plan.key_heads;
  schedule.tile_tokens = plan.tile_tokens;
  schedule.thread_blocks = thread_blocks;
  schedule.header = args.header;
  schedule.units = units;
  schedule.splits = splits;
  LaunchShape shape;
  shape.threads = schedule_threads();
  launch_kernel("select's schedule", schedule_kernel_entry(), shape, stream, &schedule);

  const SelectKernel kernel = kernel_for(params, plan.wide);
  shape.blocks_x = thread_blocks;
  shape.threads = kernel.threads;
  shape.shared_bytes = kernel.shared_bytes;
  launch_kernel("select", kernel.entry, shape, stream, &args);

  MergeArguments merge{args, plan.tile_rows};
  shape.blocks_x = static_cast<int64_t>(multiprocessors) * kMergeBlocksPerMultiprocessor;
  shape.threads = merge_threads();
  shape.shared_bytes = 0;
  launch_kernel("select's merge", merge_kernel_entry(params.topk), shape, stream, &merge);
}

}  // namespace openmsa::cuda::sm90
