#include "cpp/case_memory.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "api/dtype.h"

namespace openmsa::cases {
namespace {

class CpuMemory final : public DeviceMemory {
 public:
  openmsa_device_type device() const override { return OPENMSA_CPU; }
  int32_t device_index() const override { return 0; }
  void* stream() const override { return nullptr; }
  void* allocate(int64_t bytes) override { return ::operator new (static_cast<size_t>(bytes), std::align_val_t{256}); }
  void release(void* pointer) noexcept override { ::operator delete (pointer, std::align_val_t{256}); }
  void upload(void* to, const void* from_host, int64_t bytes) override {
    std::memcpy(to, from_host, static_cast<size_t>(bytes));
  }
  void download(void* to_host, const void* from, int64_t bytes) override {
    std::memcpy(to_host, from, static_cast<size_t>(bytes));
  }
};

// Calls visit(byte offset in the storage) for every element, in row-major order.
template <typename Visit>
void for_each_element(const HostTensor& tensor, const Visit& visit) {
  const Tensor& view = tensor.view;
  const int64_t bytes = dtype_size(view.dtype);
  int64_t shape[OPENMSA_MAX_RANK] = {1, 1, 1, 1}, strides[OPENMSA_MAX_RANK] = {};
  for (int32_t axis = 0; axis < view.rank; ++axis) {
    shape[axis] = view.shape[axis];
    strides[axis] = view.strides[axis];
    if (shape[axis] == 0) return;  // another axis may be of any length
  }
  for (int64_t a = 0; a < shape[0]; ++a) {
    for (int64_t b = 0; b < shape[1]; ++b) {
      for (int64_t c = 0; c < shape[2]; ++c) {
        for (int64_t d = 0; d < shape[3]; ++d) {
          visit(tensor.offset + bytes * (a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3]));
        }
      }
    }
  }
}

}  // namespace

DeviceMemory& cpu_memory() {
  static CpuMemory memory;
  return memory;
}

Tensor HostTensor::tensor() {
  Tensor result = view;
  result.data = storage.data() + offset;
  return result;
}

int64_t HostTensor::elements() const {
  int64_t count = 1;
  for (int32_t axis = 0; axis < view.rank; ++axis) count *= view.shape[axis];
  return count;
}

const unsigned char* HostTensor::element(int64_t i0, int64_t i1, int64_t i2, int64_t i3) const {
  const int64_t index[OPENMSA_MAX_RANK] = {i0, i1, i2, i3};
  int64_t position = 0;
  for (int32_t axis = 0; axis < view.rank; ++axis) position += index[axis] * view.strides[axis];
  return storage.data() + offset + position * dtype_size(view.dtype);
}

unsigned char* HostTensor::element(int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
  return const_cast<unsigned char*>(std::as_const(*this).element(i0, i1, i2, i3));
}

HostTensor make_host_tensor(DataType dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                            unsigned char fill) {
  HostTensor result;
  Tensor& view = result.view;
  view.rank = static_cast<int32_t>(shape.size());
  view.dtype = dtype;
  view.device_type = OPENMSA_CPU;
  int64_t dense = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    view.shape[axis] = shape[axis];
    view.strides[axis] = strides.empty() ? dense : strides[axis];
    dense *= shape[axis];
  }
  int64_t low = 0, high = 0;  // element positions relative to element [0, 0, ...]
  if (dense > 0) {
    for (int32_t axis = 0; axis < view.rank; ++axis) {
      const int64_t reach = (view.shape[axis] - 1) * view.strides[axis];
      low += std::min<int64_t>(reach, 0);
      high += std::max<int64_t>(reach, 0);
    }
    ++high;
  }
  const int64_t bytes = dtype_size(dtype);
  const int64_t before = (-low * bytes + kGuardBytes - 1) / kGuardBytes * kGuardBytes;
  result.offset = kGuardBytes + before;
  result.storage.assign(static_cast<size_t>(result.offset + high * bytes + kGuardBytes), fill);
  return result;
}

std::vector<unsigned char> packed_bytes(const HostTensor& tensor) {
  const size_t bytes = static_cast<size_t>(dtype_size(tensor.view.dtype));
  std::vector<unsigned char> result(static_cast<size_t>(tensor.elements()) * bytes);
  unsigned char* to = result.data();
  for_each_element(tensor, [&](int64_t at) {
    std::memcpy(to, tensor.storage.data() + at, bytes);
    to += bytes;
  });
  return result;
}

PlacedTensor::PlacedTensor(DeviceMemory& memory, const HostTensor& image) {
  if (!image.present()) return;
  image_ = image;
  const int64_t bytes = static_cast<int64_t>(image.storage.size());
  base_ = memory.allocate(bytes);
  memory_ = &memory;
  memory.upload(base_, image.storage.data(), bytes);
  tensor_ = image.view;
  tensor_.data = static_cast<unsigned char*>(base_) + image.offset;
  tensor_.device_type = memory.device();
  tensor_.device_index = memory.device_index();
}

PlacedTensor::PlacedTensor(PlacedTensor&& other) noexcept { *this = std::move(other); }

PlacedTensor& PlacedTensor::operator=(PlacedTensor&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(base_, other.base_);
  std::swap(image_, other.image_);
  std::swap(tensor_, other.tensor_);
  return *this;
}

PlacedTensor::~PlacedTensor() {
  if (memory_ != nullptr) memory_->release(base_);
}

HostTensor PlacedTensor::fetch() const {
  HostTensor now = image_;
  memory_->download(now.storage.data(), base_, static_cast<int64_t>(now.storage.size()));
  std::vector<unsigned char> outside(now.storage.size(), 1);
  const int64_t bytes = dtype_size(now.view.dtype);
  for_each_element(now, [&](int64_t at) { std::fill_n(outside.begin() + at, bytes, static_cast<unsigned char>(0)); });
  for (size_t i = 0; i < outside.size(); ++i) {
    if (outside[i] != 0 && now.storage[i] != image_.storage[i]) {
      throw std::runtime_error("byte " + std::to_string(static_cast<int64_t>(i) - now.offset) +
                               " from the tensor's first element, outside its elements, has been written");
    }
  }
  return now;
}

}  // namespace openmsa::cases
