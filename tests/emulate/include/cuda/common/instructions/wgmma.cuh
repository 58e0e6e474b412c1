// Emulates src/cuda/common/instructions/wgmma.cuh.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/instructions/wgmma_descriptor.cuh"
#include "emulate/products.h"

namespace openmsa::cuda {

inline void wgmma_fence() { emulate::fence_products(); }
inline void wgmma_commit() { emulate::commit_products(); }
template <int kPending>
void wgmma_wait() {
  emulate::wait_products(kPending);
}
template <int kSums>
void wgmma_pin(float (&/*sums*/)[kSums]) {}
inline void wgmma_hold(float /*value*/) {}

constexpr emulate::ProductType product_type(Bfloat16) { return emulate::ProductType::bfloat16; }
constexpr emulate::ProductType product_type(Float16) { return emulate::ProductType::float16; }
constexpr emulate::ProductType product_type(Float8E4m3) { return emulate::ProductType::float8_e4m3; }

// A thread has a sum for each two columns.
template <typename Element, int kSums>
void wgmma_product(Element element, float (&d)[kSums], uint64_t a, uint64_t b, bool accumulate) {
  emulate::issue_product({.type = product_type(element), .n = 2 * kSums}, d, a, nullptr, b, accumulate);
}
template <typename Element, int kSums>
void wgmma_product(Element element, float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  emulate::issue_product({.type = product_type(element), .n = 2 * kSums, .a_in_registers = true}, d, 0, a, b,
                         accumulate);
}
template <typename Element, int kSums>
void wgmma_product_transposed(Element element, float (&d)[kSums], const uint32_t (&a)[4], uint64_t b) {
  emulate::issue_product({.type = product_type(element), .n = 2 * kSums, .a_in_registers = true, .b_is_mn_major = true},
                         d, 0, a, b, true);
}

}  // namespace openmsa::cuda
