// How loops of CPU backends are spread over threads.
#include "cpp/cpu_threads.h"

#include <dlfcn.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <set>
#include <stdexcept>
#include <thread>

#include "api/error.h"
#include "host/parallel.h"

namespace openmsa::testing {
namespace {

using host::parallel_for;

// The threads that took an item of a loop in which every thread waits for `wanted` of them, up to a second.
size_t threads_of_loop(int wanted) {
  std::set<std::thread::id> ids;
  std::atomic<int> arrived{0};
  parallel_for(wanted + 3, [&](int64_t) {
#pragma omp critical(openmsa_test_threads)
    ids.insert(std::this_thread::get_id());
    ++arrived;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (arrived < wanted && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  });
  return ids.size();
}

TEST(Threads, UsesThoseThatOpenMpGives) {
  for (int threads : {1, 2, 5}) {
    const ThreadCount count(threads);
    EXPECT_EQ(threads_of_loop(threads), static_cast<size_t>(threads));
  }
}

TEST(Threads, SettingHoldsForTheCallingThreadOnly) {
  const ThreadCount count(3);
  EXPECT_EQ(num_threads(), 0);
  set_num_threads(1);
  EXPECT_EQ(openmsa_num_threads(), 1);
  EXPECT_EQ(host::usable_threads(), 1);
  set_num_threads(2);
  EXPECT_EQ(host::usable_threads(), 2);
  // omp_set_num_threads above was this thread's too.
  std::thread([] {
    EXPECT_EQ(num_threads(), 0);
    EXPECT_EQ(host::usable_threads(), omp_get_max_threads());
  }).join();
  set_num_threads(1024);
  EXPECT_LE(host::usable_threads(), std::max(3, omp_get_num_procs()));
  for (int wrong : {-1, 1025}) {
    EXPECT_EQ(openmsa_set_num_threads(wrong), OPENMSA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(openmsa_last_error()).rfind(join("num_threads: got ", wrong), 0), 0U);
  }
  EXPECT_EQ(num_threads(), 1024);
  set_num_threads(0);
  EXPECT_EQ(host::usable_threads(), 3);
}

TEST(Threads, OneInsideAParallelRegion) {
  const ThreadCount count(2);
  std::atomic<int> most{0}, regions{0};
#pragma omp parallel num_threads(2)
  {
    ++regions;
    const auto own = std::this_thread::get_id();
    parallel_for(4, [&](int64_t) { EXPECT_EQ(std::this_thread::get_id(), own); });
    if (host::usable_threads() > most) most = host::usable_threads();
  }
  ASSERT_EQ(regions, 2);
  EXPECT_EQ(most, 1);
  EXPECT_EQ(host::usable_threads(), 2);
}

// Frameworks bring copies of the OpenMP runtime, which know nothing of each other.
TEST(Threads, OneInsideAParallelRegionOfAnotherRuntime) {
  Dl_info own{};
  ASSERT_NE(dladdr(dlsym(RTLD_DEFAULT, "omp_get_max_threads"), &own), 0);
  const std::filesystem::path runtime = std::filesystem::canonical(own.dli_fname);
  if (runtime.filename().string().rfind("libgomp", 0) != 0)
    GTEST_SKIP() << runtime << " allows no second copy of itself";
  const std::filesystem::path copy = std::filesystem::path(::testing::TempDir()) / join("libgomp-", getpid(), ".so.1");
  std::filesystem::copy_file(runtime, copy, std::filesystem::copy_options::overwrite_existing);
  void* library = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
  std::filesystem::remove(copy);
  ASSERT_NE(library, nullptr) << dlerror();
  using Parallel = void(void (*)(void*), void*, unsigned, unsigned);
  auto* parallel = reinterpret_cast<Parallel*>(dlsym(library, "GOMP_parallel"));
  ASSERT_NE(parallel, nullptr);
  const ThreadCount count(2);
  ASSERT_EQ(host::usable_threads(), 2);
  struct Seen {
    std::atomic<int> calls{0}, most{0};
  } seen;
  parallel(
      [](void* data) {
        auto* in_region = static_cast<Seen*>(data);
        ++in_region->calls;
        EXPECT_EQ(omp_in_parallel(), 0) << "it is the same runtime";
        if (host::usable_threads() > in_region->most) in_region->most = host::usable_threads();
      },
      &seen, 2, 0);
  EXPECT_EQ(seen.calls, 2);
  EXPECT_EQ(seen.most, 1);
  EXPECT_EQ(host::usable_threads(), 2);
}

struct Counted {
  static inline std::atomic<int> made{0};
  Counted() { ++made; }
  int64_t items = 0;
};

TEST(Threads, EachItemOnceWithOneScratchAThread) {
  const ThreadCount count(3);
  Counted::made = 0;
  std::vector<std::atomic<int>> seen(1000);
  parallel_for<Counted>(1000, [&](int64_t item, Counted& scratch) {
    ++scratch.items;
    ++seen[static_cast<size_t>(item)];
  });
  for (const auto& times : seen) EXPECT_EQ(times, 1);
  EXPECT_GE(Counted::made, 1);
  EXPECT_LE(Counted::made, 3);
  parallel_for<Counted>(0, [&](int64_t, Counted&) { ADD_FAILURE() << "no item to run"; });
  EXPECT_LE(Counted::made, 3);
}

TEST(Threads, ExceptionsComeOut) {
  for (int threads : {1, 3}) {
    const ThreadCount count(threads);
    std::atomic<int64_t> ran{0};
    EXPECT_THROW(parallel_for(100000,
                              [&](int64_t item) {
                                ++ran;
                                if (item == 5) throw std::out_of_range("item 5");
                              }),
                 std::out_of_range);
    EXPECT_LT(ran, 100000) << "goes on after a failure";
  }
}

// Memory for scratch runs out like any other.
struct Failing {
  Failing() { throw std::bad_alloc(); }
};
TEST(Threads, AScratchThatFailsIsAnException) {
  for (int threads : {1, 3}) {
    const ThreadCount count(threads);
    EXPECT_THROW(parallel_for<Failing>(10, [](int64_t, Failing&) {}), std::bad_alloc);
  }
}

TEST(Threads, TheHelperSeesBitsThatDiffer) {
  EXPECT_NONFATAL_FAILURE(
      expect_same_bits_on_any_threads([] { return bits_of(std::vector<int>{omp_get_max_threads() == 3}); }),
      "3 threads");
}

}  // namespace
}  // namespace openmsa::testing
