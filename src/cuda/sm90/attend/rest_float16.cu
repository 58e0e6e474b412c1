#include "cuda/sm90/attend/join.cuh"
#include "cuda/sm90/attend/launch.h"
#include "cuda/sm90/attend/rest.cuh"

namespace openmsa::cuda::sm90::attend {
namespace {

template <int kHeadDim, int kBlock>
AttendKernel entry() {
  using Chosen = Config<Float16, kHeadDim, kBlock>;
  return {reinterpret_cast<const void*>(&rest_kernel<Chosen>), kRestSharedBytes<Chosen>};
}

}  // namespace

AttendKernel rest_float16(int64_t head_dim, int64_t block_size) {
  if (head_dim == 128) return block_size == 128 ? entry<128, 128>() : entry<128, 64>();
  return block_size == 128 ? entry<64, 128>() : entry<64, 64>();
}

const void* join_float16() { return reinterpret_cast<const void*>(&join_kernel<Float16>); }

}  // namespace openmsa::cuda::sm90::attend
