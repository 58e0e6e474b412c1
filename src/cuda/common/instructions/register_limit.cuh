#pragma once

namespace openmsa::cuda {

// PTX ISA, "Miscellaneous Instructions: setmaxnreg". Every warp of a warpgroup calls it; kernels that use it have a
// register limit (launch bounds). `kCount` is a multiple of 8 from 24 to 256.
template <int kCount>
__device__ inline void raise_register_limit() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void lower_register_limit() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace openmsa::cuda
