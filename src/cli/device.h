// Where the command keeps tensors: the host, or a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "openmsa/openmsa.hpp"

namespace openmsa::cli {

// Functions may throw InputError or openmsa::Error.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  virtual openmsa_device_type type() const = 0;
  virtual int32_t index() const = 0;
  virtual void* stream() const = 0;  // for openmsa_execution
  virtual int64_t available_bytes() const = 0;
  virtual std::shared_ptr<void> allocate(int64_t bytes) = 0;
  virtual void upload(void* to, const void* from_host, int64_t bytes) = 0;
  virtual void download(void* to_host, const void* from, int64_t bytes) = 0;
  virtual void synchronize() = 0;  // waits for what was queued
};

Device& host_device();
// The device that the GPU backend runs on; null in builds without one and on machines without a GPU for it.
Device* gpu_device();

// What this process may still take: of the machine's memory, and of what its control groups and limits leave.
int64_t available_host_bytes();

// A contiguous tensor and its memory.
struct Array {
  Tensor tensor{};
  std::shared_ptr<void> memory;
  Device* device = nullptr;

  bool present() const { return device != nullptr; }
  const Tensor* pointer() const { return present() ? &tensor : nullptr; }
  int64_t elements() const;
  int64_t bytes() const;
  template <typename Element>
  Element* data() const {
    return static_cast<Element*>(tensor.data);
  }
};

using Shape = std::vector<int64_t>;

// Bytes of a tensor of this shape. Throws InputError where 64 bits cannot count them; `name` is for its message.
int64_t bytes_of(const std::string& name, int32_t dtype, const Shape& shape);
// Its elements are whatever the memory held.
Array make_array(Device& device, int32_t dtype, const Shape& shape);
// A copy on `device`; an absent array stays absent.
Array copy_to(Device& device, const Array& array);

// Throws InputError when the device has not `bytes` to spare for `purpose`.
void require_memory(const Device& device, int64_t bytes, const std::string& purpose);

}  // namespace openmsa::cli
