#include "cli/device.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <sstream>

#include "api/dtype.h"
#include "cli/errors.h"

namespace openmsa::cli {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr std::align_val_t kAlignment{256};

class HostDevice final : public Device {
 public:
  openmsa_device_type type() const override { return OPENMSA_CPU; }
  int32_t index() const override { return 0; }
  void* stream() const override { return nullptr; }
  int64_t available_bytes() const override { return available_host_bytes(); }
  std::shared_ptr<void> allocate(int64_t bytes) override {
    try {
      return {::operator new(static_cast<size_t>(std::max<int64_t>(bytes, 1)), kAlignment),
              [](void* pointer) { ::operator delete(pointer, kAlignment); }};
    } catch (const std::bad_alloc&) {
      fail_input("memory ran out: {:.1f} GiB more were needed", static_cast<double>(bytes) / (1 << 30));
    }
  }
  void upload(void* to, const void* from_host, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from_host, static_cast<size_t>(bytes));
  }
  void download(void* to_host, const void* from, int64_t bytes) override { upload(to_host, from, bytes); }
  void synchronize() override {}
};

// The number that a file holds, or `otherwise`: where there is no such file, and for "max".
int64_t number_in(const std::string& path, int64_t otherwise) {
  int64_t number = 0;
  std::ifstream file(path);
  return file >> number ? number : otherwise;
}

// What the control groups of this process leave, of either version.
int64_t control_group_bytes() {
  int64_t left = kMost;
  const auto consider = [&](const std::string& folder, const char* limit, const char* usage) {
    const int64_t most = number_in(folder + limit, kMost);
    if (most < kMost) left = std::min(left, std::max<int64_t>(most - number_in(folder + usage, 0), 0));
  };
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    // Parents limit too; inside a container the own group is the root.
    for (std::string group = line.substr(second + 1);; group.erase(group.find_last_of('/'))) {
      if (controllers.empty()) {
        consider("/sys/fs/cgroup" + group, "/memory.max", "/memory.current");
      } else if (controllers == "memory") {
        consider("/sys/fs/cgroup/memory" + group, "/memory.limit_in_bytes", "/memory.usage_in_bytes");
      }
      if (group.find('/') == std::string::npos) break;
    }
  }
  return left;
}

int64_t machine_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t kibibytes = 0;
    if (words >> name >> kibibytes && name == "MemAvailable:") return kibibytes * 1024;
  }
  return kMost;
}

// Of an address space that is limited (ulimit -v).
int64_t address_space_bytes() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kMost;
  constexpr int64_t kPage = 4096;
  const int64_t used = number_in("/proc/self/statm", 0) * kPage;
  return std::max<int64_t>(static_cast<int64_t>(limit.rlim_cur) - used, 0);
}

}  // namespace

Device& host_device() {
  static HostDevice device;
  return device;
}

#ifndef OPENMSA_WITH_SM90
Device* gpu_device() { return nullptr; }
#endif

int64_t available_host_bytes() { return std::min({machine_bytes(), control_group_bytes(), address_space_bytes()}); }

int64_t Array::elements() const {
  int64_t count = 1;
  for (int32_t axis = 0; axis < tensor.rank; ++axis) count *= tensor.shape[axis];
  return count;
}

int64_t Array::bytes() const { return elements() * dtype_size(tensor.dtype); }

int64_t bytes_of(const std::string& name, int32_t dtype, const Shape& shape) {
  int64_t bytes = dtype_size(dtype);
  for (const int64_t length : shape) {
    if (__builtin_mul_overflow(bytes, length, &bytes)) fail_input("{}: 64 bits cannot count its bytes", name);
  }
  return bytes;
}

Array make_array(Device& device, int32_t dtype, const Shape& shape) {
  Array array;
  array.device = &device;
  array.memory = device.allocate(bytes_of("a tensor", dtype, shape));
  Tensor& tensor = array.tensor;
  tensor.data = array.memory.get();
  tensor.dtype = dtype;
  tensor.device_type = device.type();
  tensor.device_index = device.index();
  tensor.rank = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    tensor.shape[axis] = shape[axis];
    tensor.strides[axis] = stride;
    stride *= shape[axis];
  }
  return array;
}

Array copy_to(Device& device, const Array& array) {
  if (!array.present()) return {};
  const Tensor& tensor = array.tensor;
  Array copy = make_array(device, tensor.dtype, Shape(tensor.shape, tensor.shape + tensor.rank));
  if (device.type() == OPENMSA_CPU) {
    array.device->download(copy.tensor.data, tensor.data, array.bytes());
  } else {
    device.upload(copy.tensor.data, tensor.data, array.bytes());
  }
  return copy;
}

void require_memory(const Device& device, int64_t bytes, const std::string& purpose) {
  const int64_t available = device.available_bytes();
  if (bytes <= available) return;
  constexpr double kGibi = 1 << 30;
  fail_input("{} needs {:.1f} GiB of {} memory, and {:.1f} GiB are free", purpose, static_cast<double>(bytes) / kGibi,
             device_name(device.type()), static_cast<double>(available) / kGibi);
}

}  // namespace openmsa::cli
