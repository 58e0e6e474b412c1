#include "cli/interrupt.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <memory>

namespace openmsa::cli {
namespace {

// What the handler may read: a pointer to text that stays.
std::atomic<const char*> g_path{nullptr};
static_assert(std::atomic<const char*>::is_always_lock_free);

extern "C" void end_at_once(int signal) {
  if (const char* path = g_path.load(); path != nullptr) ::unlink(path);
  ::_exit(128 + signal);
}

}  // namespace

void handle_interrupts() {
  struct sigaction action {};
  action.sa_handler = end_at_once;
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before {};
    // nohup and shells' background jobs ignore some of them, which stays.
    if (::sigaction(signal, nullptr, &before) == 0 && before.sa_handler != SIG_IGN)
      ::sigaction(signal, &action, nullptr);
  }
  // A file that may not grow further is an error of write, like a full disk.
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGXFSZ, &action, nullptr);
}

void remove_on_interrupt(const std::string& path) {
  static std::unique_ptr<char[]> text;
  g_path = nullptr;
  if (path.empty()) return;
  text = std::make_unique<char[]>(path.size() + 1);
  std::memcpy(text.get(), path.c_str(), path.size() + 1);
  g_path = text.get();
}

}  // namespace openmsa::cli
