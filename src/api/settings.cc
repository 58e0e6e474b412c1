// Settings of the process, and of its threads.
#include <atomic>

#include "api/error.h"

namespace openmsa {
namespace {

std::atomic<int64_t> g_workspace_limit{int64_t{1} << 30};
std::atomic<bool> g_check_inputs{false};

// Of each thread its own, like OpenMP's: a program may give its threads different shares of the processors.
thread_local int32_t t_num_threads = 0;
constexpr int32_t kMostThreads = 1024;

}  // namespace

void set_workspace_limit(int64_t bytes) {
  if (bytes <= 0) fail_argument("workspace_limit: got ", bytes, " bytes, expected an integer > 0");
  g_workspace_limit.store(bytes, std::memory_order_relaxed);
}

int64_t workspace_limit() noexcept { return g_workspace_limit.load(std::memory_order_relaxed); }

void set_check_inputs(bool enabled) noexcept { g_check_inputs.store(enabled, std::memory_order_relaxed); }

bool check_inputs() noexcept { return g_check_inputs.load(std::memory_order_relaxed); }

void set_num_threads(int32_t threads) {
  if (threads < 0 || threads > kMostThreads) {
    fail_argument("num_threads: got ", threads, ", expected 0 (as OpenMP is set) to ", kMostThreads);
  }
  t_num_threads = threads;
}

int32_t num_threads() noexcept { return t_num_threads; }

}  // namespace openmsa
