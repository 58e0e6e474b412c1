// A file that appears whole or not at all: written under another name beside its place, then renamed. What stood there
// before stays until then, also when the disk is full or the command is ended.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cli/descriptor.h"

namespace openmsa::cli {

class OutputFile {
 public:
  // Throws InputError where `path` cannot be written, or is there and no file, or is the file that `input` has open.
  explicit OutputFile(const std::string& path, const Descriptor* input = nullptr);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  void write(const void* data, int64_t bytes);
  void write(std::string_view text) { write(text.data(), static_cast<int64_t>(text.size())); }
  // Until here nothing has changed at `path`.
  void commit();

 private:
  [[noreturn]] void fail(const char* what) const;

  std::string path_;       // as the caller calls it
  std::string target_;     // behind symbolic links
  std::string temporary_;  // empty once it is gone
  Descriptor file_;
};

}  // namespace openmsa::cli
