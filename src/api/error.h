// The one way to fail: throw openmsa::Error with a message that names the argument, what came and what is supported.
#pragma once

#include <locale>
#include <sstream>
#include <string>

#include "openmsa/openmsa.hpp"

namespace openmsa {

template <typename... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream stream;
  stream.imbue(std::locale::classic());  // numbers read the same whatever locale the program chose
  (stream << ... << parts);
  return stream.str();
}

template <typename... Parts>
[[noreturn]] void fail(Status status, const Parts&... parts) {
  throw Error(status, join(parts...));
}

template <typename... Parts>
[[noreturn]] void fail_argument(const Parts&... parts) {
  fail(OPENMSA_INVALID_ARGUMENT, parts...);
}

template <typename... Parts>
[[noreturn]] void fail_unsupported(const Parts&... parts) {
  fail(OPENMSA_UNSUPPORTED, parts...);
}

}  // namespace openmsa
