// The backends of this build and the choice among them.
#include "api/backend.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "api/dtype.h"
#include "api/error.h"
#include "api/operation.h"

namespace openmsa {
namespace {

[[noreturn]] void fail_stage(const Backend& backend, const char* stage) {
  fail_unsupported(stage, ": not supported by backend ", backend.name());
}

// Whether `wanted` holds for a part of the comma-separated list.
template <typename Wanted>
bool find_part(std::string_view list, const Wanted& wanted) {
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    std::string_view part = list.substr(0, comma);
    while (!part.empty() && part.front() == ' ') part.remove_prefix(1);
    while (!part.empty() && part.back() == ' ') part.remove_suffix(1);
    if (!part.empty() && wanted(part)) return true;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return false;
}

std::string backend_names() {
  std::string names;
  for (const Backend* backend : backends()) names += join(names.empty() ? "" : ", ", backend->name());
  return names;
}

// OPENMSA_BACKEND's choice, or null. Read at every call, so that a program can change it.
const Backend* forced_backend() {
  const char* name = std::getenv("OPENMSA_BACKEND");
  if (name == nullptr || *name == '\0') return nullptr;
  for (const Backend* backend : backends()) {
    if (std::string_view(name) == backend->name()) return backend;
  }
  fail_argument("OPENMSA_BACKEND: got \"", name, "\", expected a backend of this build: ", backend_names());
}

}  // namespace

// Fastest first.
std::span<const Backend* const> backends() {
  static const Backend* const kBackends[] = {
#ifdef OPENMSA_WITH_SM90
      &sm90_backend(),
#endif
      &cpu_backend(),
      &reference_backend(),
  };
  return kBackends;
}

std::vector<std::string_view> comma_separated(std::string_view list) {
  std::vector<std::string_view> parts;
  find_part(list, [&](std::string_view part) {
    parts.push_back(part);
    return false;
  });
  return parts;
}

bool has_operation(const Backend& backend, std::string_view operation) {
  return find_part(backend.operations(), [&](std::string_view part) { return part == operation; });
}

const Backend& choose_backend(openmsa_device_type device) {
  if (const Backend* forced = forced_backend(); forced != nullptr && forced->device() == device) {
    if (!forced->available()) {
      fail_unsupported("OPENMSA_BACKEND: got \"", forced->name(), "\", which this machine cannot run");
    }
    return *forced;
  }
  const Backend* unavailable = nullptr;
  for (const Backend* backend : backends()) {
    if (backend->device() != device) continue;
    if (backend->available()) return *backend;
    unavailable = backend;
  }
  if (unavailable != nullptr) {
    fail_unsupported("backend ", unavailable->name(), ": this machine cannot run it, and no other backend takes ",
                     device_name(device), " tensors; this build has: ", backend_names());
  }
  fail_unsupported("no backend of this build takes ", device_name(device), " tensors; it has: ", backend_names());
}

const Backend& choose_backend(const char* operation, const Arguments& arguments) {
  const Backend& backend = choose_backend(arguments.device());
  if (has_operation(backend, operation)) return backend;
  fail_unsupported(operation, ": not supported by backend ", backend.name(), " on ", device_name(arguments.device()),
                   " tensors; it supports: ", backend.operations());
}

void Backend::copy_to_host(void* /*destination*/, const void* /*source*/, int64_t /*bytes*/, void* /*stream*/) const {
  fail_unsupported("check_inputs: not supported by backend ", name());
}

void Backend::select(const SelectParams& /*params*/) const { fail_stage(*this, "select"); }
void Backend::attend(const AttendParams& /*params*/) const { fail_stage(*this, "attend"); }
void Backend::backward(const BackwardParams& /*params*/) const { fail_stage(*this, "backward"); }
void Backend::combine(const CombineParams& /*params*/) const { fail_stage(*this, "combine"); }
void Backend::captured_mass(const CapturedMassParams& /*params*/) const { fail_stage(*this, "captured_mass"); }
void Backend::append(const AppendParams& /*params*/) const { fail_stage(*this, "append"); }

int64_t Backend::workspace(const SelectParams& /*params*/) const { return 0; }
int64_t Backend::workspace(const AttendParams& /*params*/) const { return 0; }
int64_t Backend::workspace(const BackwardParams& /*params*/) const { return 0; }
int64_t Backend::workspace(const CombineParams& /*params*/) const { return 0; }
int64_t Backend::workspace(const CapturedMassParams& /*params*/) const { return 0; }
int64_t Backend::workspace(const AppendParams& /*params*/) const { return 0; }

void Backend::check(const SelectParams& /*params*/) const {}
void Backend::check(const AttendParams& /*params*/) const {}
void Backend::check(const BackwardParams& /*params*/) const {}
void Backend::check(const CombineParams& /*params*/) const {}
void Backend::check(const CapturedMassParams& /*params*/) const {}
void Backend::check(const AppendParams& /*params*/) const {}

}  // namespace openmsa
