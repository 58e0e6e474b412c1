// What cuda_runtime.h and the instructions need of a thread block, without its parts.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

namespace openmsa::emulate {

// Returns how many threads voted.
int sync_block(bool vote);
void sync_named(int id, int threads);
void arrive_named(int id, int threads);
void give_way();
[[noreturn]] void trap();
uint32_t shared_address(const void* pointer);
int lane_id();
void set_register_limit(int count, bool raise);

// All lanes of `mask` come; gives the values of each.
const uint64_t* meet_lanes(uint32_t mask, uint64_t value, const char* instruction);

inline uint32_t ballot(uint32_t mask, bool value, const char* instruction) {
  const uint64_t* const values = meet_lanes(mask, value ? 1 : 0, instruction);
  uint32_t result = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && values[lane] == 1) result |= 1u << lane;
  }
  return result;
}

template <typename T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename T>
uint64_t to_bits(const T& value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

// source(lane) is the lane whose value comes. Of a lane that the mask leaves out comes poison.
template <typename T, typename Source>
T shuffle(uint32_t mask, const T& value, const char* instruction, const Source& source) {
  const uint64_t* const values = meet_lanes(mask, to_bits(value), instruction);
  return from_bits<T>(values[source(lane_id()) & 31]);
}

template <typename T>
uint32_t match_lanes(uint32_t mask, const T& value) {
  const uint64_t bits = to_bits(value);
  const uint64_t* const values = meet_lanes(mask, bits, "__match_any_sync");
  uint32_t result = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && values[lane] == bits) result |= 1u << lane;
  }
  return result;
}

template <typename T, typename Combine>
T reduce(uint32_t mask, T value, const char* instruction, const Combine& combine) {
  const uint64_t* const values = meet_lanes(mask, to_bits(value), instruction);
  T result = value;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && lane != lane_id()) result = combine(result, from_bits<T>(values[lane]));
  }
  return result;
}

}  // namespace openmsa::emulate
