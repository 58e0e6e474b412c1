// The instruction sets that kernels of the cpu backend are compiled for, and the choice among them at run time.
//
// A kernel file compiles its code once for each of them: HWY_TARGET_INCLUDE, hwy/foreach_target.h and a table of
// entry points by HWY_EXPORT. It includes this header before any of Highway's.
#pragma once

// AVX2, AVX-512 and NEON, beside the one that every compiler has. Newer AVX-512 subsets change nothing here and would
// double the code; without AVX2 the backend is not offered.
#ifdef OPENMSA_AVX2_ALONE
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_AVX3)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif

namespace openmsa::cpu {

// Whether this machine has an instruction set that is worth it.
bool target_available();

// "avx2", "avx512", "neon": what the kernels run on.
const char* target_name();

// Settles the choice before a kernel is called: OPENMSA_CPU_TARGET's, read once, else the best. Throws when that names
// something else than "avx2" or "avx512", or what this machine cannot run.
void choose_target();

}  // namespace openmsa::cpu
