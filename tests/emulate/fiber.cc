#include "emulate/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>

#ifdef __SANITIZE_ADDRESS__
#define OPENMSA_EMULATE_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define OPENMSA_EMULATE_ASAN
#endif
#endif
#ifdef OPENMSA_EMULATE_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// The calling convention passes a structure of more than 16 bytes as a copy above the return address. So a kernel can
// be entered without knowing the type of its argument, which a launch does not tell.
#ifndef __x86_64__
#error "kernels are entered by the x86-64 System V calling convention"
#endif

extern "C" {
void openmsa_emulate_switch(void** from, void* to);
void openmsa_emulate_enter();
void openmsa_emulate_leave();
void openmsa_emulate_entered();
}

// openmsa_emulate_switch saves the registers that a call preserves. A new stack starts at openmsa_emulate_enter with
// the kernel in rbx and the function that ends the fiber in r12; rsp points to the kernel's return address. Structures
// of up to 16 bytes travel in rdi and rsi.
asm(R"(
.text
.type openmsa_emulate_switch, @function
openmsa_emulate_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.type openmsa_emulate_enter, @function
openmsa_emulate_enter:
  subq $8, %rsp
  call openmsa_emulate_entered
  addq $8, %rsp
  movq 8(%rsp), %rdi
  movq 16(%rsp), %rsi
  jmp *%rbx
.type openmsa_emulate_leave, @function
openmsa_emulate_leave:
  call *%r12
  ud2
)");

namespace openmsa::emulate {
namespace {

constexpr std::size_t kPage = 4096;
#ifdef OPENMSA_EMULATE_ASAN
constexpr std::size_t kStack = 256 * 1024;
#else
constexpr std::size_t kStack = 64 * 1024;
#endif
constexpr std::size_t kStride = kStack + kPage;

// Who gave way to the fiber that runs now.
thread_local Fiber* previous = nullptr;

void finish_switch([[maybe_unused]] void* sanitizer) {
#ifdef OPENMSA_EMULATE_ASAN
  __sanitizer_finish_switch_fiber(sanitizer, &previous->bottom, &previous->bytes);
#endif
}

}  // namespace

FiberStacks::~FiberStacks() {
  if (memory_ != nullptr) munmap(memory_, static_cast<std::size_t>(count_) * kStride);
}

void FiberStacks::reserve(int count) {
  if (count <= count_) return;
  if (memory_ != nullptr) munmap(memory_, static_cast<std::size_t>(count_) * kStride);
  const std::size_t bytes = static_cast<std::size_t>(count) * kStride;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<unsigned char*>(memory);
  count_ = count;
  for (int i = 0; i < count; ++i) mprotect(memory_ + static_cast<std::size_t>(i) * kStride, kPage, PROT_NONE);
}

#if defined(__GNUC__)
__attribute__((no_sanitize_address))
#endif
void FiberStacks::prepare(Fiber& fiber, int number, const void* entry, const void* argument,
                          std::size_t argument_bytes, void (*finish)()) {
  constexpr std::size_t kMostAlignment = 128;  // of an argument
  unsigned char* const bottom = memory_ + static_cast<std::size_t>(number) * kStride + kPage;
#ifdef OPENMSA_EMULATE_ASAN
  __asan_unpoison_memory_region(bottom, kStack);  // what an abandoned fiber left
#endif
  unsigned char* const top = bottom + kStack;
  auto* const copy = top - (argument_bytes + kMostAlignment - 1) / kMostAlignment * kMostAlignment;
  const auto* const from = static_cast<const unsigned char*>(argument);
  for (std::size_t i = 0; i < argument_bytes; i += 8) {
    uint64_t word = 0;
    __builtin_memcpy(&word, from + i, 8);
    __builtin_memcpy(copy + i, &word, 8);
  }
  const void* const words[] = {nullptr,
                               nullptr,
                               nullptr,
                               reinterpret_cast<const void*>(finish),
                               entry,
                               nullptr,
                               reinterpret_cast<const void*>(&openmsa_emulate_enter),
                               reinterpret_cast<const void*>(&openmsa_emulate_leave)};
  unsigned char* const start = copy - sizeof(words);
  __builtin_memcpy(start, words, sizeof(words));
  fiber = {start, bottom, kStack, nullptr};
}

void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool ends) {
  previous = &from;
#ifdef OPENMSA_EMULATE_ASAN
  __sanitizer_start_switch_fiber(ends ? nullptr : &from.sanitizer, to.bottom, to.bytes);
#endif
  openmsa_emulate_switch(&from.pointer, to.pointer);
  finish_switch(from.sanitizer);
}

}  // namespace openmsa::emulate

void openmsa_emulate_entered() { openmsa::emulate::finish_switch(nullptr); }
