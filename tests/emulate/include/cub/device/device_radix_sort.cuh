// cub::DeviceRadixSort as far as the sm90 backend calls it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace cub {

template <typename T>
struct DoubleBuffer {
  T* d_buffers[2] = {};
  int selector = 0;

  DoubleBuffer() = default;
  DoubleBuffer(T* current, T* alternate) : d_buffers{current, alternate} {}
  T* Current() const { return d_buffers[selector]; }
  T* Alternate() const { return d_buffers[selector ^ 1]; }
};

struct DeviceRadixSort {
  // The pass count, hence which buffer has the result, follows from the bits as it does in CUB; the other buffer holds
  // rubbish afterwards.
  template <typename Key, typename Value>
  static cudaError_t SortPairs(void* scratch, std::size_t& scratch_bytes, DoubleBuffer<Key>& keys,
                               DoubleBuffer<Value>& values, int count, int first_bit, int last_bit,
                               cudaStream_t stream = nullptr) {
    constexpr std::size_t kScratch = 256;
    constexpr int kRadixBits = 8;
    if (scratch == nullptr) {
      scratch_bytes = kScratch;
      return cudaSuccess;
    }
    if (scratch_bytes < kScratch) return cudaErrorInvalidValue;
    const DoubleBuffer<Key> from = keys;
    const DoubleBuffer<Value> from_values = values;
    const int passes = (last_bit - first_bit + kRadixBits - 1) / kRadixBits;
    keys.selector ^= passes & 1;
    values.selector ^= passes & 1;
    const DoubleBuffer<Key> to = keys;
    const DoubleBuffer<Value> to_values = values;
    return emulate_on_stream(stream, [=] {
      const auto digits = [&](Key key) {
        const Key upper = static_cast<Key>(key >> first_bit);
        const int bits = last_bit - first_bit;
        return bits >= static_cast<int>(8 * sizeof(Key)) ? upper : static_cast<Key>(upper & ((Key{1} << bits) - 1));
      };
      const auto size = static_cast<std::size_t>(count);
      std::vector<std::size_t> order(size);
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return digits(from.Current()[a]) < digits(from.Current()[b]);
      });
      std::vector<Key> sorted_keys(size);
      std::vector<Value> sorted_values(size);
      for (std::size_t i = 0; i < size; ++i) {
        sorted_keys[i] = from.Current()[order[i]];
        sorted_values[i] = from_values.Current()[order[i]];
      }
      std::copy(sorted_keys.begin(), sorted_keys.end(), to.Current());
      std::copy(sorted_values.begin(), sorted_values.end(), to_values.Current());
      std::fill_n(to.Alternate(), size, static_cast<Key>(~Key{0}));
      std::fill_n(to_values.Alternate(), size, static_cast<Value>(~Value{0}));
      std::fill_n(static_cast<unsigned char*>(scratch), kScratch, static_cast<unsigned char>(0xff));
      return cudaSuccess;
    });
  }
};

}  // namespace cub
