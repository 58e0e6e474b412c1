// Where a backend's tensors live. A HostTensor is an image of one allocation: a strided tensor with its gaps, between
// two guards. A PlacedTensor is that image on a device; fetch() brings it back, and guards and gaps must not have
// changed.
#pragma once

#include <cstdint>
#include <vector>

#include "openmsa/openmsa.hpp"

namespace openmsa::cases {

// Memory of one device. Every function may throw std::runtime_error.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  virtual ~DeviceMemory() = default;

  virtual openmsa_device_type device() const = 0;
  virtual int32_t device_index() const = 0;
  virtual void* stream() const = 0;                                           // for openmsa_execution; null on the CPU
  virtual void* allocate(int64_t bytes) = 0;                                  // aligned to 256 bytes; bytes > 0
  virtual void release(void* pointer) noexcept = 0;                           // null is allowed
  virtual void upload(void* to, const void* from_host, int64_t bytes) = 0;    // done when it returns
  virtual void download(void* to_host, const void* from, int64_t bytes) = 0;  // after everything queued on stream()
};

DeviceMemory& cpu_memory();
#ifdef OPENMSA_WITH_SM90
DeviceMemory& gpu_memory();  // case_memory_gpu.cc
#endif

// Bytes before and after the elements; a multiple of 256, so that guards keep the alignment of the base.
inline constexpr int64_t kGuardBytes = 256;

struct HostTensor {
  std::vector<unsigned char> storage;  // guard, elements and gaps, guard; empty = the tensor is absent
  int64_t offset = 0;                  // byte of element [0, 0, ...] in storage
  Tensor view{};                       // shape, strides and type; data is null, use tensor()

  bool present() const { return !storage.empty(); }
  Tensor tensor();  // the view with its data in storage
  int64_t elements() const;
  unsigned char* element(int64_t i0 = 0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0);
  const unsigned char* element(int64_t i0 = 0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0) const;
};

// An image for a tensor of this shape. `strides` are in elements and may be negative or 0; empty = row-major.
// Every byte of the storage is `fill`.
HostTensor make_host_tensor(DataType dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                            unsigned char fill);
// The elements alone, in row-major order.
std::vector<unsigned char> packed_bytes(const HostTensor& tensor);

class PlacedTensor {
 public:
  PlacedTensor() = default;
  PlacedTensor(DeviceMemory& memory, const HostTensor& image);  // absent images stay absent
  PlacedTensor(PlacedTensor&& other) noexcept;
  PlacedTensor& operator=(PlacedTensor&& other) noexcept;
  ~PlacedTensor();

  bool present() const { return memory_ != nullptr; }
  const Tensor* tensor() const { return present() ? &tensor_ : nullptr; }
  // The image as it is now. Throws std::runtime_error when a byte outside the elements has changed since it was placed.
  HostTensor fetch() const;
  const HostTensor& image() const { return image_; }  // as it was placed

 private:
  DeviceMemory* memory_ = nullptr;
  void* base_ = nullptr;
  HostTensor image_;
  Tensor tensor_{};
};

}  // namespace openmsa::cases
