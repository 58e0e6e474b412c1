// A thread block while it runs: its threads, who waits for what, and what is under way besides them. One thread block
// runs at a time on an operating system thread, its threads as fibers, so nothing here is atomic.
#pragma once

#include <bitset>
#include <cstdint>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda_runtime.h"
#include "emulate/fiber.h"
#include "emulate/products.h"
#include "emulate/shared_memory.h"

namespace openmsa::emulate {

inline constexpr int kWarpThreads = 32;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kMostThreads = 1024;
inline constexpr int kNamedBarriers = 16;
inline constexpr int64_t kRegisters = 65536;

// A copy that a thread issued by itself (cp.async). `from` is null for zeros.
struct PieceCopy {
  void* to;
  const void* from;
  uint32_t bytes;
};

struct Thread {
  int number = 0;
  Fiber fiber;
  bool finished = false;
  // What it waits for, or null.
  const char* waits_for = nullptr;
  const void* waits_on = nullptr;
  std::vector<PieceCopy> copies;  // not yet waited for, nor handed to a barrier
  int copies_handed_on = 0;       // transfers under way that hold others
  uint64_t open_stores = 0;       // group of the bulk stores since the last commit; 0: none
  std::deque<uint64_t> stores;    // groups that it has not waited for
  ProductThread products;

  int warp() const { return number / kWarpThreads; }
  int lane() const { return number % kWarpThreads; }
  int warpgroup() const { return number / kWarpgroupThreads; }
};

using Waiting = std::vector<Thread*>;

// Lanes of one mask meet: each brings a value, all get all values.
struct Meeting {
  uint32_t mask = 0, arrived = 0;
  const char* instruction = nullptr;
  uint64_t generation = 0;
  uint64_t values[2][kWarpThreads] = {};  // of this generation and the one before, which some lane may still read
  Waiting waiting;
};

struct NamedBarrier {
  int expected = 0;  // threads; 0 before the first arrives
  int arrived = 0;
  std::bitset<kMostThreads> who;
  int votes = 0;       // of those that have arrived
  int last_votes = 0;  // when it opened last
  Waiting waiting;
};

struct MemoryBarrier {
  uint32_t arrivals = 0;  // of each phase
  uint32_t missing = 0;   // of this phase
  int64_t bytes = 0;      // of copies that this phase waits for
  uint64_t phase = 0;
  Waiting waiting;
};

// A copy that runs beside the threads.
struct Transfer {
  std::string what;
  std::function<void()> land;
};

struct Launch {
  const void* kernel = nullptr;
  const void* argument = nullptr;
  std::size_t argument_bytes = 0;
  dim3 grid, block;
  int64_t shared_bytes = 0;
  uint64_t seed = 0;  // 0: threads in order, copies as late as can be. Else both at random
};

class Block {
 public:
  // The thread block that runs on this operating system thread.
  static Block& current();

  // Runs thread block `index` of a launch. Returns what went wrong, or "".
  std::string run(const Launch& launch, dim3 index);

  Thread& thread() { return *running_; }
  int threads() const { return static_cast<int>(threads_.size()); }
  // Ends the launch.
  [[noreturn]] void fault(const std::string& what);

  // ---- For instructions ----
  void wait(Waiting& waiting, const char* what, const void* on);
  void wake(Waiting& waiting);
  // Lets others run first: always, or in a random schedule now and then.
  void give_way();
  void maybe_give_way();
  bool at_random(double probability);

  // block_warps.cc
  const uint64_t (&meet(uint32_t mask, uint64_t value, const char* instruction))[kWarpThreads];
  // block_barriers.cc
  // Returns how many threads voted, if it waits.
  int arrive_named(int id, int count, bool wait_there, const char* instruction, bool vote = false);
  bool open_named_if_full(NamedBarrier& barrier);
  MemoryBarrier& memory_barrier(const uint64_t* at, const char* instruction);
  void init_memory_barrier(uint64_t* at, int arrivals);
  void arrive(uint64_t* at, uint32_t count, const char* instruction);
  void expect_bytes(uint64_t* at, int64_t bytes, const char* instruction);
  void complete_bytes(uint64_t* at, int64_t bytes);
  void wait_phase(uint64_t* at, uint32_t parity);
  void set_register_limit(int count, bool raise);
  // Adds a transfer that lands later.
  void start(Transfer transfer) { transfers_.push_back(std::move(transfer)); }

  SharedMemory shared;
  std::deque<ProductQueue> products;  // by warpgroup
  // Groups of bulk stores: how many copies of each are under way.
  std::unordered_map<uint64_t, int> store_groups;
  uint64_t next_store_group = 1;
  Waiting copy_waiting;  // for bulk stores and copies of pieces

 private:
  static void finish_thread();
  void run_thread(Thread& thread);
  void land_one();
  void check_finished();
  std::string deadlock() const;
  void close_phase_if_done(MemoryBarrier& barrier);

  Launch launch_;
  FiberStacks stacks_;
  Fiber scheduler_;
  std::deque<Thread> threads_;
  std::vector<Thread*> ready_;  // from next_ on
  std::size_t next_ = 0;
  Thread* running_ = nullptr;
  int unfinished_ = 0;
  std::string fault_;
  std::minstd_rand random_;
  bool land_now_ = false;  // somebody polls
  double landing_ = 0;     // probability that a transfer lands before a thread runs

  std::deque<std::deque<Meeting>> meetings_;  // by warp; their addresses stay
  NamedBarrier named_[kNamedBarriers];
  std::unordered_map<const uint64_t*, MemoryBarrier> barriers_;
  std::deque<Transfer> transfers_;
  std::vector<int> limits_;  // registers per thread, by warp
  int64_t free_registers_ = 0;
  Waiting register_waiting_;
};

}  // namespace openmsa::emulate
