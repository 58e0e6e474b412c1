// The backends of this build as openmsa::info() tells of them, and the choice among them.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "cli/device.h"

namespace openmsa::cli {

struct BackendInfo {
  std::string name, device, target, block_sizes, head_dims, topk;
  bool available = false;
  std::vector<std::string> operations, types;

  bool has(std::string_view operation) const;
  bool takes(int32_t dtype) const;
};

std::vector<BackendInfo> backend_infos();  // fastest first

// The backend of that name, or with an empty name the first one that has all the operations. Throws InputError where
// there is none, or this machine cannot run it.
BackendInfo choose_backend(const std::string& name, std::initializer_list<const char*> operations);

// Calls of this process on tensors of its device go to the backend from now on.
void use_backend(const BackendInfo& backend);
Device& device_of(const BackendInfo& backend);

}  // namespace openmsa::cli
