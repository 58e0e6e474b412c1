#include "emulate/shared_memory.h"

#include <algorithm>
#include <cstring>

#include "emulate/block.h"

namespace openmsa::emulate {
namespace {

constexpr unsigned char kGuard = 0xa5;
constexpr int64_t kRoom = kMostSharedBytes + 1024;

}  // namespace

// Kernels declare `extern __shared__ unsigned char shared_bytes[]`, each namespace its own: all are this memory.
extern "C" {
alignas(1024) constinit thread_local unsigned char openmsa_emulate_shared[kRoom] = {};
}

}  // namespace openmsa::emulate

#define OPENMSA_EMULATE_SHARED(space)                                                                \
  namespace space {                                                                                  \
  extern thread_local unsigned char shared_bytes[] __attribute__((alias("openmsa_emulate_shared"))); \
  }
OPENMSA_EMULATE_SHARED(openmsa::cuda::sm90)
OPENMSA_EMULATE_SHARED(openmsa::cuda::sm90::attend)
OPENMSA_EMULATE_SHARED(openmsa::cuda::sm90::captured_mass)
OPENMSA_EMULATE_SHARED(openmsa::cuda::sm90::lse)

namespace openmsa::emulate {

void SharedMemory::begin(int64_t bytes) {
  bytes_ = bytes;
  std::memset(openmsa_emulate_shared, kPoison, static_cast<std::size_t>(bytes));
  std::memset(openmsa_emulate_shared + bytes, kGuard, static_cast<std::size_t>(kRoom - bytes));
  pieces_.assign(static_cast<std::size_t>((kSharedStart + kRoom) / kPiece), {});
}

const char* SharedMemory::check_end() const {
  const auto is_guard = [](unsigned char byte) { return byte == kGuard; };
  if (!std::all_of(openmsa_emulate_shared + bytes_, openmsa_emulate_shared + kRoom, is_guard)) {
    return "memory behind the dynamic shared memory of the launch was written";
  }
  return "";
}

bool SharedMemory::contains(const void* pointer, int64_t bytes) {
  const auto* const from = static_cast<const unsigned char*>(pointer);
  return from >= openmsa_emulate_shared && from + bytes <= openmsa_emulate_shared + kRoom;
}

uint32_t SharedMemory::address(const void* pointer) {
  if (!contains(pointer)) Block::current().fault("a shared address of memory that is not dynamic shared memory");
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - openmsa_emulate_shared + kSharedStart);
}

unsigned char* SharedMemory::at(uint32_t address) {
  if (address < kSharedStart || address >= kSharedStart + kRoom) {
    Block::current().fault("shared address " + std::to_string(address) + " lies outside dynamic shared memory");
  }
  return openmsa_emulate_shared + (address - kSharedStart);
}

void SharedMemory::mark(const void* at, int64_t bytes, int change, uint16_t Piece::*which) {
  if (!contains(at, bytes)) return;
  const uint32_t first = address(at);
  for (uint32_t piece = first / kPiece; piece <= (first + bytes - 1) / kPiece; ++piece) {
    pieces_[piece].*which = static_cast<uint16_t>(pieces_[piece].*which + change);
  }
}

bool SharedMemory::any(const void* at, int64_t bytes, uint16_t Piece::*which) const {
  if (!contains(at, bytes)) return false;
  const uint32_t first = address(at);
  for (uint32_t piece = first / kPiece; piece <= (first + bytes - 1) / kPiece; ++piece) {
    if (pieces_[piece].*which != 0) return true;
  }
  return false;
}

}  // namespace openmsa::emulate
