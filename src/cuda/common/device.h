// The GPUs of this machine, and the guard that makes one of them current.
#pragma once

#include <cstdint>
#include <string>

namespace openmsa::cuda {

struct DeviceInfo {
  std::string name;
  int capability_major = 0;
  int capability_minor = 0;
  int multiprocessors = 0;
  int64_t l2_bytes = 0;
  int64_t memory_bytes = 0;
  int64_t shared_bytes_per_block = 0;  // the most that a kernel may ask for
};

// 0 on a machine without a GPU or a driver. Read once.
int device_count();
// Read once for each device. `index` is in [0, device_count()).
const DeviceInfo& device_info(int index);

// Makes a device current for the calling thread, and the one before it again at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool switched_ = false;
};

// Copies what device memory at `source` holds once `stream` got there, and waits.
void copy_to_host(void* destination, const void* source, int64_t bytes, void* stream);

}  // namespace openmsa::cuda
