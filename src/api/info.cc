// What this build holds and this machine offers, as JSON. Written by hand: the core depends on no JSON library, and
// needs objects, arrays, strings, numbers and booleans only.
#include <initializer_list>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "api/backend.h"
#include "api/dtype.h"
#include "api/error.h"

namespace openmsa {
namespace {

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (char character : text) {
    const auto code = static_cast<unsigned char>(character);
    if (character == '"' || character == '\\') {
      result += '\\';
      result += character;
    } else if (code < 0x20) {
      constexpr char kDigits[] = "0123456789abcdef";
      result += "\\u00";
      result += kDigits[code >> 4];
      result += kDigits[code & 15];
    } else {
      result += character;
    }
  }
  return result + "\"";
}

std::string boolean(bool value) { return value ? "true" : "false"; }

template <typename Items, typename Text>
std::string list(const Items& items, const Text& text) {
  std::string result = "[";
  for (const auto& item : items) result += join(result.size() == 1 ? "" : ", ", text(item));
  return result + "]";
}

struct Member {
  const char* name;
  std::string value;  // JSON
};

// Without the members that have no value.
std::string object(std::initializer_list<Member> members) {
  std::string result = "{";
  for (const Member& member : members) {
    if (member.value.empty()) continue;
    result += join(result.size() == 1 ? "" : ", ", quoted(member.name), ": ", member.value);
  }
  return result + "}";
}

std::string describe_backend(const Backend* backend) {
  const Backend::Limits limits = backend->limits();
  const auto names = [](const char* text) { return list(comma_separated(text), quoted); };
  const std::string_view target = backend->target();
  return object({{"name", quoted(backend->name())},
                 {"device", quoted(device_name(backend->device()))},
                 {"available", boolean(backend->available())},
                 {"target", target.empty() ? "" : quoted(target)},
                 {"operations", names(backend->operations())},
                 {"types", names(limits.types)},
                 {"block_sizes", quoted(limits.block_sizes)},
                 {"head_dims", quoted(limits.head_dims)},
                 {"topk", quoted(limits.topk)}});
}

std::string describe_devices() {
  std::vector<std::string> devices = {object({{"type", quoted(device_name(OPENMSA_CPU))},
                                              {"index", "0"},
                                              {"threads", std::to_string(std::thread::hardware_concurrency())}})};
  for (const Backend* backend : backends()) {
    int64_t index = 0;
    for (const std::string& name : backend->device_names()) {
      devices.push_back(object({{"type", quoted(device_name(backend->device()))},
                                {"index", std::to_string(index++)},
                                {"name", quoted(name)}}));
    }
  }
  return list(devices, [](const std::string& device) { return device; });
}

std::string describe_build() {
#ifdef NDEBUG
  constexpr bool kAssertions = false;
#else
  constexpr bool kAssertions = true;
#endif
  return object({{"compiler", quoted(__VERSION__)}, {"assertions", boolean(kAssertions)}});
}

}  // namespace

std::string info() {
  return object({{"version", quoted(::openmsa_version())},
                 {"backends", list(backends(), describe_backend)},
                 {"devices", describe_devices()},
                 {"build", describe_build()}});
}

}  // namespace openmsa
