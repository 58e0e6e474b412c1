#include "cli/memory_file.h"

#include <sys/mman.h>

#include <stdexcept>

namespace openmsa::cli::tests {

Descriptor memory_file(std::string_view content) {
  Descriptor file(::memfd_create("test", MFD_CLOEXEC));
  if (!file.is_open()) throw std::runtime_error("memfd_create failed");
  while (!content.empty()) {
    const ssize_t count = ::write(file.number(), content.data(), content.size());
    if (count <= 0) throw std::runtime_error("write failed");
    content.remove_prefix(static_cast<size_t>(count));
  }
  return file;
}

std::string safetensors_content(std::string_view header, int64_t data_bytes) {
  std::string content;
  for (int byte = 0; byte < 8; ++byte) content += static_cast<char>(header.size() >> (8 * byte) & 0xFF);
  content += header;
  for (int64_t i = 0; i < data_bytes; ++i) content += static_cast<char>(i);
  return content;
}

std::string valid_safetensors() {
  return safetensors_content(
      R"({"__metadata__":{"format":"pt"},"q":{"dtype":"F32","shape":[2,1,3],"data_offsets":[0,24]},)"
      R"("empty":{"dtype":"BF16","shape":[0,7],"data_offsets":[24,24]},)"
      R"("count":{"shape":[],"data_offsets":[24,32],"dtype":"I64"}}   )",
      32);
}

}  // namespace openmsa::cli::tests
