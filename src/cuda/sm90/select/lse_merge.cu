// The merge of a row's slots: log sum 2^partial, natural.
#include "cuda/common/instructions/exp2.cuh"
#include "cuda/sm90/select/lse_kernels.h"
#include "cuda/sm90/select/lse_rows.cuh"

namespace openmsa::cuda::sm90::lse {
namespace {

__global__ void __launch_bounds__(kMergeThreads) merge_lse(const __grid_constant__ MergeArguments args) {
  const uint32_t rows = args.tokens * args.heads;
  for (uint32_t i = blockIdx.x * kMergeThreads + threadIdx.x; i < rows; i += gridDim.x * kMergeThreads) {
    const uint32_t token = i % args.tokens, head = i / args.tokens;
    const float* const partials = args.partials + (token * args.heads + head) * args.topk;
    float max = -INFINITY;
    for (uint32_t slot = 0; slot < args.topk; ++slot) max = fmaxf(max, partials[slot]);
    const float offset = offset_of(max, 1.0f);
    float sum = 0.0f;
    for (uint32_t slot = 0; slot < args.topk; ++slot) sum += exp2_approximate(partials[slot] - offset);
    args.index_lse[head * args.stride_head + token * args.stride_token] = natural_log(offset, sum);
  }
}

}  // namespace

const void* merge_lse_kernel() { return reinterpret_cast<const void*>(&merge_lse); }

}  // namespace openmsa::cuda::sm90::lse
