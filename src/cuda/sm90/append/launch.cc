#include "cuda/sm90/append/launch.h"

#include "api/dtype.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/append/config.h"
#include "cuda/sm90/plan/launch.h"

namespace openmsa::cuda::sm90 {
namespace {

append::Stream stream_of(const Tensor& rows, const Tensor& cache, const CacheScale& scale) {
  append::Stream stream{};
  stream.rows = rows.data;
  stream.rows_stride_token = rows.strides[0];
  stream.rows_stride_head = rows.strides[1];
  stream.cache = cache.data;
  stream.cache_stride_page = cache.strides[0];
  stream.cache_stride_row = cache.strides[1];
  stream.cache_stride_head = cache.strides[2];
  stream.heads = static_cast<int32_t>(rows.shape[1]);
  stream.pieces = static_cast<int32_t>(rows.shape[2] / append::kPieceElements);
  stream.is_bfloat16 = rows.dtype == OPENMSA_BFLOAT16;
  stream.row_bytes = static_cast<int32_t>(dtype_size(rows.dtype));
  stream.cache_bytes = static_cast<int32_t>(dtype_size(cache.dtype));
  stream.factor = static_cast<float>(scale.value);
  stream.device_factor = scale.device_value;
  return stream;
}

}  // namespace

int64_t append_workspace(const AppendParams& params) {
  return params.layout.tokens_q * static_cast<int64_t>(sizeof(uint32_t));
}

void launch_append(const AppendParams& params, void* workspace) {
  if (params.layout.tokens_q == 0 || params.layout.batch == 0) return;
  append::Arguments args{};
  args.layout = params.layout;
  args.block_size = params.k_cache.shape[1];
  auto* const owners = static_cast<uint32_t*>(workspace);
  launch_find_owners(params.layout, args.block_size, 0, params.layout.tokens_q, owners, params.execution.stream);
  args.owners = owners;
  args.streams[0] = stream_of(params.k, params.k_cache, params.k_scale);
  args.streams[1] = stream_of(params.v, params.v_cache, params.v_scale);
  args.streams[2] = stream_of(params.index_k, params.index_k_cache, {});
  LaunchShape shape;
  constexpr int64_t kQueries = append::kThreads / 32;
  shape.blocks_x = (params.layout.tokens_q + kQueries - 1) / kQueries;
  shape.threads = append::kThreads;
  launch_kernel("append", append::append_kernel_entry(), shape, params.execution.stream, &args);
}

}  // namespace openmsa::cuda::sm90
