// Settings of the process.
#include <atomic>

#include "api/error.h"

namespace openmsa {
namespace {

std::atomic<int64_t> g_workspace_limit{int64_t{1} << 30};
std::atomic<bool> g_check_inputs{false};

}  // namespace

void set_workspace_limit(int64_t bytes) {
  if (bytes <= 0) fail_argument("workspace_limit: got ", bytes, " bytes, expected an integer > 0");
  g_workspace_limit.store(bytes, std::memory_order_relaxed);
}

int64_t workspace_limit() noexcept { return g_workspace_limit.load(std::memory_order_relaxed); }

void set_check_inputs(bool enabled) noexcept { g_check_inputs.store(enabled, std::memory_order_relaxed); }

bool check_inputs() noexcept { return g_check_inputs.load(std::memory_order_relaxed); }

}  // namespace openmsa
