#include "cli/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <utility>

namespace openmsa::cli {

using Clock = std::chrono::steady_clock;

Progress::Progress() : terminal_(::isatty(STDERR_FILENO) == 1), thread_([this] { run(); }) {}

Progress::~Progress() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  thread_.join();
  clear();
}

void Progress::say(const std::string& text) {
  const std::lock_guard lock(mutex_);
  text_ = text;
}

void Progress::print(const std::string& line) {
  const std::lock_guard lock(mutex_);
  clear();
  (void)std::fputs((line + "\n").c_str(), stdout);
  (void)std::fflush(stdout);
}

void Progress::clear() {
  if (std::exchange(shown_, false)) (void)std::fputs("\r\033[K", stderr);
}

void Progress::run() {
  const auto period = terminal_ ? std::chrono::milliseconds(500) : std::chrono::seconds(15);
  const auto start = Clock::now();
  std::unique_lock lock(mutex_);
  auto next = start + (terminal_ ? std::chrono::seconds(2) : std::chrono::seconds(15));
  while (!changed_.wait_until(lock, next, [this] { return ended_; })) {
    next += period;
    if (text_.empty()) continue;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - start).count();
    const std::string line = fmt::format("openmsa: {} ({} s)", text_, seconds);
    (void)std::fputs((terminal_ ? "\r\033[K" + line : line + "\n").c_str(), stderr);
    shown_ = terminal_;
  }
}

}  // namespace openmsa::cli
