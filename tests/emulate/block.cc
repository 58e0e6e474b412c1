#include "emulate/block.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>

#include "api/error.h"

constinit thread_local uint3 threadIdx{}, blockIdx{};
constinit thread_local dim3 blockDim{}, gridDim{};

namespace openmsa::emulate {
namespace {

// Of the scheduler's own stack.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string thread_ranges(const std::vector<int>& numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    if (!text.empty()) text += ", ";
    text += std::to_string(numbers[i]);
    if (end - i > 1) text.append("-").append(std::to_string(numbers[end - 1]));
    i = end;
  }
  return text;
}

}  // namespace

Block& Block::current() {
  static thread_local Block block;
  return block;
}

std::string Block::run(const Launch& launch, dim3 index) {
  const int count = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  launch_ = launch;
  random_.seed(static_cast<unsigned>(launch.seed + index.x * 2654435761u + index.y * 40503u + index.z * 97u));
  // Some thread blocks have copies that land as late as can be, some fast ones.
  constexpr double kLanding[] = {0, 0.002, 0.05, 0.5};
  landing_ = launch.seed == 0 ? 0 : kLanding[random_() % 4];

  shared.begin(launch.shared_bytes);
  stacks_.reserve(count);
  threads_.clear();
  meetings_.clear();
  meetings_.resize(static_cast<std::size_t>((count + kWarpThreads - 1) / kWarpThreads));
  products.clear();
  products.resize(static_cast<std::size_t>((count + kWarpgroupThreads - 1) / kWarpgroupThreads));
  for (NamedBarrier& barrier : named_) barrier = {};
  barriers_.clear();
  transfers_.clear();
  store_groups.clear();
  copy_waiting.clear();
  register_waiting_.clear();
  const int64_t each = std::min<int64_t>(kRegisters / count / 8 * 8, 255);
  limits_.assign(meetings_.size(), static_cast<int>(each));
  free_registers_ = kRegisters - each * count;
  ready_.clear();
  next_ = 0;
  fault_.clear();
  unfinished_ = count;
  ::blockIdx = {index.x, index.y, index.z};
  ::blockDim = launch.block;
  ::gridDim = launch.grid;
  for (int i = 0; i < count; ++i) {
    Thread& thread = threads_.emplace_back();
    thread.number = i;
    stacks_.prepare(thread.fiber, i, launch.kernel, launch.argument, launch.argument_bytes, &Block::finish_thread);
    ready_.push_back(&thread);
  }

  try {
    while (unfinished_ > 0 && fault_.empty()) {
      if (!transfers_.empty() && (next_ == ready_.size() || land_now_ || at_random(landing_))) {
        land_now_ = false;
        land_one();
        continue;
      }
      if (next_ == ready_.size()) return deadlock();
      if (launch_.seed != 0) std::swap(ready_[next_], ready_[next_ + random_() % (ready_.size() - next_)]);
      Thread& thread = *ready_[next_++];
      if (next_ == ready_.size() || next_ >= 2 * kMostThreads) {
        ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(next_));
        next_ = 0;
      }
      run_thread(thread);
    }
    if (fault_.empty()) check_finished();
  } catch (const Fault& error) {
    return error.what();
  }
  return fault_;
}

void Block::run_thread(Thread& thread) {
  const auto number = static_cast<unsigned>(thread.number);
  const dim3& block = launch_.block;
  ::threadIdx = {number % block.x, number / block.x % block.y, number / block.x / block.y};
  running_ = &thread;
  switch_fiber(scheduler_, thread.fiber);
  running_ = nullptr;
}

void Block::finish_thread() {
  Block& block = current();
  Thread& thread = block.thread();
  if (!thread.copies.empty()) block.fault("a thread ends with copies under way that it never waited for (cp.async)");
  if (!thread.products.groups.empty() || thread.products.committed != thread.products.issued) {
    block.fault("a thread ends with matrix products that it never waited for");
  }
  if (!thread.stores.empty() || thread.open_stores != 0)
    block.fault("a thread ends with bulk stores that it never waited for");
  thread.finished = true;
  --block.unfinished_;
  // __syncthreads does not wait for threads that are gone.
  NamedBarrier& all = block.named_[0];
  if (all.expected > 0) {
    --all.expected;
    block.open_named_if_full(all);
  }
  switch_fiber(thread.fiber, block.scheduler_, true);
  __builtin_unreachable();
}

void Block::check_finished() {
  if (!transfers_.empty()) throw Fault("a thread block ends while a copy is under way: " + transfers_.front().what);
  if (const std::string fault = shared.check_end(); !fault.empty()) throw Fault(fault);
}

void Block::fault(const std::string& what) {
  if (running_ == nullptr) throw Fault(what);
  fault_ = join(what, " (thread ", running_->number, " of thread block ", ::blockIdx.x, ", ", ::blockIdx.y, ")");
  switch_fiber(running_->fiber, scheduler_, true);
  __builtin_unreachable();
}

void Block::wait(Waiting& waiting, const char* what, const void* on) {
  Thread& thread = *running_;
  waiting.push_back(&thread);
  thread.waits_for = what;
  thread.waits_on = on;
  switch_fiber(thread.fiber, scheduler_);
}

void Block::wake(Waiting& waiting) {
  for (Thread* const thread : waiting) {
    thread->waits_for = nullptr;
    ready_.push_back(thread);
  }
  waiting.clear();
}

void Block::give_way() {
  Thread& thread = *running_;
  land_now_ = next_ == ready_.size();  // whoever polls waits for something, and nothing else is left to run
  ready_.push_back(&thread);
  switch_fiber(thread.fiber, scheduler_);
}

void Block::maybe_give_way() {
  if (at_random(0.1)) give_way();
}

bool Block::at_random(double probability) {
  return launch_.seed != 0 && probability > 0 && static_cast<double>(random_()) < probability * random_.max();
}

void Block::land_one() {
  const std::size_t which = launch_.seed != 0 ? random_() % transfers_.size() : 0;
  const Transfer transfer = std::move(transfers_[which]);
  transfers_.erase(transfers_.begin() + static_cast<std::ptrdiff_t>(which));
  transfer.land();
}

std::string Block::deadlock() const {
  std::map<std::pair<std::string, const void*>, std::vector<int>> waiting;
  for (const Thread& thread : threads_) {
    if (!thread.finished) waiting[{thread.waits_for, thread.waits_on}].push_back(thread.number);
  }
  std::string text = join("deadlock in thread block ", ::blockIdx.x, ", ", ::blockIdx.y);
  for (const auto& [what, numbers] : waiting) {
    const auto& [name, on] = what;
    text += join("\n  threads ", thread_ranges(numbers), " wait for ", name);
    const auto barrier = barriers_.find(static_cast<const uint64_t*>(on));
    if (barrier != barriers_.end()) {
      const MemoryBarrier& b = barrier->second;
      text += join(SharedMemory::contains(on) ? join(" at shared address ", SharedMemory::address(on)) : "", ": phase ",
                   b.phase, ", ", b.missing, " of ", b.arrivals, " arrivals and ", b.bytes, " bytes are missing");
    }
    const auto* const named = static_cast<const NamedBarrier*>(on);
    if (named >= named_ && named < std::end(named_)) {
      text += join(" ", named - named_, ": ", named->arrived, " of ", named->expected, " threads have arrived");
    }
  }
  return text;
}

}  // namespace openmsa::emulate
