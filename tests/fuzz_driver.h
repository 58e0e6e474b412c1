// What fuzz programs share: a count of what was taken, and a repeatable run where libFuzzer does not drive them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <stdexcept>

namespace openmsa::tests {

struct Tally {
  int64_t accepted = 0, refused = 0;
};

inline void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

// PROGRAM [iterations] [seed]: `try_one(random, tally)` that often; what it throws is a failure. Gives the exit code.
template <typename TryOne>
int run_fuzzer(int argc, const char* const* argv, int64_t usual_iterations, const char* noun, const TryOne& try_one) {
  const int64_t iterations = argc > 1 ? std::atoll(argv[1]) : usual_iterations;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  Tally tally;
  for (int64_t iteration = 0; iteration < iterations; ++iteration) {
    std::mt19937_64 random(seed * 1000003 + static_cast<uint64_t>(iteration));
    try {
      try_one(random, tally);
    } catch (const std::exception& error) {
      (void)std::fprintf(stderr, "iteration %lld of seed %llu: %s\n", static_cast<long long>(iteration),
                         static_cast<unsigned long long>(seed), error.what());
      return 1;
    }
  }
  std::printf("%lld %s accepted, %lld refused\n", static_cast<long long>(tally.accepted), noun,
              static_cast<long long>(tally.refused));
  // A run that took or refused nearly everything would test little.
  const bool mixed = tally.accepted > iterations / 20 && tally.refused > iterations / 20;
  return mixed ? 0 : 1;
}

}  // namespace openmsa::tests
