#include "host/threads.h"

#include <dlfcn.h>
#include <link.h>
#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "openmsa/openmsa.hpp"

namespace openmsa::host {
namespace {

// A fork copies no threads but leaves the OpenMP runtime believing in them: GNU's waits for them forever. Others in the
// process may have run parallel loops on the same runtime, so no child can know that it is safe.
std::atomic<bool> g_forked{false};
[[maybe_unused]] const int g_fork_is_watched =
    pthread_atfork(nullptr, nullptr, [] { g_forked.store(true, std::memory_order_relaxed); });

// The OpenMP runtimes of the process. Packages bring their own copies under other names, and each knows only its own
// parallel regions. The list follows the loader's count of loaded objects; a runtime on it stays loaded.
class Runtimes {
 public:
  bool any_in_parallel() {
    const std::scoped_lock lock(mutex_);
    unsigned long long loaded = 0;  // NOLINT(google-runtime-int): the loader's type
    dl_iterate_phdr(
        [](dl_phdr_info* object, size_t, void* count) {
          *static_cast<unsigned long long*>(count) = object->dlpi_adds;  // NOLINT(google-runtime-int)
          return 1;
        },
        &loaded);
    if (loaded != seen_) {
      seen_ = loaded;
      find();
    }
    return std::any_of(in_parallel_.begin(), in_parallel_.end(), [](InParallel* ask) { return ask() != 0; });
  }

 private:
  using InParallel = int();

  void find() {
    std::vector<std::string> paths;
    dl_iterate_phdr(
        [](dl_phdr_info* object, size_t, void* found) {
          const char* slash = std::strrchr(object->dlpi_name, '/');
          const std::string name = slash != nullptr ? slash + 1 : object->dlpi_name;
          for (const char* start : {"libgomp", "libomp", "libiomp5"}) {
            if (name.rfind(start, 0) != 0) continue;
            static_cast<std::vector<std::string>*>(found)->emplace_back(object->dlpi_name);
            break;
          }
          return 0;
        },
        &paths);
    for (const std::string& path : paths) {
      void* runtime = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);  // never closed
      if (runtime == nullptr) continue;
      auto* ask = reinterpret_cast<InParallel*>(dlsym(runtime, "omp_in_parallel"));
      if (ask != nullptr && std::find(in_parallel_.begin(), in_parallel_.end(), ask) == in_parallel_.end()) {
        in_parallel_.push_back(ask);
      }
    }
  }

  std::mutex mutex_;
  unsigned long long seen_ = 0;  // NOLINT(google-runtime-int)
  std::vector<InParallel*> in_parallel_;
};

}  // namespace

int usable_threads() {
  if (g_forked.load(std::memory_order_relaxed) || omp_in_parallel() != 0) return 1;
  const int wanted = num_threads(), openmp = omp_get_max_threads();
  // More threads than processors help nobody; only OpenMP's own setting may ask for them.
  const int threads = wanted == 0        ? openmp
                      : wanted <= openmp ? wanted
                                         : std::min(wanted, std::max(openmp, omp_get_num_procs()));
  if (threads <= 1) return 1;
  static Runtimes s_runtimes;
  return s_runtimes.any_in_parallel() ? 1 : threads;
}

}  // namespace openmsa::host
