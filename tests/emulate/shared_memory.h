// The dynamic shared memory of the thread block that runs on this operating system thread, and which of it copies and
// products are using.
#pragma once

#include <cstdint>
#include <vector>

namespace openmsa::emulate {

inline constexpr int64_t kMostSharedBytes = 227 * 1024;
inline constexpr int64_t kSharedStart = 1024;   // its shared address: what the system keeps for itself comes before
inline constexpr unsigned char kPoison = 0xff;  // NaN of every float type

class SharedMemory {
 public:
  // Fills it: poison, and behind `bytes` a pattern that check_end finds changed. Nothing is in use.
  void begin(int64_t bytes);
  // What a kernel did wrong, or "".
  const char* check_end() const;

  // 32-bit addresses as instructions take them. Static shared memory has none.
  static bool contains(const void* pointer, int64_t bytes = 1);
  static uint32_t address(const void* pointer);
  static unsigned char* at(uint32_t address);

  // Marks of 16-byte pieces. Static shared memory has no marks.
  void begin_write(const void* to, int64_t bytes) { mark(to, bytes, 1, &Piece::writes); }
  void end_write(const void* to, int64_t bytes) { mark(to, bytes, -1, &Piece::writes); }
  void begin_read(uint32_t from) { ++pieces_[from / kPiece].reads; }
  void end_read(uint32_t from) { --pieces_[from / kPiece].reads; }
  void begin_read(const void* from, int64_t bytes) { mark(from, bytes, 1, &Piece::reads); }
  void end_read(const void* from, int64_t bytes) { mark(from, bytes, -1, &Piece::reads); }
  bool is_written(uint32_t address) const { return pieces_[address / kPiece].writes != 0; }
  bool is_written(const void* from, int64_t bytes) const { return any(from, bytes, &Piece::writes); }
  bool is_read(const void* from, int64_t bytes) const { return any(from, bytes, &Piece::reads); }

 private:
  static constexpr int kPiece = 16;
  struct Piece {
    uint16_t writes = 0, reads = 0;
  };
  void mark(const void* at, int64_t bytes, int change, uint16_t Piece::*which);
  bool any(const void* at, int64_t bytes, uint16_t Piece::*which) const;

  int64_t bytes_ = 0;
  std::vector<Piece> pieces_;
};

}  // namespace openmsa::emulate
