// The backends of this build and what they tell of themselves.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "api/stages.h"

namespace openmsa {

std::span<const Backend* const> backends();

// The parts of a list such as Backend::operations(), without the spaces around them.
std::vector<std::string_view> comma_separated(std::string_view list);

// Whether `operation` is in Backend::operations(). Part of every call: allocates nothing.
bool has_operation(const Backend& backend, std::string_view operation);

}  // namespace openmsa
