#include "cuda/sm90/combine/launch.h"

#include "cuda/common/launch.h"
#include "cuda/sm90/combine/config.h"

namespace openmsa::cuda::sm90 {

void launch_combine(const CombineParams& params) {
  const Tensor &outs = params.outs, &lses = params.lses;
  combine::Arguments args{};
  args.splits = static_cast<int32_t>(outs.shape[0]);
  args.heads = static_cast<int32_t>(outs.shape[2]);
  args.pieces = static_cast<int32_t>(outs.shape[3] / combine::kVectorElements);
  args.tokens = outs.shape[1];
  args.outs = outs.data;
  args.outs_stride_split = outs.strides[0];
  args.outs_stride_token = outs.strides[1];
  args.outs_stride_head = outs.strides[2];
  args.lses = static_cast<const float*>(lses.data);
  args.lses_stride_split = lses.strides[0];
  args.lses_stride_head = lses.strides[1];
  args.lses_stride_token = lses.strides[2];
  args.out = params.out.data;
  args.out_stride_token = params.out.strides[0];
  args.out_stride_head = params.out.strides[1];
  args.lse = static_cast<float*>(params.lse.data);
  args.lse_stride_head = params.lse.strides[0];
  args.lse_stride_token = params.lse.strides[1];
  LaunchShape shape;
  shape.blocks_x = (args.tokens * args.heads * args.pieces + combine::kThreads - 1) / combine::kThreads;
  if (shape.blocks_x == 0) return;
  shape.threads = combine::kThreads;
  launch_kernel("combine", outs.dtype == OPENMSA_BFLOAT16 ? combine::combine_bfloat16() : combine::combine_float16(),
                shape, params.execution.stream, &args);
}

}  // namespace openmsa::cuda::sm90
