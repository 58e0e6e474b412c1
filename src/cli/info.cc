// openmsa info, and what the other commands ask of openmsa::info().
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "api/dtype.h"
#include "cli/backends.h"
#include "cli/build_info.h"
#include "cli/commands.h"
#include "cli/errors.h"
#include "host/threads.h"

namespace openmsa::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "";
}

Json describe() {
  Json info = Json::parse(openmsa::info());
  const BuildInfo build = build_info();
  Json& described = info["build"];
  described["commit"] = *build.commit != '\0' ? Json(build.commit) : Json();
  described["modified"] = build.modified;
  described["type"] = build.type;
  described["compiler"] = build.compiler;
  described["cuda"] = *build.cuda != '\0' ? Json(build.cuda) : Json();
  info["threads"] = host::usable_threads();
  if (const std::string name = processor_name(); !name.empty()) {
    for (Json& device : info["devices"]) {
      if (device["type"] == "cpu") device["name"] = name;
    }
  }
  return info;
}

std::string joined(const std::vector<std::string>& parts) { return fmt::format("{}", fmt::join(parts, ", ")); }

std::string text_of(const Json& info) {
  const Json& build = info["build"];
  std::string text = fmt::format("openmsa {}", info["version"].get<std::string>());
  if (!build["commit"].is_null()) {
    text += fmt::format(" (commit {}{})", build["commit"].get<std::string>(), build["modified"] ? ", modified" : "");
  }
  text +=
      fmt::format("\nbuilt with {}, {}, {}\n\n", build["compiler"].get<std::string>(), build["type"].get<std::string>(),
                  build["cuda"].is_null() ? "no CUDA" : "CUDA " + build["cuda"].get<std::string>());

  text += "devices\n";
  for (const Json& device : info["devices"]) {
    const std::string threads =
        device.contains("threads") ? fmt::format(" ({} processors)", device["threads"].get<int64_t>()) : "";
    text += fmt::format("  {} {}  {}{}\n", device["type"].get<std::string>(), device["index"].get<int64_t>(),
                        device.value("name", ""), threads);
  }

  const std::vector<BackendInfo> all = backend_infos();
  text += "\nbackends\n";
  for (const BackendInfo& backend : all) {
    text += fmt::format("  {:<10} {} tensors, {}{}\n", backend.name, backend.device,
                        backend.available ? "ready" : "not on this machine",
                        backend.target.empty() ? "" : fmt::format(", instruction set {}", backend.target));
    text += fmt::format("  {:<10} {}; blocks of {}; head dimensions {}; topk {}\n", "", joined(backend.types),
                        backend.block_sizes, backend.head_dims, backend.topk);
  }
  text += fmt::format("  CPU calls use {} thread{}\n", info["threads"].get<int>(), info["threads"] == 1 ? "" : "s");

  // Operations in the order of the backend that has most, which is the order of openmsa.h.
  const auto most = std::max_element(all.begin(), all.end(), [](const BackendInfo& a, const BackendInfo& b) {
    return a.operations.size() < b.operations.size();
  });
  text += fmt::format("\n{:<28}", "operations");
  for (const BackendInfo& backend : all) text += fmt::format(" {:>10}", backend.name);
  for (const std::string& operation : most->operations) {
    text += fmt::format("\n  {:<26}", operation);
    for (const BackendInfo& backend : all) text += fmt::format(" {:>10}", backend.has(operation) ? "yes" : "-");
  }
  return text + "\n";
}

}  // namespace

int run_info(const InfoOptions& options) {
  const Json info = describe();
  // What the machine reports (names of processors and devices) may be no UTF-8.
  const std::string text =
      options.json ? info.dump(2, ' ', false, Json::error_handler_t::replace) + "\n" : text_of(info);
  (void)std::fputs(text.c_str(), stdout);
  return kSuccess;
}

bool BackendInfo::has(std::string_view operation) const {
  return std::find(operations.begin(), operations.end(), operation) != operations.end();
}

bool BackendInfo::takes(int32_t dtype) const {
  return std::find(types.begin(), types.end(), dtype_name(dtype)) != types.end();
}

std::vector<BackendInfo> backend_infos() {
  const auto info = nlohmann::json::parse(openmsa::info());
  std::vector<BackendInfo> result;
  for (const auto& described : info["backends"]) {
    BackendInfo& backend = result.emplace_back();
    backend.name = described["name"];
    backend.device = described["device"];
    backend.target = described.value("target", "");
    backend.block_sizes = described["block_sizes"];
    backend.head_dims = described["head_dims"];
    backend.topk = described["topk"];
    backend.available = described["available"];
    backend.operations = described["operations"].get<std::vector<std::string>>();
    backend.types = described["types"].get<std::vector<std::string>>();
  }
  return result;
}

BackendInfo choose_backend(const std::string& name, std::initializer_list<const char*> operations) {
  const std::vector<BackendInfo> all = backend_infos();
  const auto has_all = [&](const BackendInfo& backend) {
    return std::all_of(operations.begin(), operations.end(), [&](const char* op) { return backend.has(op); });
  };
  if (name.empty()) {
    const auto found = std::find_if(all.begin(), all.end(),
                                    [&](const BackendInfo& backend) { return backend.available && has_all(backend); });
    if (found == all.end()) fail_input("no backend of this build has {} on this machine", fmt::join(operations, ", "));
    return *found;
  }
  std::vector<std::string> names;
  for (const BackendInfo& backend : all) {
    names.push_back(backend.name);
    if (backend.name != name) continue;
    if (!backend.available) fail_input("--backend: got '{}', which this machine cannot run", name);
    if (!has_all(backend)) {
      fail_input("--backend: got '{}', which has no {}; it has {}", name, fmt::join(operations, ", "),
                 fmt::join(backend.operations, ", "));
    }
    return backend;
  }
  fail_input("--backend: got '{}', expected one of {}", name, fmt::join(names, ", "));
}

void use_backend(const BackendInfo& backend) { ::setenv("OPENMSA_BACKEND", backend.name.c_str(), 1); }

Device& device_of(const BackendInfo& backend) {
  if (backend.device == device_name(OPENMSA_CPU)) return host_device();
  Device* gpu = gpu_device();
  if (gpu == nullptr) fail_input("--backend: got '{}', and this machine has no GPU for it", backend.name);
  return *gpu;
}

}  // namespace openmsa::cli
