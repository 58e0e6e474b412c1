// The choice of the instruction set. It is settled once in a process: each case here runs in one of its own.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "api/stages.h"
#include "cpp/api_calls.h"
#include "cpu/common/targets.h"
#include "hwy/highway.h"

namespace openmsa::testing {
namespace {

// Runs an operation under the setting; its message, or the chosen target's name, on standard error.
[[noreturn]] void run_under(const char* setting) {
  setenv("OPENMSA_CPU_TARGET", setting, 1);
  setenv("OPENMSA_BACKEND", "cpu", 1);
  try {
    const auto call = tests::make_call("select_blocks");
    call->run();
    std::fprintf(stderr, "ran on %s", cpu::target_name());
    std::exit(0);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s", error.what());
    std::exit(error.status());
  }
}

bool has(int64_t target) { return (hwy::SupportedTargets() & HWY_TARGETS & target) != 0; }

class Targets : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cpu_backend().available()) GTEST_SKIP() << "no instruction set of the cpu backend here";
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own, from the start
  }
};
using TargetsDeathTest = Targets;

TEST_F(TargetsDeathTest, TheBestWithoutASetting) {
  EXPECT_EXIT(run_under(""), ::testing::ExitedWithCode(0),
              has(HWY_AVX3)   ? "ran on avx512"
              : has(HWY_AVX2) ? "ran on avx2"
                              : "ran on neon");
}

TEST_F(TargetsDeathTest, Avx2) {
  if (!has(HWY_AVX2)) GTEST_SKIP() << "no AVX2 here";
  EXPECT_EXIT(run_under("avx2"), ::testing::ExitedWithCode(0), "ran on avx2");
}

TEST_F(TargetsDeathTest, Avx512) {
  if (has(HWY_AVX3)) {
    EXPECT_EXIT(run_under("avx512"), ::testing::ExitedWithCode(0), "ran on avx512");
  } else {
    EXPECT_EXIT(run_under("avx512"), ::testing::ExitedWithCode(OPENMSA_UNSUPPORTED),
                "OPENMSA_CPU_TARGET: got \"avx512\", which this machine cannot run; it supports (avx2|neon)");
  }
}

TEST_F(TargetsDeathTest, AnotherName) {
  EXPECT_EXIT(run_under("AVX2"), ::testing::ExitedWithCode(OPENMSA_INVALID_ARGUMENT),
              "OPENMSA_CPU_TARGET: got \"AVX2\", expected avx2 or avx512");
}

}  // namespace
}  // namespace openmsa::testing
