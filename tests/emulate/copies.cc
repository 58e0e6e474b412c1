#include "emulate/copies.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "emulate/block.h"
#include "emulate/tensor_map.h"

namespace openmsa::emulate {
namespace {

std::string place(const void* shared, int64_t bytes) {
  const std::string at = SharedMemory::contains(shared) ? std::to_string(SharedMemory::address(shared)) : "(static)";
  return std::to_string(bytes) + " bytes at shared address " + at;
}

// From here on `to` belongs to a copy.
void claim(void* to, int64_t bytes, const char* instruction) {
  Block& block = Block::current();
  if (block.shared.is_read(to, bytes)) {
    block.fault(std::string(instruction) + " to " + place(to, bytes) +
                ": a matrix product or bulk store that nobody waited for still reads there");
  }
  if (block.shared.is_written(to, bytes)) {
    block.fault(std::string(instruction) + " to " + place(to, bytes) + ": another copy is on its way there");
  }
  block.shared.begin_write(to, bytes);
  std::memset(to, kPoison, static_cast<std::size_t>(bytes));
}

// The 16-byte piece at a shared address, moved as the swizzle does: by bits of the address itself.
uint32_t swizzled(uint32_t address, uint8_t swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_128B:
      return address ^ (address >> 7 & 7) << 4;
    case CU_TENSOR_MAP_SWIZZLE_64B:
      return address ^ (address >> 7 & 3) << 4;
    case CU_TENSOR_MAP_SWIZZLE_32B:
      return address ^ (address >> 7 & 1) << 4;
    default:
      return address;
  }
}

// Calls visit(shared piece, global piece, bytes of it inside the tensor) for every 16 bytes of a box; the global piece
// is null where none is inside.
template <typename Visit>
void visit_box(const TensorMap& map, unsigned char* shared, const int32_t (&coordinates)[kMostMapAxes],
               const Visit& visit) {
  constexpr int64_t kPiece = 16;
  const int64_t row_bytes = map.row_bytes(), rows = map.box_bytes() / row_bytes;
  const uint32_t start = SharedMemory::address(shared);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t rest = row;
    bool inside = true;
    uint64_t global = map.base;
    for (int axis = 1; axis < map.rank; ++axis) {
      const int64_t at = coordinates[axis] + rest % map.box[axis];
      rest /= map.box[axis];
      inside = inside && at >= 0 && at < static_cast<int64_t>(map.lengths[axis]);
      global += static_cast<uint64_t>(at) * map.strides[axis - 1];
    }
    for (int64_t byte = 0; byte < row_bytes; byte += kPiece) {
      const int64_t first = int64_t{coordinates[0]} * map.element_bytes + byte;
      const int64_t left = static_cast<int64_t>(map.lengths[0]) * map.element_bytes - first;
      unsigned char* const to =
          SharedMemory::at(swizzled(start + static_cast<uint32_t>(row * row_bytes + byte), map.swizzle));
      if (!inside || left <= 0 || first <= -kPiece) {
        visit(to, static_cast<unsigned char*>(nullptr), int64_t{0}, int64_t{0});
        continue;
      }
      const int64_t skip = first < 0 ? -first : 0;
      visit(to, reinterpret_cast<unsigned char*>(global + static_cast<uint64_t>(first)), skip,
            left < kPiece ? left : kPiece);
    }
  }
}

struct Box {
  TensorMap map;
  int32_t coordinates[kMostMapAxes] = {};
};

Box check_box(const char* instruction, const CUtensorMap* map, const void* shared,
              std::span<const int32_t> coordinates) {
  Block& block = Block::current();
  Box box{read_tensor_map(map)};
  const std::string name(instruction);
  if (box.map.rank != coordinates.size()) {
    block.fault(name + ": " + std::to_string(coordinates.size()) + " coordinates in a tensor of rank " +
                std::to_string(box.map.rank));
  }
  std::copy(coordinates.begin(), coordinates.end(), box.coordinates);
  if (!SharedMemory::contains(shared, box.map.box_bytes())) {
    block.fault(name + ": the box does not lie in dynamic shared memory");
  }
  if (SharedMemory::address(shared) % 128 != 0) {
    block.fault(name + ": the shared address is no multiple of 128");
  }
  return box;
}

}  // namespace

void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, std::span<const int32_t> coordinates) {
  constexpr const char* kName = "cp.async.bulk.tensor to shared memory";
  Block& block = Block::current();
  block.maybe_give_way();
  const Box box = check_box(kName, map, shared, coordinates);
  const int64_t bytes = box.map.box_bytes();
  static_cast<void>(block.memory_barrier(barrier, kName));
  claim(shared, bytes, kName);
  auto* const to = static_cast<unsigned char*>(shared);
  block.start({std::string(kName) + ", " + place(shared, bytes), [=, &block] {
                 visit_box(box.map, to, box.coordinates,
                           [](unsigned char* piece, const unsigned char* global, int64_t skip, int64_t end) {
                             std::memset(piece, 0, 16);
                             if (global != nullptr) {
                               std::memcpy(piece + skip, global + skip, static_cast<std::size_t>(end - skip));
                             }
                           });
                 block.shared.end_write(to, bytes);
                 block.complete_bytes(barrier, bytes);
               }});
}

namespace {

void start_store(const char* name, const void* shared, int64_t bytes, std::function<void()> write) {
  Block& block = Block::current();
  if (block.shared.is_written(shared, bytes)) {
    block.fault(std::string(name) + " of " + place(shared, bytes) + ": a copy is on its way there");
  }
  block.shared.begin_read(shared, bytes);
  uint64_t& open = block.thread().open_stores;
  if (open == 0) open = block.next_store_group++;
  const uint64_t group = open;
  ++block.store_groups[group];
  block.start({std::string(name) + ", " + place(shared, bytes), [=, &block, write = std::move(write)] {
                 write();
                 block.shared.end_read(shared, bytes);
                 if (--block.store_groups[group] == 0) {
                   block.store_groups.erase(group);
                   block.wake(block.copy_waiting);
                 }
               }});
}

}  // namespace

void store_box(const CUtensorMap* map, const void* shared, std::span<const int32_t> coordinates) {
  constexpr const char* kName = "cp.async.bulk.tensor to global memory";
  Block::current().maybe_give_way();
  const Box box = check_box(kName, map, shared, coordinates);
  auto* const from = static_cast<unsigned char*>(const_cast<void*>(shared));
  start_store(kName, shared, box.map.box_bytes(), [=] {
    visit_box(box.map, from, box.coordinates,
              [](const unsigned char* piece, unsigned char* global, int64_t skip, int64_t end) {
                if (global != nullptr) std::memcpy(global + skip, piece + skip, static_cast<std::size_t>(end - skip));
              });
  });
}

void copy_bytes(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  constexpr const char* kName = "cp.async.bulk to shared memory";
  Block& block = Block::current();
  block.maybe_give_way();
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(shared) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    block.fault(std::string(kName) + ": an address or the size is no multiple of 16");
  }
  static_cast<void>(block.memory_barrier(barrier, kName));
  claim(shared, bytes, kName);
  block.start({std::string(kName) + ", " + place(shared, bytes), [=, &block] {
                 std::memcpy(shared, global, bytes);
                 block.shared.end_write(shared, bytes);
                 block.complete_bytes(barrier, bytes);
               }});
}

void store_bytes(void* global, const void* shared, uint32_t bytes) {
  constexpr const char* kName = "cp.async.bulk to global memory";
  Block& block = Block::current();
  block.maybe_give_way();
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(shared) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    block.fault(std::string(kName) + ": an address or the size is no multiple of 16");
  }
  start_store(kName, shared, bytes, [=] { std::memcpy(global, shared, bytes); });
}

void commit_stores() {
  Block& block = Block::current();
  Thread& thread = block.thread();
  thread.stores.push_back(thread.open_stores != 0 ? thread.open_stores : block.next_store_group++);
  thread.open_stores = 0;
}

void wait_stores(int pending) {
  Block& block = Block::current();
  block.maybe_give_way();
  Thread& thread = block.thread();
  while (static_cast<int>(thread.stores.size()) > pending) {
    while (block.store_groups.contains(thread.stores.front())) block.wait(block.copy_waiting, "bulk stores", nullptr);
    thread.stores.pop_front();
  }
}

void copy_piece(void* shared, const void* global, uint32_t bytes) {
  constexpr const char* kName = "cp.async";
  Block& block = Block::current();
  if (reinterpret_cast<uintptr_t>(shared) % bytes != 0 || reinterpret_cast<uintptr_t>(global) % bytes != 0) {
    block.fault(std::string(kName) + ": an address is no multiple of " + std::to_string(bytes));
  }
  claim(shared, bytes, kName);
  block.thread().copies.push_back({shared, global, bytes});
}

namespace {

void land_pieces(std::vector<PieceCopy>& copies) {
  for (const PieceCopy& copy : copies) {
    if (copy.from == nullptr) {
      std::memset(copy.to, 0, copy.bytes);
    } else {
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
    Block::current().shared.end_write(copy.to, copy.bytes);
  }
  copies.clear();
}

}  // namespace

void wait_pieces() {
  Block& block = Block::current();
  block.maybe_give_way();
  Thread& thread = block.thread();
  land_pieces(thread.copies);
  while (thread.copies_handed_on > 0) block.wait(block.copy_waiting, "cp.async.wait_all", nullptr);
}

void arrive_after_pieces(uint64_t* barrier) {
  constexpr const char* kName = "cp.async.mbarrier.arrive";
  Block& block = Block::current();
  block.maybe_give_way();
  static_cast<void>(block.memory_barrier(barrier, kName));
  Thread& thread = block.thread();
  ++thread.copies_handed_on;
  block.start({kName, [barrier, &block, &thread, copies = std::move(thread.copies)]() mutable {
                 land_pieces(copies);
                 block.arrive(barrier, 1, kName);
                 --thread.copies_handed_on;
                 block.wake(block.copy_waiting);
               }});
  thread.copies.clear();
}

}  // namespace openmsa::emulate
