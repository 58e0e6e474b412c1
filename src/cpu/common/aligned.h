// Scratch memory for vector code.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace openmsa::cpu {

// Floats on a cache line, kept from one use to the next. Not initialised.
class AlignedFloats {
 public:
  // At least `count` of them; what was there is lost when they grow.
  float* require(int64_t count) {
    if (count > count_) {
      floats_.reset();  // before its successor exists
      count_ = 0;
      floats_.reset(new (kAlignment) float[static_cast<size_t>(count)]);
      count_ = count;
    }
    return floats_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* floats) const { operator delete[](floats, kAlignment); }
  };
  std::unique_ptr<float[], Free> floats_;
  int64_t count_ = 0;
};

}  // namespace openmsa::cpu
