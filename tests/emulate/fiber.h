// Stacks that take turns on one operating system thread: one for each CUDA thread of a thread block.
#pragma once

#include <cstddef>

namespace openmsa::emulate {

// A stack and where it stands. A switch takes a few nanoseconds: no signal masks, no system calls.
struct Fiber {
  void* pointer = nullptr;  // saved stack pointer while it does not run
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  void* sanitizer = nullptr;  // AddressSanitizer's shadow of the stack
};

// Memory for stacks, a page that faults below each.
class FiberStacks {
 public:
  FiberStacks() = default;
  FiberStacks(const FiberStacks&) = delete;
  FiberStacks& operator=(const FiberStacks&) = delete;
  ~FiberStacks();

  void reserve(int count);  // the stacks move: no fiber may be in use
  // Puts `fiber` before the first instruction of `entry`, a function that takes one trivially copyable structure by
  // value. Its `argument_bytes` bytes, which may run past its end, are read here. When entry returns, `finish` runs on
  // the same stack; it must not return.
  void prepare(Fiber& fiber, int number, const void* entry, const void* argument, std::size_t argument_bytes,
               void (*finish)());

 private:
  unsigned char* memory_ = nullptr;
  int count_ = 0;
};

// Runs `to` from where it stands; returns when another switch leads back to `from`. `ends` is true when `from` never
// runs again.
void switch_fiber(Fiber& from, Fiber& to, bool ends = false);

}  // namespace openmsa::emulate
