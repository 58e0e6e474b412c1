#include "cpu/common/targets.h"

#include <cstdlib>
#include <string_view>

#include "api/error.h"
#include "hwy/highway.h"

namespace openmsa::cpu {
namespace {

constexpr int64_t kVectorTargets = HWY_TARGETS & (HWY_AVX2 | HWY_AVX3 | HWY_NEON);

int64_t supported() { return hwy::SupportedTargets() & kVectorTargets; }

// Highway counts the best target in the lowest bit.
int64_t best() { return supported() & -supported(); }

bool apply_setting() {
  const char* setting = std::getenv("OPENMSA_CPU_TARGET");
  if (setting == nullptr || *setting == '\0') return true;
  const std::string_view name = setting;
  if (name != "avx2" && name != "avx512") {
    fail_argument("OPENMSA_CPU_TARGET: got \"", name, "\", expected avx2 or avx512");
  }
  const int64_t wanted = name == "avx2" ? HWY_AVX2 : HWY_AVX3;
  if ((supported() & wanted) == 0) {
    fail_unsupported("OPENMSA_CPU_TARGET: got \"", name, "\", which this machine cannot run; it supports ",
                     target_name());
  }
  hwy::DisableTargets(kVectorTargets & ~wanted);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  return true;
}

}  // namespace

bool target_available() { return supported() != 0; }

const char* target_name() {
  switch (best()) {
    case HWY_AVX3:
      return "avx512";
    case HWY_AVX2:
      return "avx2";
    case HWY_NEON:
      return "neon";
    default:
      return "no vector unit that is used here";
  }
}

void choose_target() {
  static const bool s_applied = apply_setting();  // not settled when it throws: the next call tells again
  (void)s_applied;
}

}  // namespace openmsa::cpu
