// The C interface: each function is the C++ one behind a status and a message of the calling thread.
#include <cstring>
#include <new>
#include <string>

#include "api/error.h"

namespace {

thread_local std::string t_last_error;
thread_local std::string t_info;

openmsa_status record(openmsa_status status, const char* message) noexcept {
  try {
    t_last_error = message;
  } catch (...) {
    t_last_error.clear();  // no memory for the message; the status still tells
  }
  return status;
}

template <typename Function>
openmsa_status guarded(const Function& function) noexcept {
  try {
    function();
    return OPENMSA_OK;
  } catch (const openmsa::Error& error) {
    return record(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return record(OPENMSA_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::exception& error) {
    return record(OPENMSA_INTERNAL_ERROR, error.what());
  } catch (...) {
    return record(OPENMSA_INTERNAL_ERROR, "unknown exception");
  }
}

// Calls `function` with what `args` points to.
template <typename Args, typename Function>
void with_args(const void* args, const Function& function) {
  if (args == nullptr) openmsa::fail_argument("args: missing (null)");
  function(*static_cast<const Args*>(args));
}

template <typename Args>
openmsa_status run(void (*operation)(const Args&), const Args* args) noexcept {
  return guarded([&] { with_args<Args>(args, operation); });
}

template <typename Args>
int64_t workspace_size_of(const void* args) {
  int64_t bytes = 0;
  with_args<Args>(args, [&](const Args& typed) { bytes = openmsa::workspace_size(typed); });
  return bytes;
}

// `operation` as a number: C callers can pass any, and reading one outside the enumeration as such is undefined.
int64_t workspace_size_of(int operation, const void* args) {
  switch (operation) {
    case OPENMSA_SELECT_BLOCKS:
      return workspace_size_of<openmsa_select_blocks_args>(args);
    case OPENMSA_SPARSE_ATTENTION:
      return workspace_size_of<openmsa_sparse_attention_args>(args);
    case OPENMSA_SPARSE_ATTENTION_BACKWARD:
      return workspace_size_of<openmsa_sparse_attention_backward_args>(args);
    case OPENMSA_MSA_ATTENTION:
      return workspace_size_of<openmsa_msa_attention_args>(args);
    case OPENMSA_MSA_ATTENTION_BACKWARD:
      return workspace_size_of<openmsa_msa_attention_backward_args>(args);
    case OPENMSA_PAGED_SELECT_BLOCKS:
      return workspace_size_of<openmsa_paged_select_blocks_args>(args);
    case OPENMSA_PAGED_SPARSE_ATTENTION:
      return workspace_size_of<openmsa_paged_sparse_attention_args>(args);
    case OPENMSA_PAGED_MSA_ATTENTION:
      return workspace_size_of<openmsa_paged_msa_attention_args>(args);
    case OPENMSA_COMBINE:
      return workspace_size_of<openmsa_combine_args>(args);
    case OPENMSA_CAPTURED_MASS:
      return workspace_size_of<openmsa_captured_mass_args>(args);
    case OPENMSA_PAGED_APPEND:
      return workspace_size_of<openmsa_paged_append_args>(args);
  }
  openmsa::fail_argument("operation: got ", operation, ", expected an openmsa_operation");
}

int number_of(const openmsa_operation& operation) {
  static_assert(sizeof(openmsa_operation) == sizeof(int));
  int number = 0;
  std::memcpy(&number, &operation, sizeof(number));
  return number;
}

#define OPENMSA_STRINGIFY(value) #value
#define OPENMSA_VERSION_TEXT(major, minor, patch) \
  OPENMSA_STRINGIFY(major) "." OPENMSA_STRINGIFY(minor) "." OPENMSA_STRINGIFY(patch)

}  // namespace

extern "C" {

openmsa_status openmsa_select_blocks(const openmsa_select_blocks_args* args) {
  return run(openmsa::select_blocks, args);
}
openmsa_status openmsa_sparse_attention(const openmsa_sparse_attention_args* args) {
  return run(openmsa::sparse_attention, args);
}
openmsa_status openmsa_sparse_attention_backward(const openmsa_sparse_attention_backward_args* args) {
  return run(openmsa::sparse_attention_backward, args);
}
openmsa_status openmsa_msa_attention(const openmsa_msa_attention_args* args) {
  return run(openmsa::msa_attention, args);
}
openmsa_status openmsa_msa_attention_backward(const openmsa_msa_attention_backward_args* args) {
  return run(openmsa::msa_attention_backward, args);
}
openmsa_status openmsa_paged_select_blocks(const openmsa_paged_select_blocks_args* args) {
  return run(openmsa::paged_select_blocks, args);
}
openmsa_status openmsa_paged_sparse_attention(const openmsa_paged_sparse_attention_args* args) {
  return run(openmsa::paged_sparse_attention, args);
}
openmsa_status openmsa_paged_msa_attention(const openmsa_paged_msa_attention_args* args) {
  return run(openmsa::paged_msa_attention, args);
}
openmsa_status openmsa_combine(const openmsa_combine_args* args) { return run(openmsa::combine, args); }
openmsa_status openmsa_captured_mass(const openmsa_captured_mass_args* args) {
  return run(openmsa::captured_mass, args);
}
openmsa_status openmsa_paged_append(const openmsa_paged_append_args* args) { return run(openmsa::paged_append, args); }

openmsa_status openmsa_workspace_size(openmsa_operation operation, const void* args, int64_t* bytes) {
  return guarded([&] {
    if (bytes == nullptr) openmsa::fail_argument("bytes: missing (null)");
    *bytes = workspace_size_of(number_of(operation), args);
  });
}

openmsa_status openmsa_set_workspace_limit(int64_t bytes) {
  return guarded([&] { openmsa::set_workspace_limit(bytes); });
}
int64_t openmsa_workspace_limit(void) { return openmsa::workspace_limit(); }

void openmsa_set_check_inputs(int32_t enabled) { openmsa::set_check_inputs(enabled != 0); }
int32_t openmsa_check_inputs(void) { return openmsa::check_inputs() ? 1 : 0; }

openmsa_status openmsa_set_num_threads(int32_t threads) {
  return guarded([&] { openmsa::set_num_threads(threads); });
}
int32_t openmsa_num_threads(void) { return openmsa::num_threads(); }

const char* openmsa_last_error(void) { return t_last_error.c_str(); }

const char* openmsa_version(void) {
  return OPENMSA_VERSION_TEXT(OPENMSA_VERSION_MAJOR, OPENMSA_VERSION_MINOR, OPENMSA_VERSION_PATCH);
}

const char* openmsa_info(void) {
  return guarded([] { t_info = openmsa::info(); }) == OPENMSA_OK ? t_info.c_str() : "";
}

}  // extern "C"
