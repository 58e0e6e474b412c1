// Files of tests: in memory, made of a header and data.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cli/descriptor.h"

namespace openmsa::cli::tests {

// A file that is in no folder.
Descriptor memory_file(std::string_view content);

// The length of the header, the header, and `data_bytes` bytes 0, 1, 2, ...
std::string safetensors_content(std::string_view header, int64_t data_bytes);

// A file of three tensors and metadata that the reader takes.
std::string valid_safetensors();

}  // namespace openmsa::cli::tests
