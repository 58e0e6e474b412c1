#include "cuda/sm90/select/launch.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/select/config.h"

namespace openmsa::cuda::sm90 {
namespace {

SelectKernel kernel_for(const SelectParams& params) {
  const int64_t head_dim = params.index_q.shape[2];
  switch (params.index_q.dtype) {
    case OPENMSA_BFLOAT16:
      return select_kernel_bfloat16(head_dim, params.block_size, params.layout.paged);
    case OPENMSA_FLOAT16:
      return select_kernel_float16(head_dim, params.block_size, params.layout.paged);
    default:
      return select_kernel_float8_e4m3(head_dim, params.block_size, params.layout.paged);
  }
}

int32_t saturate(int64_t count) {
  return static_cast<int32_t>(std::min<int64_t>(count, std::numeric_limits<int32_t>::max()));
}

// Rows of a tile share the keys that they read, but a tile works through its sequences one after the other: as many
// rows as a sequence has on average.
int32_t rows_per_tile(const SequenceLayout& layout) {
  const int64_t average = layout.tokens_q / std::max<int64_t>(layout.batch, 1);
  return static_cast<int32_t>(std::bit_floor(static_cast<uint64_t>(std::clamp<int64_t>(average, 1, kTileRows))));
}

SelectArguments arguments_of(const SelectParams& params) {
  const SequenceLayout& layout = params.layout;
  const Tensor& k = params.index_k;
  const int axis = layout.paged ? 1 : 0;  // of k's tokens
  SelectArguments args{};
  args.index_q = params.index_q.data;
  args.q_stride_token = params.index_q.strides[0];
  args.q_stride_head = params.index_q.strides[1];
  args.index_k = k.data;
  args.k_stride_page = layout.paged ? k.strides[0] : 0;
  args.k_stride_token = k.strides[axis];
  args.k_stride_head = k.strides[axis + 1];
  args.index_heads_per_key_head = static_cast<int32_t>(params.index_q.shape[1] / k.shape[axis + 1]);
  args.batch = layout.batch;
  args.tokens_q = layout.tokens_q;
  args.tokens_k = layout.tokens_k;
  args.cu_seqlens_q = layout.cu_seqlens_q;
  args.cu_seqlens_k = layout.cu_seqlens_k;
  args.k_starts = layout.k_starts;
  args.block_table = layout.block_table;
  args.block_table_stride = layout.block_table_stride;
  args.max_pages = layout.max_pages;
  args.pages = layout.pages;
  args.seq_lens = layout.seq_lens;
  args.topk = static_cast<int32_t>(params.topk);
  args.init_blocks = saturate(params.init_blocks);
  args.local_blocks = saturate(params.local_blocks);
  args.scale = params.scale;
  args.tile_rows = rows_per_tile(layout);
  args.indices = params.indices.data;
  args.indices_stride_head = params.indices.strides[0];
  args.indices_stride_token = params.indices.strides[1];
  args.indices_stride_slot = params.indices.strides[2];
  args.indices_are_int64 = params.indices.dtype == OPENMSA_INT64;
  if (params.index_lse != nullptr) {
    args.index_lse = static_cast<float*>(params.index_lse->data);
    args.lse_stride_head = params.index_lse->strides[0];
    args.lse_stride_token = params.index_lse->strides[1];
  }
  return args;
}

}  // namespace

void launch_select(const SelectParams& params) {
  if (params.layout.tokens_q == 0) return;
  const DeviceGuard guard(params.index_q.device_index);
  const SelectKernel kernel = kernel_for(params);
  SelectArguments args = arguments_of(params);
  LaunchShape shape;
  shape.blocks_x = (args.tokens_q + args.tile_rows - 1) / args.tile_rows;
  shape.blocks_y = static_cast<int>(params.index_q.shape[1]);
  shape.threads = kSelectThreads;
  shape.shared_bytes = kernel.shared_bytes(params.topk, args.index_lse != nullptr);
  launch_kernel("select", kernel.entry, shape, params.execution.stream, &args);
}

}  // namespace openmsa::cuda::sm90
