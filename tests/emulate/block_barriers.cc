// Barriers: bar, mbarrier, and the register pool.
#include <string>
#include <utility>

#include "emulate/block.h"

namespace openmsa::emulate {
namespace {

// What an initialised barrier's memory holds: a copy or a store that hits it shows.
uint64_t seal(const uint64_t* at) { return reinterpret_cast<uintptr_t>(at) ^ 0x6d62617272696572u; }

}  // namespace

int Block::arrive_named(int id, int count, bool wait_there, const char* instruction, bool vote) {
  maybe_give_way();
  const auto problem = [&](const std::string& what) {
    fault(std::string(instruction) + " " + std::to_string(id) + ": " + what);
  };
  if (id < 0 || id >= kNamedBarriers) problem("barriers are 0 to 15");
  NamedBarrier& barrier = named_[id];
  if (id == 0 && count == 0) {
    count = unfinished_;
  } else if (count <= 0 || count % kWarpThreads != 0 || count > threads()) {
    problem(std::to_string(count) + " threads are no whole warps of the thread block");
  }
  if (barrier.expected == 0) barrier.expected = count;
  if (barrier.expected != count) {
    problem("expects " + std::to_string(count) + " threads, others there " + std::to_string(barrier.expected));
  }
  const auto number = static_cast<std::size_t>(thread().number);
  if (barrier.who[number]) problem("a thread arrives twice before the others have come");
  barrier.who[number] = true;
  ++barrier.arrived;
  barrier.votes += vote ? 1 : 0;
  if (!open_named_if_full(barrier) && wait_there) wait(barrier.waiting, "barrier", &barrier);
  return barrier.last_votes;
}

bool Block::open_named_if_full(NamedBarrier& barrier) {
  if (barrier.arrived == 0 || barrier.arrived != barrier.expected) return false;
  barrier.expected = barrier.arrived = 0;
  barrier.who.reset();
  barrier.last_votes = std::exchange(barrier.votes, 0);
  wake(barrier.waiting);
  return true;
}

void Block::init_memory_barrier(uint64_t* at, int arrivals) {
  if (arrivals <= 0 || arrivals >= 1 << 20) fault("mbarrier.init: " + std::to_string(arrivals) + " arrivals");
  MemoryBarrier& barrier = barriers_[at];
  if (!barrier.waiting.empty()) fault("mbarrier.init: threads wait at this barrier");
  barrier = {static_cast<uint32_t>(arrivals), static_cast<uint32_t>(arrivals), 0, 0, {}};
  *at = seal(at);
}

MemoryBarrier& Block::memory_barrier(const uint64_t* at, const char* instruction) {
  const auto found = barriers_.find(at);
  if (found == barriers_.end()) fault(std::string(instruction) + ": the barrier was not initialised");
  if (*at != seal(at)) fault(std::string(instruction) + ": something was written over the barrier");
  return found->second;
}

void Block::close_phase_if_done(MemoryBarrier& barrier) {
  if (barrier.missing != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.missing = barrier.arrivals;
  wake(barrier.waiting);
}

void Block::arrive(uint64_t* at, uint32_t count, const char* instruction) {
  MemoryBarrier& barrier = memory_barrier(at, instruction);
  if (barrier.missing < count) {
    fault(std::string(instruction) + ": the phase has had its " + std::to_string(barrier.arrivals) + " arrivals");
  }
  barrier.missing -= count;
  close_phase_if_done(barrier);
}

void Block::expect_bytes(uint64_t* at, int64_t bytes, const char* instruction) {
  MemoryBarrier& barrier = memory_barrier(at, instruction);
  barrier.bytes += bytes;
  if (barrier.bytes >= 1 << 20) fault(std::string(instruction) + ": a phase counts fewer than 2^20 bytes");
}

void Block::complete_bytes(uint64_t* at, int64_t bytes) {
  MemoryBarrier& barrier = memory_barrier(at, "the end of a bulk copy");
  barrier.bytes -= bytes;
  close_phase_if_done(barrier);
}

void Block::wait_phase(uint64_t* at, uint32_t parity) {
  maybe_give_way();
  // Like the instruction, it knows the parity alone: whoever comes a phase late waits for the one after.
  while ((memory_barrier(at, "mbarrier.try_wait").phase & 1) == (parity & 1)) {
    wait(memory_barrier(at, "mbarrier.try_wait").waiting,
         (parity & 1) != 0 ? "mbarrier, parity 1" : "mbarrier, parity 0", at);
  }
}

void Block::set_register_limit(int count, bool raise) {
  const char* const name = raise ? "setmaxnreg.inc" : "setmaxnreg.dec";
  if (count < 24 || count > 256 || count % 8 != 0) fault(std::string(name) + ": " + std::to_string(count));
  meet(~0u, static_cast<uint64_t>(count), name);
  if (thread().lane() != 0) {
    meet(~0u, 0, "setmaxnreg");  // until the pool has given
    return;
  }
  int& limit = limits_[static_cast<std::size_t>(thread().warp())];
  if (raise ? count < limit : count > limit) {
    fault(std::string(name) + " " + std::to_string(count) + ": the limit is " + std::to_string(limit));
  }
  while (free_registers_ < int64_t{count - limit} * kWarpThreads) wait(register_waiting_, name, nullptr);
  free_registers_ -= int64_t{count - limit} * kWarpThreads;
  limit = count;
  wake(register_waiting_);
  meet(~0u, 0, "setmaxnreg");
}

}  // namespace openmsa::emulate
