#include "cli/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "cli/errors.h"

namespace openmsa::cli {
namespace {

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMostHeaderBytes = 100'000'000;  // the format's own limit

Descriptor open_to_read(const std::string& path) {
  // Without O_NONBLOCK the open of a pipe would wait for a writer.
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.is_open()) fail_input("{}: cannot be opened: {}", path, std::strerror(errno));
  return file;
}

// The file may shrink while it is read, so sizes that were checked guarantee nothing here.
void read_at(const Descriptor& file, int64_t offset, void* to, int64_t bytes) {
  auto* position = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t count = ::pread(file.number(), position, static_cast<size_t>(bytes), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_input("cannot be read: {}", std::strerror(errno));
    if (count == 0) fail_input("became shorter while it was read");
    position += count;
    offset += count;
    bytes -= count;
  }
}

int64_t regular_size(const Descriptor& file) {
  struct stat status {};
  if (::fstat(file.number(), &status) != 0) fail_input("cannot be read: {}", std::strerror(errno));
  if (!S_ISREG(status.st_mode))
    fail_input("is {}, expected a file", S_ISDIR(status.st_mode) ? "a directory" : "a device or pipe");
  return status.st_size;
}

std::string read_header(const Descriptor& file, int64_t size) {
  if (size < kLengthBytes) fail_input("is no safetensors file: it has {} bytes, and its length alone takes 8", size);
  std::array<unsigned char, kLengthBytes> stored{};
  read_at(file, 0, stored.data(), kLengthBytes);
  uint64_t length = 0;
  for (size_t byte = kLengthBytes; byte-- > 0;) length = length << 8 | stored[byte];
  if (length > static_cast<uint64_t>(kMostHeaderBytes)) {
    fail_input("is no safetensors file: its header would have {} bytes, {} are allowed", length, kMostHeaderBytes);
  }
  if (static_cast<int64_t>(length) > size - kLengthBytes) {
    fail_input("is cut off: its header has {} bytes, and {} follow its length", length, size - kLengthBytes);
  }
  // Looked at first, so that no memory is taken for what cannot be a header.
  char first = 0;
  if (length > 0) read_at(file, kLengthBytes, &first, 1);
  if (first != '{') fail_input("is no safetensors file: its header does not start with '{{'");
  std::string header(length, '\0');
  read_at(file, kLengthBytes, header.data(), static_cast<int64_t>(length));
  return header;
}

template <typename Function>
auto naming(const std::string& path, const Function& function) {
  try {
    return function();
  } catch (const InputError& error) {
    fail_input("{}: {}", path, error.what());
  }
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : SafetensorsFile(open_to_read(path), path) {}

SafetensorsFile::SafetensorsFile(Descriptor file, std::string path) : file_(std::move(file)), path_(std::move(path)) {
  naming(path_, [&] {
    const int64_t size = regular_size(file_);
    const std::string header = read_header(file_, size);
    data_start_ = kLengthBytes + static_cast<int64_t>(header.size());
    header_ = parse_safetensors_header(header, size - data_start_);
  });
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto found =
      std::lower_bound(tensors().begin(), tensors().end(), name,
                       [](const StoredTensor& tensor, std::string_view wanted) { return tensor.name < wanted; });
  return found != tensors().end() && found->name == name ? &*found : nullptr;
}

void SafetensorsFile::read(const StoredTensor& tensor, void* to) const {
  naming(path_, [&] { read_at(file_, data_start_ + tensor.begin, to, tensor.end - tensor.begin); });
}

}  // namespace openmsa::cli
