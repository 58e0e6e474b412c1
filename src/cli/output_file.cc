#include "cli/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <system_error>

#include "cli/errors.h"
#include "cli/interrupt.h"

namespace openmsa::cli {

OutputFile::OutputFile(const std::string& path, const Descriptor* input) : path_(path) {
  std::error_code unresolved;
  const std::filesystem::path resolved = std::filesystem::canonical(path, unresolved);
  target_ = unresolved ? path : resolved.string();

  struct stat there {};
  const bool exists = ::stat(target_.c_str(), &there) == 0;
  if (exists && !S_ISREG(there.st_mode)) {
    fail_input("{}: is {}, expected a file or a new name", path_,
               S_ISDIR(there.st_mode) ? "a directory" : "a device or pipe");
  }
  struct stat read {};
  if (exists && input != nullptr && ::fstat(input->number(), &read) == 0 && read.st_dev == there.st_dev &&
      read.st_ino == there.st_ino) {
    fail_input("{}: is the input file, expected another one", path_);
  }

  std::random_device random;
  temporary_ = fmt::format("{}.{:08x}.partial", target_, random());
  remove_on_interrupt(temporary_);
  const mode_t mode = exists ? there.st_mode & 07777 : 0666;
  file_ = Descriptor(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
  if (!file_.is_open()) {
    const int reason = errno;
    remove_on_interrupt("");
    temporary_.clear();
    errno = reason;
    fail("cannot be written");
  }
}

OutputFile::~OutputFile() {
  if (temporary_.empty()) return;
  ::unlink(temporary_.c_str());
  remove_on_interrupt("");
}

void OutputFile::write(const void* data, int64_t bytes) {
  constexpr int64_t kMostAtOnce = int64_t{1} << 30;  // the system's limit for one call is 2^31 - 4096
  const auto* position = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t count = ::write(file_.number(), position, static_cast<size_t>(std::min(bytes, kMostAtOnce)));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("cannot be written, and is as it was before");
    position += count;
    bytes -= count;
  }
}

void OutputFile::commit() {
  // Some file systems report a full disk only here.
  if (::fsync(file_.number()) != 0) fail("cannot be written, and is as it was before");
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot be replaced, and is as it was before");
  temporary_.clear();
  remove_on_interrupt("");
}

void OutputFile::fail(const char* what) const { fail_input("{}: {}: {}", path_, what, std::strerror(errno)); }

}  // namespace openmsa::cli
