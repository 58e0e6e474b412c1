// Merges attentions of the same queries over disjoint sets of keys.
#include <algorithm>

#include "cpu/combine/kernels.h"
#include "cpu/common/aligned.h"
#include "cpu/common/tensor_rows.h"
#include "cpu/stages.h"
#include "host/elements.h"
#include "host/parallel.h"

namespace openmsa::cpu {

void combine(const CombineParams& params) {
  const int64_t splits = params.outs.shape[0], tokens = params.outs.shape[1], heads = params.outs.shape[2];
  if (heads == 0) return;
  Tensor first_split = params.outs;  // [Tq, Hq, Dv]
  first_split.rank = 3;
  std::copy_n(params.outs.shape + 1, 3, first_split.shape);
  std::copy_n(params.outs.strides + 1, 3, first_split.strides);

  // Tokens of an item: enough bytes that handing it out costs nothing beside them.
  constexpr int64_t kItemBytes = int64_t{1} << 18;
  const int64_t token_bytes = splits * heads * params.outs.shape[3] * dtype_size(params.outs.dtype);
  const int64_t length = std::clamp<int64_t>(kItemBytes / std::max<int64_t>(token_bytes, 1), 1, 4096);
  host::parallel_for<AlignedFloats>((tokens + length - 1) / length, [&](int64_t item, AlignedFloats& scratch) {
    const int64_t end = std::min(tokens, (item + 1) * length);
    for (int64_t query = item * length; query < end; ++query) {
      const float* lses = static_cast<const float*>(params.lses.data) + query * params.lses.strides[2];
      combine_token({.splits = splits,
                     .heads = heads,
                     .outs = head_rows(first_split, query, 0),
                     .split_stride = params.outs.strides[0],
                     .lses = lses,
                     .lse_split_stride = params.lses.strides[0],
                     .lse_head_stride = params.lses.strides[1],
                     .out = output_head_rows(params.out, query, 0),
                     .lse = &host::element(params.lse, 0, query),
                     .out_lse_stride = params.lse.strides[0],
                     .weights = scratch.require(combine_weights(splits, heads))});
    }
  });
}

}  // namespace openmsa::cpu
