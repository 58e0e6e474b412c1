// The Python binding: unpacks the arguments of a call, in the order of openmsa.h's structures, and calls the C++ API.
//
// A tensor comes either through DLPack (torch) or as bytes that hold an openmsa_tensor (numpy, which DLPack cannot
// express when an array is read-only or of an ml_dtypes type). Bytes longer than the structure end with the reason why
// the array cannot be used, or the name of its type when dtype is -1: the refusal then names operation and argument
// like every other one.
#include <dlpack/dlpack.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>

#include "openmsa/openmsa.hpp"

namespace {

using tvm::ffi::AnyView;
using tvm::ffi::PackedArgs;

[[noreturn]] void refuse(const char* operation, const char* argument, const std::string& reason,
                         openmsa_status status = OPENMSA_INVALID_ARGUMENT) {
  throw openmsa::Error(status, std::string(operation) + ": " + argument + ": " + reason);
}

constexpr const char* kTypes = ", expected float32, float16, bfloat16, float8_e4m3fn, int32, int64 or uint8";

// -1 for a type that openmsa has no name for.
int32_t dtype_of(DLDataType type) {
  if (type.lanes != 1) return -1;
  switch (type.code) {
    case kDLFloat:
      return type.bits == 32 ? OPENMSA_FLOAT32 : type.bits == 16 ? OPENMSA_FLOAT16 : -1;
    case kDLBfloat:
      return type.bits == 16 ? OPENMSA_BFLOAT16 : -1;
    case kDLFloat8_e4m3fn:
      return type.bits == 8 ? OPENMSA_FLOAT8_E4M3 : -1;
    case kDLInt:
      return type.bits == 32 ? OPENMSA_INT32 : type.bits == 64 ? OPENMSA_INT64 : -1;
    case kDLUInt:
      return type.bits == 8 ? OPENMSA_UINT8 : -1;
    default:
      return -1;
  }
}

int64_t bytes_of(DLDataType type) { return (int64_t{type.bits} * type.lanes + 7) / 8; }

// Reads one call's arguments in order. Owns what the argument structures point to, so it must outlive them.
class Arguments {
 public:
  Arguments(const char* operation, PackedArgs args) : operation_(operation), args_(args) {}
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  const openmsa_tensor* tensor(const char* name) {
    AnyView value = next();
    if (value.type_index() == tvm::ffi::TypeIndex::kTVMFFINone) return nullptr;
    openmsa_tensor* tensor = &tensors_[tensor_count_++];
    if (value.type_index() == tvm::ffi::TypeIndex::kTVMFFITensor ||
        value.type_index() == tvm::ffi::TypeIndex::kTVMFFIDLTensorPtr) {
      from_dlpack(*value.cast<DLTensor*>(), name, tensor);
    } else {
      from_bytes(value.cast<tvm::ffi::Bytes>(), name, tensor);
    }
    if (tensor->device_type == OPENMSA_GPU) gpu_ = tensor->device_index;
    return tensor;
  }

  int64_t integer(const char* name) {
    AnyView value = next();
    const std::optional<int64_t> number = value.try_cast<int64_t>();
    if (!number) refuse(operation_, name, "got " + value.GetTypeKey() + ", expected a 64-bit integer");
    return *number;
  }

  int32_t flag(const char*) { return next().cast<bool>() ? 1 : 0; }

  const double* number(const char* name) {
    AnyView value = next();
    if (value.type_index() == tvm::ffi::TypeIndex::kTVMFFINone) return nullptr;
    const std::optional<double> number = value.try_cast<double>();
    if (!number) refuse(operation_, name, "got " + value.GetTypeKey() + ", expected a number");
    return hold(*number);
  }

  openmsa_cache_scale cache_scale(const char* name) {
    const double* value = number(name);
    return {value, tensor(name)};
  }

  openmsa_sequences sequences() { return {tensor("cu_seqlens_q"), tensor("cu_seqlens_k"), tensor("k_starts")}; }

  openmsa_requests requests() { return {tensor("block_table"), tensor("seq_lens"), tensor("cu_seqlens_q")}; }

  openmsa_selection selection() { return {integer("topk"), integer("init_blocks"), integer("local_blocks")}; }

  // Without its stream, which depends on tensors that come later.
  openmsa_execution execution() { return {nullptr, tensor("workspace")}; }

  // The caller's current stream on the GPU of the tensors read, if any.
  void* stream() const { return gpu_ < 0 ? nullptr : TVMFFIEnvGetStream(kDLCUDA, gpu_); }

 private:
  AnyView next() { return args_[next_++]; }

  const double* hold(double value) { return &(numbers_[number_count_++] = value); }

  void from_dlpack(const DLTensor& source, const char* name, openmsa_tensor* tensor) const {
    *tensor = openmsa_tensor{};
    tensor->dtype = dtype_of(source.dtype);
    if (tensor->dtype < 0) refuse(operation_, name, "got type " + type_name(source.dtype) + kTypes);
    switch (source.device.device_type) {
      case kDLCPU:
      case kDLCUDAHost:
        tensor->device_type = OPENMSA_CPU;
        break;
      case kDLCUDA:
        tensor->device_type = OPENMSA_GPU;
        tensor->device_index = source.device.device_id;
        break;
      default:
        refuse(operation_, name, "got a tensor on an unknown device, expected cpu or cuda", OPENMSA_UNSUPPORTED);
    }
    tensor->data = static_cast<char*>(source.data) + source.byte_offset;
    tensor->rank = source.ndim;
    int64_t compact = 1;
    for (int32_t axis = source.ndim - 1; axis >= 0; --axis) {
      if (axis < OPENMSA_MAX_RANK) {
        tensor->shape[axis] = source.shape[axis];
        tensor->strides[axis] = source.strides ? source.strides[axis] : compact;
      }
      compact *= source.shape[axis];
    }
    set_empty_strides(tensor);
  }

  void from_bytes(const tvm::ffi::Bytes& bytes, const char* name, openmsa_tensor* tensor) const {
    const std::string content(bytes.data(), bytes.size());
    if (content.size() < sizeof(openmsa_tensor)) refuse(operation_, name, "got no tensor, expected one");
    std::memcpy(tensor, content.data(), sizeof(openmsa_tensor));
    const std::string reason = content.substr(sizeof(openmsa_tensor));
    if (tensor->dtype < 0) refuse(operation_, name, "got type " + reason + kTypes);
    if (!reason.empty()) refuse(operation_, name, reason);
    set_empty_strides(tensor);
  }

  // Strides of a tensor without elements mean nothing, and frameworks leave anything there: zeros after an expansion.
  static void set_empty_strides(openmsa_tensor* tensor) {
    const int32_t rank = std::min<int32_t>(tensor->rank, OPENMSA_MAX_RANK);
    if (std::find(tensor->shape, tensor->shape + rank, 0) == tensor->shape + rank) return;
    int64_t compact = 1;
    for (int32_t axis = rank - 1; axis >= 0; --axis) {
      tensor->strides[axis] = compact;
      compact *= std::max<int64_t>(tensor->shape[axis], 1);
    }
  }

  static std::string type_name(DLDataType type) {
    const std::string bits = std::to_string(bytes_of(type) * 8);
    switch (type.code) {
      case kDLFloat:
        return "float" + bits;
      case kDLInt:
        return "int" + bits;
      case kDLUInt:
        return "uint" + bits;
      case kDLComplex:
        return "complex" + bits;
      case kDLBool:
        return "bool";
      case kDLFloat8_e5m2:
        return "float8_e5m2";
      case kDLFloat8_e4m3fnuz:
        return "float8_e4m3fnuz";
      case kDLFloat8_e5m2fnuz:
        return "float8_e5m2fnuz";
      default:
        return "of code " + std::to_string(type.code);
    }
  }

  const char* operation_;
  PackedArgs args_;
  int next_ = 0;
  int32_t gpu_ = -1;
  int tensor_count_ = 0, number_count_ = 0;
  std::array<openmsa_tensor, 24> tensors_;
  std::array<double, 4> numbers_;
};

void read(Arguments& in, openmsa::SelectBlocksArgs& args) {
  args.index_q = in.tensor("index_q");
  args.index_k = in.tensor("index_k");
  args.sequences = in.sequences();
  args.selection = in.selection();
  args.block_size = in.integer("block_size");
  args.scale = in.number("scale");
  args.execution = in.execution();
  args.indices = in.tensor("out");
  args.index_lse = in.tensor("lse_out");
}

void read(Arguments& in, openmsa::SparseAttentionArgs& args) {
  args.q = in.tensor("q");
  args.k = in.tensor("k");
  args.v = in.tensor("v");
  args.indices = in.tensor("indices");
  args.sequences = in.sequences();
  args.block_size = in.integer("block_size");
  args.scale = in.number("scale");
  args.execution = in.execution();
  args.out = in.tensor("out");
  args.lse = in.tensor("lse_out");
}

void read(Arguments& in, openmsa::SparseAttentionBackwardArgs& args) {
  args.q = in.tensor("q");
  args.k = in.tensor("k");
  args.v = in.tensor("v");
  args.indices = in.tensor("indices");
  args.out = in.tensor("out");
  args.lse = in.tensor("lse");
  args.d_out = in.tensor("d_out");
  args.sequences = in.sequences();
  args.block_size = in.integer("block_size");
  args.scale = in.number("scale");
  args.deterministic = in.flag("deterministic");
  args.execution = in.execution();
  args.d_q = in.tensor("d_q");
  args.d_k = in.tensor("d_k");
  args.d_v = in.tensor("d_v");
}

void read(Arguments& in, openmsa::MsaAttentionArgs& args) {
  args.q = in.tensor("q");
  args.k = in.tensor("k");
  args.v = in.tensor("v");
  args.index_q = in.tensor("index_q");
  args.index_k = in.tensor("index_k");
  args.sequences = in.sequences();
  args.selection = in.selection();
  args.block_size = in.integer("block_size");
  args.scale = in.number("scale");
  args.index_scale = in.number("index_scale");
  args.warmup = in.flag("warmup");
  args.execution = in.execution();
  args.out = in.tensor("out");
  args.lse = in.tensor("lse");
  args.indices = in.tensor("indices");
  args.index_lse = in.tensor("index_lse");
  args.kl = in.tensor("kl_out");
}

void read(Arguments& in, openmsa::MsaAttentionBackwardArgs& args) {
  args.q = in.tensor("q");
  args.k = in.tensor("k");
  args.v = in.tensor("v");
  args.index_q = in.tensor("index_q");
  args.index_k = in.tensor("index_k");
  args.out = in.tensor("out");
  args.lse = in.tensor("lse");
  args.indices = in.tensor("indices");
  args.index_lse = in.tensor("index_lse");
  args.d_out = in.tensor("d_out");
  args.d_kl = in.tensor("d_kl");
  args.sequences = in.sequences();
  args.block_size = in.integer("block_size");
  args.scale = in.number("scale");
  args.index_scale = in.number("index_scale");
  args.warmup = in.flag("warmup");
  args.deterministic = in.flag("deterministic");
  args.execution = in.execution();
  args.d_q = in.tensor("d_q");
  args.d_k = in.tensor("d_k");
  args.d_v = in.tensor("d_v");
  args.d_index_q = in.tensor("d_index_q");
  args.d_index_k = in.tensor("d_index_k");
  args.kl = in.tensor("kl_out");
}

void read(Arguments& in, openmsa::PagedSelectBlocksArgs& args) {
  args.index_q = in.tensor("index_q");
  args.index_k_cache = in.tensor("index_k_cache");
  args.requests = in.requests();
  args.selection = in.selection();
  args.scale = in.number("scale");
  args.execution = in.execution();
  args.indices = in.tensor("out");
  args.index_lse = in.tensor("lse_out");
}

void read(Arguments& in, openmsa::PagedSparseAttentionArgs& args) {
  args.q = in.tensor("q");
  args.k_cache = in.tensor("k_cache");
  args.v_cache = in.tensor("v_cache");
  args.indices = in.tensor("indices");
  args.requests = in.requests();
  args.scale = in.number("scale");
  args.k_scale = in.cache_scale("k_scale");
  args.v_scale = in.cache_scale("v_scale");
  args.execution = in.execution();
  args.out = in.tensor("out");
  args.lse = in.tensor("lse_out");
}

void read(Arguments& in, openmsa::PagedMsaAttentionArgs& args) {
  args.q = in.tensor("q");
  args.k_cache = in.tensor("k_cache");
  args.v_cache = in.tensor("v_cache");
  args.index_q = in.tensor("index_q");
  args.index_k_cache = in.tensor("index_k_cache");
  args.requests = in.requests();
  args.selection = in.selection();
  args.scale = in.number("scale");
  args.index_scale = in.number("index_scale");
  args.k_scale = in.cache_scale("k_scale");
  args.v_scale = in.cache_scale("v_scale");
  args.execution = in.execution();
  args.out = in.tensor("out");
  args.lse = in.tensor("lse_out");
  args.indices = in.tensor("indices_out");
}

void read(Arguments& in, openmsa::CombineArgs& args) {
  args.outs = in.tensor("outs");
  args.lses = in.tensor("lses");
  args.execution = in.execution();
  args.out = in.tensor("out");
  args.lse = in.tensor("lse");
}

void read(Arguments& in, openmsa::CapturedMassArgs& args) {
  args.q = in.tensor("q");
  args.k = in.tensor("k");
  args.indices = in.tensor("indices");
  args.sequences = in.sequences();
  args.block_size = in.integer("block_size");
  args.scale = in.number("scale");
  args.execution = in.execution();
  args.share = in.tensor("share");
  args.best = in.tensor("best");
}

void read(Arguments& in, openmsa::PagedAppendArgs& args) {
  args.k = in.tensor("k");
  args.v = in.tensor("v");
  args.index_k = in.tensor("index_k");
  args.requests = in.requests();
  args.k_scale = in.cache_scale("k_scale");
  args.v_scale = in.cache_scale("v_scale");
  args.execution = in.execution();
  args.k_cache = in.tensor("k_cache");
  args.v_cache = in.tensor("v_cache");
  args.index_k_cache = in.tensor("index_k_cache");
}

// Exceptions as the package knows them: openmsa/errors.py registers a class for each of these kinds.
const char* kind_of(openmsa_status status) {
  switch (status) {
    case OPENMSA_INVALID_ARGUMENT:
      return "openmsa.InvalidArgumentError";
    case OPENMSA_UNSUPPORTED:
      return "openmsa.UnsupportedError";
    case OPENMSA_OUT_OF_MEMORY:
      return "openmsa.OutOfMemoryError";
    case OPENMSA_DEVICE_ERROR:
      return "openmsa.DeviceError";
    default:
      return "openmsa.InternalError";
  }
}

// The package's names of results that callers bring, where they differ from openmsa.h's.
struct Renamed {
  const char *operation, *core, *python;
};
constexpr Renamed kRenamed[] = {
    {"select_blocks", "indices: ", "out: "},
    {"select_blocks", "index_lse: ", "lse_out: "},
    {"sparse_attention", "lse: ", "lse_out: "},
    {"paged_select_blocks", "indices: ", "out: "},
    {"paged_select_blocks", "index_lse: ", "lse_out: "},
    {"paged_sparse_attention", "lse: ", "lse_out: "},
    {"paged_msa_attention", "lse: ", "lse_out: "},
    {"paged_msa_attention", "indices: ", "indices_out: "},
    {"msa_attention", "kl: ", "kl_out: "},
    {"msa_attention_backward", "kl: ", "kl_out: "},
};

// The core's message with the operation before it, as in every error of the package.
std::string message_of(const std::string& operation, const openmsa::Error& error) {
  std::string message = error.what();
  if (operation.empty() || message.rfind(operation + ": ", 0) == 0) return message;
  for (const Renamed& name : kRenamed) {
    if (operation == name.operation && message.rfind(name.core, 0) == 0) {
      message.replace(0, std::strlen(name.core), name.python);
      break;
    }
  }
  return operation + ": " + message;
}

template <typename Function>
void guarded(const char* operation, Function function) {
  try {
    function();
  } catch (const openmsa::Error& error) {
    throw tvm::ffi::Error(kind_of(error.status()), message_of(operation, error), "");
  } catch (const std::bad_alloc&) {
    throw tvm::ffi::Error(kind_of(OPENMSA_OUT_OF_MEMORY), "host memory ran out", "");
  }
}

template <typename Args, typename Use>
void with_arguments(const char* operation, const TVMFFIAny* packed, int32_t count, Use use) {
  guarded(operation, [&] {
    Arguments in(operation, PackedArgs(reinterpret_cast<const AnyView*>(packed), count));
    Args args;
    read(in, args);
    args.execution.stream = in.stream();
    use(args);
  });
}

}  // namespace

// Exports `name` and `name_workspace`, which returns the bytes that `name` needs with the same arguments.
#define OPENMSA_BIND(name, Args)                                                                                 \
  extern "C" OPENMSA_API int __tvm_ffi_##name(void*, const TVMFFIAny* packed, int32_t count, TVMFFIAny*) {       \
    TVM_FFI_SAFE_CALL_BEGIN();                                                                                   \
    with_arguments<openmsa::Args>(#name, packed, count, [](const openmsa::Args& args) { openmsa::name(args); }); \
    TVM_FFI_SAFE_CALL_END();                                                                                     \
  }                                                                                                              \
  extern "C" OPENMSA_API int __tvm_ffi_##name##_workspace(void*, const TVMFFIAny* packed, int32_t count,         \
                                                          TVMFFIAny* result) {                                   \
    TVM_FFI_SAFE_CALL_BEGIN();                                                                                   \
    with_arguments<openmsa::Args>(#name, packed, count, [result](const openmsa::Args& args) {                    \
      *reinterpret_cast<tvm::ffi::Any*>(result) = openmsa::workspace_size(args);                                 \
    });                                                                                                          \
    TVM_FFI_SAFE_CALL_END();                                                                                     \
  }

OPENMSA_BIND(select_blocks, SelectBlocksArgs)
OPENMSA_BIND(sparse_attention, SparseAttentionArgs)
OPENMSA_BIND(sparse_attention_backward, SparseAttentionBackwardArgs)
OPENMSA_BIND(msa_attention, MsaAttentionArgs)
OPENMSA_BIND(msa_attention_backward, MsaAttentionBackwardArgs)
OPENMSA_BIND(paged_select_blocks, PagedSelectBlocksArgs)
OPENMSA_BIND(paged_sparse_attention, PagedSparseAttentionArgs)
OPENMSA_BIND(paged_msa_attention, PagedMsaAttentionArgs)
OPENMSA_BIND(combine, CombineArgs)
OPENMSA_BIND(captured_mass, CapturedMassArgs)
OPENMSA_BIND(paged_append, PagedAppendArgs)

namespace {

void set_workspace_limit(int64_t bytes) {
  guarded("set_workspace_limit", [&] { openmsa::set_workspace_limit(bytes); });
}
int64_t workspace_limit() { return openmsa::workspace_limit(); }
void set_check_inputs(bool enabled) { openmsa::set_check_inputs(enabled); }
bool check_inputs() { return openmsa::check_inputs(); }
void set_num_threads(int64_t threads) {
  // A number past the core's limit is as good as the limit: more than there are processors count as those.
  openmsa::set_num_threads(static_cast<int32_t>(std::clamp<int64_t>(threads, 0, 1024)));
}
int64_t num_threads() { return openmsa::num_threads(); }
tvm::ffi::String info() {
  std::string text;
  guarded("", [&] { text = openmsa::info(); });
  return text;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_workspace_limit, set_workspace_limit)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_limit, workspace_limit)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_check_inputs, set_check_inputs)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_inputs, check_inputs)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_num_threads, set_num_threads)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(num_threads, num_threads)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(info, info)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, [] { return tvm::ffi::String(openmsa_version()); })
