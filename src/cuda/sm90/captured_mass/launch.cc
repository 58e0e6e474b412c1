#include "cuda/sm90/captured_mass/launch.h"

#include <algorithm>
#include <numbers>

#include "api/dtype.h"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/captured_mass/config.h"
#include "cuda/sm90/plan/launch.h"
#include "cuda/sm90/select/lse.h"

namespace openmsa::cuda::sm90 {
namespace {

using namespace captured_mass;

// Masses of one index head at a time: nothing of the size of queries x blocks.
constexpr int64_t kMostMassBytes = int64_t{64} << 20;
// Thread blocks that a launch aims at, so that few tiles of long sequences still fill the device.
constexpr int64_t kThreadBlocksPerMultiprocessor = 8;

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

LseParams lse_params(const CapturedMassParams& params) {
  LseParams lse;
  lse.layout = params.layout;
  lse.index_q = params.q;
  lse.index_k = params.k;
  lse.block_size = params.block_size;
  lse.scale = params.scale;
  lse.stream = params.execution.stream;
  return lse;
}

struct Shape {
  int64_t most_blocks, chunk;
  int64_t owners_bytes, lse_bytes, mass_bytes;

  int64_t bytes() const { return owners_bytes + lse_bytes + mass_bytes; }
};

Shape shape_of(const CapturedMassParams& params) {
  constexpr int64_t kFloat = sizeof(float);
  Shape shape{};
  const int64_t tokens = params.layout.tokens_q;
  shape.most_blocks = std::max<int64_t>((params.layout.tokens_k + params.block_size - 1) / params.block_size, 1);
  // Whole tiles of any group.
  shape.chunk = std::max<int64_t>(kMostMassBytes / (shape.most_blocks * kFloat * kRows), 1) * kRows;
  shape.owners_bytes = aligned(prefix_lse_workspace(lse_params(params)));
  shape.lse_bytes = aligned(params.q.shape[1] * tokens * kFloat);
  shape.mass_bytes = aligned(std::min(shape.chunk, tokens) * shape.most_blocks * kFloat);
  return shape;
}

MassKernel kernel_for(const CapturedMassParams& params) {
  const int64_t head_dim = params.q.shape[2];
  return params.q.dtype == OPENMSA_BFLOAT16 ? masses_bfloat16(head_dim, params.block_size)
                                            : masses_float16(head_dim, params.block_size);
}

const char* advance(const Tensor& tensor, int axis, int64_t by) {
  return static_cast<const char*>(tensor.data) + by * tensor.strides[axis] * dtype_size(tensor.dtype);
}

}  // namespace

int64_t captured_mass_workspace(const CapturedMassParams& params) {
  return params.layout.tokens_q == 0 ? 0 : shape_of(params).bytes();
}

void launch_captured_mass(const CapturedMassParams& params, void* workspace) {
  const SequenceLayout& layout = params.layout;
  const Tensor &q = params.q, &k = params.k;
  const Shape shape = shape_of(params);
  auto* const memory = static_cast<unsigned char*>(workspace);
  auto* const owners = reinterpret_cast<uint32_t*>(memory);
  auto* const lse = reinterpret_cast<float*>(memory + shape.owners_bytes);
  LseParams prefix = lse_params(params);
  prefix.index_lse = make_tensor(lse, OPENMSA_FLOAT32, {q.shape[1], layout.tokens_q});
  prefix.workspace = owners;
  launch_prefix_lse(prefix);

  const int64_t heads = params.indices.shape[0], group = q.shape[1] / heads;
  MassArguments mass{};
  mass.layout = layout;
  mass.block_size = params.block_size;
  mass.owners = layout.cu_seqlens_q != nullptr ? owners : nullptr;
  mass.group = static_cast<int32_t>(group);
  mass.tile_tokens = static_cast<int32_t>(kRows / group);
  mass.q_stride_token = q.strides[0];
  mass.q_stride_head = q.strides[1];
  mass.k_stride_token = k.strides[0];
  mass.factor = static_cast<float>(params.scale * std::numbers::log2e);
  mass.lse = lse;
  mass.masses = reinterpret_cast<float*>(memory + shape.owners_bytes + shape.lse_bytes);
  mass.most_blocks = shape.most_blocks;
  SumArguments sum{};
  sum.layout = layout;
  sum.block_size = params.block_size;
  sum.owners = mass.owners;
  sum.indices = index_view(params.indices);
  sum.topk = static_cast<int32_t>(params.indices.shape[2]);
  sum.masses = mass.masses;
  sum.most_blocks = shape.most_blocks;
  sum.share = static_cast<float*>(params.share.data);
  sum.share_stride_head = params.share.strides[0];
  sum.share_stride_token = params.share.strides[1];
  sum.best = static_cast<float*>(params.best.data);
  sum.best_stride_head = params.best.strides[0];
  sum.best_stride_token = params.best.strides[1];

  const MassKernel kernel = kernel_for(params);
  const int64_t aim = device_info(q.device_index).multiprocessors * kThreadBlocksPerMultiprocessor;
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t first = 0; first < layout.tokens_q; first += shape.chunk) {
      const int64_t tokens = std::min(shape.chunk, layout.tokens_q - first);
      mass.first_token = sum.first_token = first;
      mass.tokens = sum.tokens = tokens;
      mass.first_head = head * group;
      mass.q = advance(q, 0, first) + head * group * q.strides[1] * dtype_size(q.dtype);
      mass.k = advance(k, 1, head * k.shape[1] / heads);
      LaunchShape launch;
      launch.blocks_x = (tokens + mass.tile_tokens - 1) / mass.tile_tokens;
      const int64_t shares = std::clamp<int64_t>(aim / launch.blocks_x, 1, shape.most_blocks);
      mass.share_blocks = (shape.most_blocks + shares - 1) / shares;
      launch.blocks_y = static_cast<int>((shape.most_blocks + mass.share_blocks - 1) / mass.share_blocks);
      launch.threads = kThreads;
      launch.shared_bytes = kernel.shared_bytes;
      launch_kernel("masses", kernel.entry, launch, params.execution.stream, &mass);
      sum.head = head;
      LaunchShape sums;
      sums.blocks_x = tokens;
      sums.threads = kThreads;
      launch_kernel("captured_mass", sums_kernel_entry(), sums, params.execution.stream, &sum);
    }
  }
}

}  // namespace openmsa::cuda::sm90
