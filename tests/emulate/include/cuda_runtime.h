// What CUDA sources of this project take from the language and the runtime, for the emulation: qualifiers, built-in
// variables and functions here, the runtime's API in runtime_api.h.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <type_traits>

#include "emulate/device.h"
#include "runtime_api.h"
#include "vector_types.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// One thread block runs at a time on an operating system thread. `extern __shared__` arrays: shared_memory.cc.
#define __shared__ thread_local

extern constinit thread_local uint3 threadIdx, blockIdx;
extern constinit thread_local dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

// ---- Barriers, votes, shuffles --------------------------------------------------------------------------------------

inline void __syncthreads() { openmsa::emulate::sync_block(false); }
inline int __syncthreads_count(int vote) { return openmsa::emulate::sync_block(vote != 0); }
inline int __syncthreads_or(int vote) { return openmsa::emulate::sync_block(vote != 0) > 0 ? 1 : 0; }
inline int __syncthreads_and(int vote) { return openmsa::emulate::sync_block(vote == 0) == 0 ? 1 : 0; }
inline void __syncwarp(unsigned mask = ~0u) { openmsa::emulate::meet_lanes(mask, 0, "__syncwarp"); }

inline unsigned __ballot_sync(unsigned mask, bool value) {
  return openmsa::emulate::ballot(mask, value, "__ballot_sync");
}
inline int __any_sync(unsigned mask, bool value) { return openmsa::emulate::ballot(mask, value, "__any_sync") != 0; }
inline int __all_sync(unsigned mask, bool value) { return openmsa::emulate::ballot(mask, !value, "__all_sync") == 0; }

// As the PTX instruction: lanes outside a segment of `width` give a lane its own value.
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return openmsa::emulate::shuffle(mask, value, "__shfl_sync",
                                   [&](int lane) { return (lane & -width) | (source & (width - 1)); });
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  return openmsa::emulate::shuffle(mask, value, "__shfl_xor_sync", [&](int lane) {
    const int from = lane ^ bits;
    return from < (lane & -width) + width ? from : lane;
  });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return openmsa::emulate::shuffle(mask, value, "__shfl_up_sync", [&](int lane) {
    const int from = lane - static_cast<int>(delta);
    return from >= (lane & -width) ? from : lane;
  });
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return openmsa::emulate::shuffle(mask, value, "__shfl_down_sync", [&](int lane) {
    const int from = lane + static_cast<int>(delta);
    return from < (lane & -width) + width ? from : lane;
  });
}

template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  return openmsa::emulate::match_lanes(mask, value);
}

template <std::integral T>
T __reduce_add_sync(unsigned mask, T value) {
  return openmsa::emulate::reduce(mask, value, "__reduce_add_sync", [](T a, T b) { return static_cast<T>(a + b); });
}
template <std::integral T>
T __reduce_max_sync(unsigned mask, T value) {
  return openmsa::emulate::reduce(mask, value, "__reduce_max_sync", [](T a, T b) { return a > b ? a : b; });
}
template <std::integral T>
T __reduce_min_sync(unsigned mask, T value) {
  return openmsa::emulate::reduce(mask, value, "__reduce_min_sync", [](T a, T b) { return a < b ? a : b; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return openmsa::emulate::reduce(mask, value, "__reduce_or_sync", [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value) {
  return openmsa::emulate::reduce(mask, value, "__reduce_and_sync", [](unsigned a, unsigned b) { return a & b; });
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { openmsa::emulate::give_way(); }
inline std::size_t __cvta_generic_to_shared(const void* pointer) { return openmsa::emulate::shared_address(pointer); }
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}
[[noreturn]] inline void __trap() { openmsa::emulate::trap(); }

template <typename T>
T atomicAdd(T* at, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*at).fetch_add(value);
}
template <typename T>
T atomicSub(T* at, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*at).fetch_sub(value);
}
template <typename T>
T atomicOr(T* at, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*at).fetch_or(value);
}
template <typename T>
T atomicAnd(T* at, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*at).fetch_and(value);
}
template <typename T>
T atomicExch(T* at, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*at).exchange(value);
}
template <typename T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  std::atomic_ref<T>(*at).compare_exchange_strong(expected, value);
  return expected;
}
template <typename T>
T atomicMax(T* at, std::type_identity_t<T> value) {
  T before = std::atomic_ref<T>(*at).load();
  while (before < value && !std::atomic_ref<T>(*at).compare_exchange_weak(before, value)) {
  }
  return before;
}
template <typename T>
T atomicMin(T* at, std::type_identity_t<T> value) {
  T before = std::atomic_ref<T>(*at).load();
  while (value < before && !std::atomic_ref<T>(*at).compare_exchange_weak(before, value)) {
  }
  return before;
}

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

template <typename A, typename B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmax(static_cast<T>(a), static_cast<T>(b));
  } else {
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
  }
}
template <typename A, typename B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmin(static_cast<T>(a), static_cast<T>(b));
  } else {
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
  }
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline int __clz(int bits) { return std::countl_zero(static_cast<unsigned>(bits)); }
inline int __clzll(long long bits) { return std::countl_zero(static_cast<unsigned long long>(bits)); }
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __popcll(unsigned long long bits) { return std::popcount(bits); }
inline unsigned __brev(unsigned bits) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= (bits >> i & 1) << (31 - i);
  return result;
}
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __frcp_rn(float x) { return 1.0F / x; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float x) { return 1.0F / std::sqrt(x); }
