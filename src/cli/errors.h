// How the command fails. An InputError ends it with exit code 2 and its message as one line on stderr: wrong usage, a
// file that is not what it should be, a machine that cannot do what was asked.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace openmsa::cli {

enum ExitCode : int { kSuccess = 0, kCheckFailed = 1, kBadInput = 2 };

class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void fail_input(fmt::format_string<Parts...> format, Parts&&... parts) {
  throw InputError(fmt::format(format, std::forward<Parts>(parts)...));
}

// Text of a file for a message: one short line that leaves a terminal as it is, whatever the file holds.
std::string printable(std::string_view text);

}  // namespace openmsa::cli
