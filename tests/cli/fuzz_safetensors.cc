// Hostile safetensors files: mutations of valid ones. The reader must give tensors that lie in the file, or an
// InputError of one line. Meant for builds with AddressSanitizer and UBSan.
//
// fuzz_safetensors [iterations] [seed]: a repeatable run. With OPENMSA_FUZZER it is a libFuzzer target instead.
#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "cli/errors.h"
#include "cli/memory_file.h"
#include "cli/safetensors.h"
#include "fuzz_driver.h"

namespace openmsa::cli::tests {
namespace {

using openmsa::tests::require;
using openmsa::tests::Tally;

void try_file(std::string_view content, Tally& tally) {
  try {
    const SafetensorsFile file(memory_file(content), "x");
    int64_t end = 0;
    for (const StoredTensor& tensor : file.tensors()) {
      require(0 <= tensor.begin && tensor.begin <= tensor.end, "a range is wrong");
      require(tensor.end <= static_cast<int64_t>(content.size()), "a range ends beyond the file");
      end = std::max(end, tensor.end);
      std::vector<char> bytes(static_cast<size_t>(tensor.end - tensor.begin));
      file.read(tensor, bytes.data());
      const StoredTensor* found = file.find(tensor.name);
      require(found == &tensor, "a tensor is not found by its name");
      if (bytes.empty()) continue;
      // The data stands at the end of the file, and a tensor's bytes are those of its range.
      int64_t data = 0;
      for (const StoredTensor& other : file.tensors()) data = std::max(data, other.end);
      const auto start = content.size() - static_cast<size_t>(data) + static_cast<size_t>(tensor.begin);
      require(content.substr(start, bytes.size()) == std::string_view(bytes.data(), bytes.size()),
              "other bytes were read");
    }
    ++tally.accepted;
  } catch (const InputError& error) {
    const std::string_view message = error.what();
    require(message.starts_with("x: ") && message.size() < 500, "the message is no short line");
    require(message.find('\n') == std::string_view::npos, "the message has several lines");
    ++tally.refused;
  }
}

#ifndef OPENMSA_LIBFUZZER
std::string mutate(std::string content, std::mt19937_64& random) {
  constexpr std::array<std::string_view, 18> kWords{"\"q\":",
                                                    "{",
                                                    "}",
                                                    "[",
                                                    "]",
                                                    ",",
                                                    ":",
                                                    "\"dtype\"",
                                                    "\"shape\"",
                                                    "\"data_offsets\"",
                                                    "\"F32\"",
                                                    "\"I64\"",
                                                    "0",
                                                    "-1",
                                                    "9223372036854775807",
                                                    "18446744073709551616",
                                                    "1e9",
                                                    "\"__metadata__\""};
  const auto below = [&](size_t bound) { return bound == 0 ? 0 : static_cast<size_t>(random() % bound); };
  const size_t mutations = below(5);
  for (size_t n = 0; n < mutations; ++n) {
    const size_t at = below(content.size() + 1), length = std::min(below(24), content.size() - at);
    switch (below(8)) {
      case 0:
        if (at < content.size()) content[at] = static_cast<char>(random());
        break;
      case 1:
        if (at < content.size()) content[at] = static_cast<char>(content[at] ^ (1 << below(8)));
        break;
      case 2:
        content.erase(at, length);
        break;
      case 3:
        content.insert(at, content.substr(below(content.size()), length));
        break;
      case 4:
        content.insert(at, kWords[below(kWords.size())]);
        break;
      case 5:
        content.resize(at);
        break;
      case 6:  // a digit
        for (size_t i = at; i < content.size(); ++i) {
          if (content[i] < '0' || content[i] > '9') continue;
          content[i] = static_cast<char>('0' + below(10));
          break;
        }
        break;
      default: {  // a length that is another one, or right again
        const uint64_t right = content.find_last_of('}') + 1 - 8;
        const uint64_t stored = below(4) == 0 ? random() : right;
        for (size_t byte = 0; byte < std::min<size_t>(8, content.size()); ++byte) {
          content[byte] = static_cast<char>(stored >> (8 * byte));
        }
      }
    }
  }
  return content;
}
#endif

}  // namespace
}  // namespace openmsa::cli::tests

#ifdef OPENMSA_LIBFUZZER
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  openmsa::tests::Tally tally;
  openmsa::cli::tests::try_file({reinterpret_cast<const char*>(data), size}, tally);
  return 0;
}
#else
int main(int argc, char** argv) {
  using openmsa::tests::Tally;
  return openmsa::tests::run_fuzzer(argc, argv, 20000, "files", [](std::mt19937_64& random, Tally& tally) {
    openmsa::cli::tests::try_file(openmsa::cli::tests::mutate(openmsa::cli::tests::valid_safetensors(), random), tally);
  });
}
#endif
