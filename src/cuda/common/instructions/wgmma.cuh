// Asynchronous matrix products of a warpgroup: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate
// Instructions".
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/instructions/wgmma_descriptor.cuh"

namespace openmsa::cuda {

// wgmma.fence: registers that this thread wrote are visible to the products that it issues next.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: the products issued since the last call form a group.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: at most kPending of the thread's latest groups are still in flight.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Products in flight own their sums: nothing of them may move across this point.
template <int kSums>
__device__ inline void wgmma_pin(float (&sums)[kSums]) {
#pragma unroll
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

// What `value`, not negative, comes from stands before the next wait. Else the assembler moves that wait up to the
// first register that the product in flight reads, and nothing runs beside the product.
__device__ inline void wgmma_hold(float value) {
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "setp.lt.f32 never, %0, 0f00000000;\n"
      "@never nanosleep.u32 0;\n"
      "}\n" ::"f"(value));
}

// wgmma.mma_async: d = a b' (+ d), float32 sums of 64 rows by N columns, both operands in shared memory. A step covers
// 32 bytes of k. Element i of d is row 16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i % 2 for lane l of
// the warpgroup's warp w.
// clang-format off
#define OPENMSA_WGMMA_N64(element, kind, modifiers)                                                                    \
  __device__ inline void wgmma_product(element, float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {             \
    asm volatile(                                                                                                      \
        "{\n"                                                                                                          \
        ".reg .pred accumulate;\n"                                                                                     \
        "setp.ne.b32 accumulate, %34, 0;\n"                                                                            \
        "wgmma.mma_async.sync.aligned.m64n64" kind " {"                                                                \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                               \
        "}, %32, %33, accumulate, 1, 1" modifiers ";\n"                                                                \
        "}"                                                                                                            \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),              \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),        \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),      \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])       \
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                                          \
  }

#define OPENMSA_WGMMA_N128(element, kind, modifiers)                                                                   \
  __device__ inline void wgmma_product(element, float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {             \
    asm volatile(                                                                                                      \
        "{\n"                                                                                                          \
        ".reg .pred accumulate;\n"                                                                                     \
        "setp.ne.b32 accumulate, %66, 0;\n"                                                                            \
        "wgmma.mma_async.sync.aligned.m64n128" kind " {"                                                               \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                             \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                             \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                               \
        "}, %64, %65, accumulate, 1, 1" modifiers ";\n"                                                                \
        "}"                                                                                                            \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),              \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),        \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),      \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),      \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),      \
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),      \
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),      \
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])       \
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                                          \
  }

OPENMSA_WGMMA_N64(Bfloat16, "k16.f32.bf16.bf16", ", 0, 0")
OPENMSA_WGMMA_N64(Float16, "k16.f32.f16.f16", ", 0, 0")
OPENMSA_WGMMA_N64(Float8E4m3, "k32.f32.e4m3.e4m3", "")
OPENMSA_WGMMA_N128(Bfloat16, "k16.f32.bf16.bf16", ", 0, 0")
OPENMSA_WGMMA_N128(Float16, "k16.f32.f16.f16", ", 0, 0")
OPENMSA_WGMMA_N128(Float8E4m3, "k32.f32.e4m3.e4m3", "")

// The same with a in registers: bytes 4 (l % 4) to 4 (l % 4) + 3 of a row's two 16-byte halves of the k step, as
// ldmatrix gives them: rows 16 w + l / 4 and + 8 of the first half, then of the second.
#define OPENMSA_WGMMA_N128_REGISTERS(element, kind, modifiers)                                                         \
  __device__ inline void wgmma_product(element, float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool accumulate) { \
    asm volatile(                                                                                                      \
        "{\n"                                                                                                          \
        ".reg .pred accumulate;\n"                                                                                     \
        "setp.ne.b32 accumulate, %69, 0;\n"                                                                            \
        "wgmma.mma_async.sync.aligned.m64n128" kind " {"                                                               \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                             \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                             \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                               \
        "}, {%64, %65, %66, %67}, %68, accumulate, 1, 1" modifiers ";\n"                                               \
        "}"                                                                                                            \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),              \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),        \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),      \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),      \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),      \
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),      \
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),      \
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));                      \
  }

OPENMSA_WGMMA_N128_REGISTERS(Bfloat16, "k16.f32.bf16.bf16", ", 0")
OPENMSA_WGMMA_N128_REGISTERS(Float16, "k16.f32.f16.f16", ", 0")
OPENMSA_WGMMA_N128_REGISTERS(Float8E4m3, "k32.f32.e4m3.e4m3", "")
#undef OPENMSA_WGMMA_N128_REGISTERS

// d = a b + d with a in registers as above and b stored with its rows along k (wgmma_descriptor_transposed).
#define OPENMSA_WGMMA_N64_TRANSPOSED(element, kind)                                                                    \
  __device__ inline void wgmma_product_transposed(element, float (&d)[32], const uint32_t (&a)[4], uint64_t b) {       \
    asm volatile(                                                                                                      \
        "wgmma.mma_async.sync.aligned.m64n64" kind " {"                                                                \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                               \
        "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"                                                                    \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),              \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),        \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),      \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                         \
  }

#define OPENMSA_WGMMA_N128_TRANSPOSED(element, kind)                                                                   \
  __device__ inline void wgmma_product_transposed(element, float (&d)[64], const uint32_t (&a)[4], uint64_t b) {       \
    asm volatile(                                                                                                      \
        "wgmma.mma_async.sync.aligned.m64n128" kind " {"                                                               \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                             \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                             \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                               \
        "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                                                    \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),              \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),        \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),      \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),      \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),      \
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),      \
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),      \
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                         \
  }

OPENMSA_WGMMA_N64_TRANSPOSED(Bfloat16, "k16.f32.bf16.bf16")
OPENMSA_WGMMA_N64_TRANSPOSED(Float16, "k16.f32.f16.f16")
OPENMSA_WGMMA_N128_TRANSPOSED(Bfloat16, "k16.f32.bf16.bf16")
OPENMSA_WGMMA_N128_TRANSPOSED(Float16, "k16.f32.f16.f16")
#undef OPENMSA_WGMMA_N64_TRANSPOSED
#undef OPENMSA_WGMMA_N128_TRANSPOSED
#undef OPENMSA_WGMMA_N64
#undef OPENMSA_WGMMA_N128
// clang-format on

}  // namespace openmsa::cuda
