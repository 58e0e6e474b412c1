// The emulation itself: copies, products and barriers against plain loops, and faults that it must find.
#include <cuda.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "api/numeric.h"
#include "cuda/common/instructions/bulk_tensor.cuh"
#include "cuda/common/instructions/load_matrix.cuh"
#include "cuda/common/instructions/mbarrier.cuh"
#include "cuda/common/instructions/named_barrier.cuh"
#include "cuda/common/instructions/wgmma.cuh"
#include "cuda/common/tensor_map.h"

namespace openmsa::cuda::sm90 {

constexpr int kRows = 64, kColumns = 128, kDepth = 64, kRowBytes = 128;

enum class Variant {
  k_major,
  in_registers,
  transposed,
  // Faults.
  no_wait_for_copy,
  early_release,
  no_fence,
  read_before_wait,
  never_waited,
};

struct ProductArguments {
  CUtensorMap a, b;
  float* out;  // [64, 128]
  Variant variant;
};

struct ProductShared {
  alignas(1024) unsigned char a[kRows][kRowBytes];
  alignas(1024) unsigned char b[2][64][kRowBytes];  // 128 rows of k, or transposed 64 rows of k in two panels
  uint64_t full;
};

// out = a b', one warpgroup.
__global__ void product_kernel(const __grid_constant__ ProductArguments args) {
  extern __shared__ unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ProductShared*>(shared_bytes);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  if (thread == 0) {
    barrier_init(&shared.full, 1);
    fence_barrier_init();
  }
  __syncthreads();
  const bool transposed = args.variant == Variant::transposed;
  if (thread == 0) {
    barrier_arrive_expect(&shared.full, sizeof(shared.a) + sizeof(shared.b));
    copy_box(shared.a, &args.a, &shared.full, 0, 0);
    copy_box(shared.b[0], &args.b, &shared.full, 0, 0);
    copy_box(shared.b[1], &args.b, &shared.full, transposed ? 64 : 0, transposed ? 0 : 64);
  }
  __syncthreads();
  if (args.variant != Variant::no_wait_for_copy) barrier_wait(&shared.full, 0);
  float sums[kColumns / 2] = {};
  if (args.variant != Variant::no_fence) wgmma_fence();
  for (int step = 0; step < kDepth / 16; ++step) {
    const uint64_t a = wgmma_descriptor(shared.a) + static_cast<uint64_t>(2 * step);
    uint32_t words[4];
    const int row = thread / 32 * 16 + lane % 16, piece = 2 * step + lane / 16;
    if (args.variant == Variant::in_registers || transposed) {
      load_matrices(words, &shared.a[row][16 * (piece ^ (row % 8))]);
    }
    if (transposed) {
      const uint64_t b = wgmma_descriptor_transposed(shared.b[0][16 * step], sizeof(shared.b[0]));
      wgmma_product_transposed(Bfloat16{}, sums, words, b);
    } else if (args.variant == Variant::in_registers) {
      wgmma_product(Bfloat16{}, sums, words, wgmma_descriptor(shared.b) + static_cast<uint64_t>(2 * step), step > 0);
    } else {
      wgmma_product(Bfloat16{}, sums, a, wgmma_descriptor(shared.b) + static_cast<uint64_t>(2 * step), step > 0);
    }
  }
  wgmma_commit();
  if (args.variant == Variant::early_release && thread == 0) copy_box(shared.a, &args.a, &shared.full, 0, 0);
  const float early = sums[0];
  if (args.variant != Variant::never_waited) wgmma_wait<0>();
  for (int i = 0; i < kColumns / 2; ++i) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    args.out[row * kColumns + column] = args.variant == Variant::read_before_wait ? early : sums[i];
  }
}

enum class BarrierFault {
  none,
  deadlock,
  bytes_missing,
  too_many_arrivals,
  overwritten,
  different_instructions,
  named_count,
  past_the_end,
};

struct BarrierArguments {
  int* out;
  BarrierFault fault;
};

// Two warps take turns at a counter; out gets its end.
__global__ void barrier_kernel(const __grid_constant__ BarrierArguments args) {
  extern __shared__ unsigned char shared_bytes[];
  auto* const barriers = reinterpret_cast<uint64_t*>(shared_bytes);
  auto* const counter = reinterpret_cast<int*>(shared_bytes + 64);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  if (thread == 0) {
    barrier_init(&barriers[0], 1);
    barrier_init(&barriers[1], 1);
    *counter = 0;
    fence_barrier_init();
    if (args.fault == BarrierFault::overwritten) barriers[1] = 0;
    if (args.fault == BarrierFault::past_the_end) shared_bytes[1024] = 1;
  }
  __syncthreads();
  const auto arrive = [&](uint64_t* barrier) {
    if (args.fault == BarrierFault::bytes_missing || args.fault == BarrierFault::too_many_arrivals) {
      barrier_arrive_expect(barrier, 512);
    } else {
      barrier_arrive(barrier);
    }
  };
  for (int round = 0; round < 10; ++round) {
    // The first warp begins: nobody waits for phase -1.
    if (warp == 1 || round > 0) barrier_wait(&barriers[warp], static_cast<uint32_t>(warp == 1 ? round : round - 1) & 1);
    const int seen = *counter;
    const int sum = __shfl_xor_sync(~0u, seen, 1);
    if (args.fault == BarrierFault::different_instructions && lane == 3) {
      __syncwarp();
    } else {
      static_cast<void>(__any_sync(~0u, sum != seen));
    }
    if (lane != 0) continue;
    *counter = seen + 1;
    if (args.fault == BarrierFault::deadlock && round == 4 && warp == 1) continue;
    arrive(&barriers[1 - warp]);
    if (args.fault == BarrierFault::too_many_arrivals) arrive(&barriers[1 - warp]);
  }
  named_barrier_sync(3, args.fault == BarrierFault::named_count && warp == 1 ? 32 : 64);
  if (thread == 0) *args.out = *counter;
}

}  // namespace openmsa::cuda::sm90

namespace openmsa::emulate {
namespace {

using namespace openmsa::cuda::sm90;

template <typename Arguments>
std::string launch(void (*kernel)(Arguments), const Arguments& arguments, int threads, std::size_t shared_bytes) {
  Arguments copy = arguments;
  void* parameters[] = {&copy};
  const cudaError_t code = cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(1),
                                            dim3(static_cast<unsigned>(threads)), parameters, shared_bytes, nullptr);
  return code == cudaSuccess ? "" : cudaGetErrorString(code);
}

class Products {
 public:
  explicit Products(bool transposed) : a_(kRows * kDepth), b_(kColumns * kDepth), transposed_(transposed) {
    std::mt19937 random(3);
    for (std::vector<uint16_t>* const values : {&a_, &b_}) {
      for (uint16_t& value : *values) value = float_to_bfloat16(static_cast<float>(random() % 17) - 8);
    }
  }

  std::string run(Variant variant, std::vector<float>* out) const {
    const std::array<cuda::TensorMapAxis, 2> a = {{{kDepth, 0, 64}, {kRows, 128, kRows}}};
    // [128, 64] or transposed [64, 128].
    const std::array<cuda::TensorMapAxis, 2> b = {
        {{transposed_ ? kColumns : kDepth, 0, 64}, {transposed_ ? kDepth : kColumns, transposed_ ? 256 : 128, 64}}};
    out->assign(kRows * kColumns, -1);
    return launch(&product_kernel,
                  {cuda::make_tensor_map("a", a_.data(), 2, a), cuda::make_tensor_map("b", b_.data(), 2, b),
                   out->data(), variant},
                  128, sizeof(ProductShared));
  }

  std::vector<float> expected() const {
    std::vector<float> sums(kRows * kColumns);
    for (int row = 0; row < kRows; ++row) {
      for (int column = 0; column < kColumns; ++column) {
        for (int k = 0; k < kDepth; ++k) {
          const int at = transposed_ ? k * kColumns + column : column * kDepth + k;
          sums[static_cast<std::size_t>(row * kColumns + column)] +=
              bfloat16_to_float(a_[static_cast<std::size_t>(row * kDepth + k)]) *
              bfloat16_to_float(b_[static_cast<std::size_t>(at)]);
        }
      }
    }
    return sums;
  }

 private:
  std::vector<uint16_t> a_, b_;
  bool transposed_;
};

TEST(EmulatedProducts, AreThoseOfPlainLoops) {
  for (const Variant variant : {Variant::k_major, Variant::in_registers, Variant::transposed}) {
    const Products products(variant == Variant::transposed);
    std::vector<float> out;
    EXPECT_EQ(products.run(variant, &out), "");
    EXPECT_EQ(out, products.expected()) << static_cast<int>(variant);
  }
}

TEST(EmulatedProducts, FaultsAreFound) {
  const Products products(false);
  std::vector<float> out;
  const auto finds = [&](Variant variant, const char* what) {
    const std::string fault = products.run(variant, &out);
    EXPECT_NE(fault.find(what), std::string::npos) << fault;
  };
  finds(Variant::no_wait_for_copy, "a copy is on its way to operand");
  finds(Variant::early_release, "a matrix product or bulk store that nobody waited for still reads there");
  finds(Variant::no_fence, "no wgmma.fence");
  finds(Variant::never_waited, "matrix products that it never waited for");
  EXPECT_EQ(products.run(Variant::read_before_wait, &out), "");
  EXPECT_TRUE(std::isnan(out[0])) << "sums under way are poison";
}

TEST(EmulatedBarriers, LetWarpsTakeTurns) {
  int out = -1;
  EXPECT_EQ(launch(&barrier_kernel, {&out, BarrierFault::none}, 64, 1024), "");
  EXPECT_EQ(out, 20);
}

TEST(EmulatedBarriers, FaultsAreFound) {
  int out = -1;
  const auto finds = [&](BarrierFault fault, const char* what) {
    const std::string found = launch(&barrier_kernel, {&out, fault}, 64, 1024);
    EXPECT_NE(found.find(what), std::string::npos) << found;
  };
  finds(BarrierFault::deadlock, "deadlock");
  finds(BarrierFault::bytes_missing, "512 bytes are missing");
  finds(BarrierFault::too_many_arrivals, "mbarrier.arrive.expect_tx: the phase has had its 1 arrivals");
  finds(BarrierFault::overwritten, "something was written over the barrier");
  finds(BarrierFault::different_instructions, "other lanes of the warp are at");
  finds(BarrierFault::named_count, "bar.sync 3: expects");
  finds(BarrierFault::past_the_end, "behind the dynamic shared memory");
}

}  // namespace
}  // namespace openmsa::emulate
