#include "cli/errors.h"

namespace openmsa::cli {

std::string printable(std::string_view text) {
  constexpr size_t kMost = 60;
  std::string result = "'";
  for (char character : text.substr(0, kMost)) {
    const auto code = static_cast<unsigned char>(character);
    if (code < 0x20 || code >= 0x7F) {
      result += fmt::format("\\x{:02x}", code);
    } else {
      result += character;
    }
  }
  return result + (text.size() > kMost ? "...'" : "'");
}

}  // namespace openmsa::cli
