// What every operation does around its stages: check, choose the backend, let it refuse, place the workspace, run.
//
// An operation is a class with kName, a constructor (args, Arguments&) that checks and fills the Params of its stages,
// stages() that ties them (the first one's layout and cache scales stand for all), and run(backend).
#pragma once

#include <algorithm>
#include <new>
#include <tuple>

#include "api/checks.h"

namespace openmsa {

// The backend for `operation` on the device of the call's tensors; refuses by name what the backend lacks.
const Backend& choose_backend(const char* operation, const Arguments& arguments);

template <typename Params>
void check_values(const Backend& backend, const Params& params, int64_t page_size, void* stream) {
  if constexpr (requires { params.layout; }) check_layout_values(backend, params.layout, page_size, stream);
  if constexpr (requires { params.k_scale; }) {
    check_cache_scale_values(backend, "k_scale", params.k_scale, stream);
    check_cache_scale_values(backend, "v_scale", params.v_scale, stream);
  }
}

// Stages run one after the other and share the workspace.
template <typename Operation>
int64_t workspace_bytes(const Backend& backend, Operation& operation) {
  return std::apply(
      [&](const auto&... params) {
        return std::max({int64_t{0}, backend.workspace(params)...});
      },
      operation.stages());
}

template <typename Operation>
const Backend& checked_backend(const Arguments& arguments, Operation& operation) {
  const Backend& backend = choose_backend(Operation::kName, arguments);
  std::apply([&](const auto&... params) { (backend.check(params), ...); }, operation.stages());
  return backend;
}

// Memory that runs out fails as everything does.
template <typename Operation, typename Function>
auto with_host_memory(const Function& function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    fail(OPENMSA_OUT_OF_MEMORY, Operation::kName, ": host memory ran out");
  }
}

template <typename Operation, typename Args>
void run_operation(const Args& args) {
  Arguments arguments(Purpose::run);
  Operation operation(args, arguments);
  const Backend& backend = checked_backend(arguments, operation);
  check_values(backend, std::get<0>(operation.stages()), arguments.length(Axis::page_rows), args.execution.stream);
  const Execution execution = arguments.execution(args.execution, [&] { return workspace_bytes(backend, operation); });
  std::apply([&](auto&... params) { ((params.execution = execution), ...); }, operation.stages());
  with_host_memory<Operation>([&] { operation.run(backend); });
}

template <typename Operation, typename Args>
int64_t operation_workspace_size(const Args& args) {
  Arguments arguments(Purpose::workspace_size);
  Operation operation(args, arguments);
  return workspace_bytes(checked_backend(arguments, operation), operation);
}

}  // namespace openmsa
