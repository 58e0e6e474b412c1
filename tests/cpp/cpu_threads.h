// Calls that must have the same bits on any number of threads.
#pragma once

#include <gtest/gtest.h>
#include <omp.h>

#include <cstring>
#include <vector>

namespace openmsa::testing {

class ThreadCount {
 public:
  explicit ThreadCount(int threads) : before_(omp_get_max_threads()) { omp_set_num_threads(threads); }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;
  ~ThreadCount() { omp_set_num_threads(before_); }

 private:
  int before_;
};

// The bytes of some vectors of numbers, one after the other.
template <typename... Vectors>
std::vector<unsigned char> bits_of(const Vectors&... vectors) {
  std::vector<unsigned char> bits((size_t{0} + ... + (vectors.size() * sizeof(vectors[0]))));
  unsigned char* end = bits.data();
  const auto append = [&](const auto& vector) {
    const size_t bytes = vector.size() * sizeof(vector[0]);
    if (bytes > 0) std::memcpy(end, vector.data(), bytes);
    end += bytes;
  };
  (append(vectors), ...);
  return bits;
}

// `call` runs something anew and returns its results' bits.
template <typename Call>
void expect_same_bits_on_any_threads(const Call& call) {
  std::vector<unsigned char> expected;
  for (int threads : {1, 2, 3, 7}) {
    const ThreadCount count(threads);
    const std::vector<unsigned char> bits = call();
    ASSERT_FALSE(bits.empty());
    if (threads == 1) expected = bits;
    EXPECT_TRUE(bits == expected) << "on " << threads << " threads, compared with one";
  }
}

}  // namespace openmsa::testing
