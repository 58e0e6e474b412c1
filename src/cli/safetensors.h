// Safetensors files: eight bytes of header length, a JSON header, the tensors' bytes. Nothing that a file says is
// believed before it is checked; whatever it holds, reading ends with tensors or with an InputError, and takes memory
// in proportion to the header (100 MB at most, as the format says) and to the tensors that are asked for.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "cli/descriptor.h"
#include "openmsa/openmsa.hpp"

namespace openmsa::cli {

using Metadata = std::map<std::string, std::string>;

struct StoredTensor {
  std::string name;
  std::string type;  // as the format calls it: "F32", "BF16", "F8_E4M3", ...
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // bytes, counted from the end of the header
};

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;  // ascending by name
  Metadata metadata;
};

// Checks all of a header against the number of bytes that follow it: known types, sizes that are those of the shapes,
// ranges that lie one after the other without holes or overlaps and end with the file. Throws InputError.
SafetensorsHeader parse_safetensors_header(std::string_view header, int64_t data_bytes);

class SafetensorsFile {
 public:
  // Every message of an InputError starts with `path`.
  explicit SafetensorsFile(const std::string& path);
  SafetensorsFile(Descriptor file, std::string path);

  const std::string& path() const { return path_; }
  const std::vector<StoredTensor>& tensors() const { return header_.tensors; }
  const Metadata& metadata() const { return header_.metadata; }
  const StoredTensor* find(std::string_view name) const;  // null when there is none
  // Copies the tensor's end - begin bytes to `to`.
  void read(const StoredTensor& tensor, void* to) const;
  const Descriptor& descriptor() const { return file_; }

 private:
  Descriptor file_;
  std::string path_;
  int64_t data_start_ = 0;
  SafetensorsHeader header_;
};

// The openmsa_dtype of a type's name, -1 where openmsa has none.
int32_t dtype_of_safetensors(std::string_view type);

struct NamedTensor {
  std::string name;
  Tensor tensor{};  // contiguous, on the CPU, of a type that the format has
};

// Length and header of a file that holds these tensors in this order, a multiple of 8 bytes.
std::string make_safetensors_header(const std::vector<NamedTensor>& tensors, const Metadata& metadata);

}  // namespace openmsa::cli
