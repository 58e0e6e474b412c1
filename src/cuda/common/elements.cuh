// Storage types of tensors, and how 16 bytes of each widen to float32. Every widening is exact.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/convert.cuh"
#include "cuda/common/instructions/load_global.cuh"

namespace openmsa::cuda {

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4m3 {
  uint8_t bits;
};

// Elements of a 16-byte load.
template <typename Element>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(Element));

__device__ inline void widen_word(Bfloat16, uint32_t word, float* out) {
  out[0] = __uint_as_float(word << 16);
  out[1] = __uint_as_float(word & 0xffff0000u);
}

__device__ inline void widen_word(Float16, uint32_t word, float* out) {
  const float2 pair = convert_f16x2_to_f32(word);
  out[0] = pair.x;
  out[1] = pair.y;
}

__device__ inline void widen_word(Float8E4m3, uint32_t word, float* out) {
  widen_word(Float16{}, convert_e4m3x2_to_f16x2(static_cast<uint16_t>(word)), out);
  widen_word(Float16{}, convert_e4m3x2_to_f16x2(static_cast<uint16_t>(word >> 16)), out + 2);
}

// Two values rounded to storage, the lower first.
__device__ inline uint32_t narrow_pair(Bfloat16, float low, float high) { return convert_f32_to_bf16x2(low, high); }
__device__ inline uint32_t narrow_pair(Float16, float low, float high) { return convert_f32_to_f16x2(low, high); }

template <typename Element>
__device__ inline void widen_vector(Element, uint4 words, float (&out)[kVector<Element>]) {
  constexpr int kPerWord = kVector<Element> / 4;
  widen_word(Element{}, words.x, out);
  widen_word(Element{}, words.y, out + kPerWord);
  widen_word(Element{}, words.z, out + 2 * kPerWord);
  widen_word(Element{}, words.w, out + 3 * kPerWord);
}

// Of memory that nothing writes while the kernel runs.
template <typename Element>
__device__ inline void load_widened(const Element* from, float (&out)[kVector<Element>]) {
  widen_vector(Element{}, load_global_read_only(from), out);
}

}  // namespace openmsa::cuda
