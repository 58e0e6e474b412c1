#include "api/checks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace openmsa {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();

struct AxisRule {
  const char* name;
  int64_t least, most;
};

// Head counts are bounded so that a view without elements cannot ask for an endless loop over its other axes.
constexpr int64_t kMaxHeads = 65536;
constexpr int64_t kMaxHeadDim = 256;

constexpr std::array<AxisRule, static_cast<size_t>(Axis::count)> kAxisRules{{
    {"S", 0, kInt32Max},
    {"Tq", 0, kInt64Max},
    {"Tk", 0, kInt64Max},
    {"Hq", 1, kMaxHeads},
    {"Hkv", 1, kMaxHeads},
    {"Hi", 1, kMaxHeads},
    {"Hik", 1, kMaxHeads},
    {"D", 1, kMaxHeadDim},
    {"Dv", 1, kMaxHeadDim},
    {"Di", 1, kMaxHeadDim},
    {"topk", 1, kInt32Max},
    {"B", 0, kInt32Max},
    {"B + 1", 1, kInt32Max},
    {"pages", 0, kInt64Max},
    {"block_size", 0, kInt64Max},
    {"max_pages", 0, kInt32Max},
    {"bytes", 0, kInt64Max},
}};

const AxisRule& rule(Axis axis) { return kAxisRules[static_cast<size_t>(axis)]; }

std::string describe(const int64_t* values, int32_t count) {
  std::string text = "[";
  for (int32_t axis = 0; axis < count; ++axis) text += join(axis == 0 ? "" : ", ", values[axis]);
  return text + "]";
}

std::string describe(Shape shape) {
  std::string text = "[";
  for (Axis axis : shape) text += join(text.size() == 1 ? "" : ", ", rule(axis).name);
  return text + "]";
}

std::string describe_device(int32_t type, int32_t index) {
  if (type == OPENMSA_CPU) return index == 0 ? "cpu" : join("cpu:", index);
  if (type == OPENMSA_GPU) return join("gpu:", index);
  return join("device type ", type);
}

// |stride| x (length - 1), the distance between an axis's first and last element. A view without elements is held to
// the same bounds, so that address arithmetic on it cannot overflow either.
bool axis_reach(const Tensor& tensor, int32_t axis, int64_t* reach) {
  const int64_t length = tensor.shape[axis];
  if (length <= 1) {
    *reach = 0;
    return true;
  }
  const int64_t stride = tensor.strides[axis];
  if (stride == std::numeric_limits<int64_t>::min()) return false;
  return !__builtin_mul_overflow(stride < 0 ? -stride : stride, length - 1, reach);
}

bool size_fits_int64(const Tensor& tensor) {
  int64_t elements = dtype_size(tensor.dtype);  // in bytes
  int64_t extent = 1;
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    int64_t reach = 0;
    if (__builtin_mul_overflow(elements, std::max<int64_t>(tensor.shape[axis], 1), &elements)) return false;
    if (!axis_reach(tensor, axis, &reach) || __builtin_add_overflow(extent, reach, &extent)) return false;
  }
  return !__builtin_mul_overflow(extent, dtype_size(tensor.dtype), &extent);
}

bool has_elements(const Tensor& tensor) {
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] == 0) return false;
  }
  return true;
}

// Axes in the order of their strides; each must step past all that the faster ones reach. A view that interleaves axes
// in other ways would be refused although its elements are distinct: no caller lays outputs out so.
bool overlaps_itself(const Tensor& tensor) {
  if (!has_elements(tensor)) return false;
  struct Step {
    int64_t stride = 0, reach = 0;
  };
  std::array<Step, OPENMSA_MAX_RANK> steps;
  size_t count = 0;
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] <= 1) continue;
    Step step{std::abs(tensor.strides[axis]), 0};
    axis_reach(tensor, axis, &step.reach);
    size_t place = count++;
    for (; place > 0 && steps[place - 1].stride > step.stride; --place) steps[place] = steps[place - 1];
    steps[place] = step;
  }
  int64_t extent = 1;
  for (size_t index = 0; index < count; ++index) {
    if (steps[index].stride < extent) return true;
    extent += steps[index].reach;
  }
  return false;
}

// int32 values of a layout where the host can read them: in place, or copied from the device.
class HostValues {
 public:
  HostValues(const Backend& backend, const int32_t* values, int64_t count, void* stream) : values_(values) {
    if (backend.device() == OPENMSA_CPU || count == 0) return;
    copy_.resize(static_cast<size_t>(count));
    backend.copy_to_host(copy_.data(), values, count * static_cast<int64_t>(sizeof(int32_t)), stream);
    values_ = copy_.data();
  }
  int64_t operator[](int64_t index) const { return values_[index]; }

 private:
  const int32_t* values_;
  std::vector<int32_t> copy_;
};

enum class End : uint8_t { at_total, within_total };

void check_offsets(const char* name, const HostValues& offsets, int64_t batch, const char* total_name, int64_t total,
                   End end) {
  if (offsets[0] != 0) fail_argument(name, ": got ", offsets[0], " at [0], expected 0");
  for (int64_t b = 1; b <= batch; ++b) {
    if (offsets[b] < offsets[b - 1]) {
      fail_argument(name, ": got ", offsets[b], " at [", b, "] after ", offsets[b - 1],
                    ", expected values that do not fall");
    }
    if (offsets[b] > total) {
      fail_argument(name, ": got ", offsets[b], " at [", b, "], expected at most ", total_name, " = ", total);
    }
  }
  if (end == End::at_total && offsets[batch] != total) {
    fail_argument(name, ": got ", offsets[batch], " at its end [", batch, "], expected ", total_name, " = ", total);
  }
}

void check_sequence_values(const Backend& backend, const SequenceLayout& layout, void* stream) {
  if (layout.cu_seqlens_q == nullptr) return;
  const HostValues offsets_q(backend, layout.cu_seqlens_q, layout.batch + 1, stream);
  const HostValues offsets_k(backend, layout.cu_seqlens_k, layout.batch + 1, stream);
  check_offsets("cu_seqlens_q", offsets_q, layout.batch, "Tq", layout.tokens_q, End::at_total);
  check_offsets("cu_seqlens_k", offsets_k, layout.batch, "Tk", layout.tokens_k, End::at_total);
  if (layout.k_starts == nullptr) return;
  const HostValues starts(backend, layout.k_starts, layout.batch, stream);
  for (int64_t b = 0; b < layout.batch; ++b) {
    if (starts[b] < 0 || starts[b] > offsets_k[b + 1]) {
      fail_argument("k_starts: got ", starts[b], " at [", b, "], expected 0 to cu_seqlens_k[", b + 1,
                    "] = ", offsets_k[b + 1]);
    }
  }
}

void check_request_values(const Backend& backend, const SequenceLayout& layout, int64_t page_size, void* stream) {
  // Rows after the last request are padding, so the offsets may end before Tq.
  const HostValues offsets_q(backend, layout.cu_seqlens_q, layout.batch + 1, stream);
  check_offsets("cu_seqlens_q", offsets_q, layout.batch, "Tq", layout.tokens_q, End::within_total);
  const HostValues lengths(backend, layout.seq_lens, layout.batch, stream);
  const int64_t most = layout.max_pages * page_size;
  for (int64_t b = 0; b < layout.batch; ++b) {
    if (lengths[b] < 0 || lengths[b] > most) {
      fail_argument("seq_lens: got ", lengths[b], " at [", b, "], expected 0 to ", most,
                    " (max_pages of block_table x block_size)");
    }
    const int64_t used_pages = (lengths[b] + page_size - 1) / page_size;
    const HostValues row(backend, layout.block_table + b * layout.block_table_stride, used_pages, stream);
    for (int64_t page = 0; page < used_pages; ++page) {
      if (row[page] < 0 || row[page] >= layout.pages) {
        fail_argument("block_table: got page ", row[page], " at [", b, ", ", page, "], expected 0 to ",
                      layout.pages - 1, " (the pool has ", layout.pages, " pages)");
      }
    }
  }
}

// Scores are float32 in every fast backend, so a factor must not vanish or overflow there.
bool usable_factor(double value) {
  return value > 0 && value <= static_cast<double>(std::numeric_limits<float>::max()) && static_cast<float>(value) > 0;
}

constexpr const char* kExpectedFactor = ", expected a finite number > 0 (in float32)";

bool check_values_of(const Backend& backend) { return backend.device() == OPENMSA_CPU || check_inputs(); }

}  // namespace

void Arguments::check_device(const char* name, const Tensor& tensor) {
  if ((tensor.device_type != OPENMSA_CPU && tensor.device_type != OPENMSA_GPU) || tensor.device_index < 0 ||
      (tensor.device_type == OPENMSA_CPU && tensor.device_index != 0)) {
    fail_argument(name, ": got ", describe_device(tensor.device_type, tensor.device_index),
                  ", expected cpu (index 0) or a gpu index >= 0");
  }
  if (device_argument_ == nullptr) {
    device_type_ = static_cast<openmsa_device_type>(tensor.device_type);
    device_index_ = tensor.device_index;
    device_argument_ = name;
  } else if (tensor.device_type != device_type_ || tensor.device_index != device_index_) {
    fail_argument(name, ": got ", describe_device(tensor.device_type, tensor.device_index), ", expected ",
                  describe_device(device_type_, device_index_), " as ", device_argument_);
  }
}

void Arguments::set_length(const char* name, Axis axis, int64_t length) {
  const auto index = static_cast<size_t>(axis);
  const AxisRule& limits = rule(axis);
  if (length < limits.least || length > limits.most) {
    if (limits.most == kInt64Max) {
      fail_argument(name, ": got ", limits.name, " = ", length, ", expected at least ", limits.least);
    }
    fail_argument(name, ": got ", limits.name, " = ", length, ", expected ", limits.least, " to ", limits.most);
  }
  lengths_[index] = length;
  origins_[index] = name;
}

void Arguments::check_shape(const char* name, const Tensor& tensor, Shape shape) {
  int32_t position = 0;
  for (Axis axis : shape) {
    const auto index = static_cast<size_t>(axis);
    const int64_t got = tensor.shape[position++];
    if (lengths_[index] == kUnset) {
      set_length(name, axis, got);
    } else if (got != lengths_[index]) {
      fail_argument(name, ": got shape ", describe(tensor.shape, tensor.rank), ", expected ", describe(shape), " with ",
                    rule(axis).name, " = ", lengths_[index], " (from ", origins_[index], ")");
    }
  }
}

void Arguments::check_tensor(const char* name, const Tensor& tensor, Shape shape, DataTypeSet types, Access access) {
  check_device(name, tensor);
  if (!types.contains(tensor.dtype)) {
    fail_argument(name, ": got ", dtype_name(tensor.dtype), ", expected ", types.names());
  }
  const auto rank = static_cast<int32_t>(shape.size());
  if (tensor.rank != rank) {
    fail_argument(name, ": got rank ", tensor.rank, ", expected ", rank, " (", describe(shape), ")");
  }
  for (int32_t axis = 0; axis < rank; ++axis) {
    if (tensor.shape[axis] < 0) {
      fail_argument(name, ": got shape ", describe(tensor.shape, rank), ", expected lengths >= 0");
    }
  }
  if (!size_fits_int64(tensor)) {
    fail_argument(name, ": got shape ", describe(tensor.shape, rank), " with strides ", describe(tensor.strides, rank),
                  ", expected a size in bytes that fits 64 bits");
  }
  check_shape(name, tensor, shape);
  if (rank > 0 && tensor.shape[rank - 1] > 1 && tensor.strides[rank - 1] != 1) {
    fail_argument(name, ": got stride ", tensor.strides[rank - 1],
                  " of the last axis, expected 1 (every other stride is free)");
  }
  if (access == Access::write && overlaps_itself(tensor)) {
    fail_argument(name, ": got strides ", describe(tensor.strides, rank), " for shape ", describe(tensor.shape, rank),
                  ", expected an output that does not overlap itself");
  }
  if (tensor.data == nullptr) {
    const bool needed = access == Access::read || purpose_ == Purpose::run;
    if (needed && has_elements(tensor)) {
      fail_argument(name, ": got null data for shape ", describe(tensor.shape, rank), ", expected memory");
    }
  } else if (reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(dtype_size(tensor.dtype)) != 0) {
    fail_argument(name, ": got an address that is not a multiple of ", dtype_size(tensor.dtype),
                  " bytes, expected one aligned for ", dtype_name(tensor.dtype));
  }
}

const Tensor& Arguments::require(const char* name, const Tensor* tensor, Shape shape, DataTypeSet types,
                                 Access access) {
  if (tensor == nullptr) fail_argument(name, ": missing, expected ", types.names(), " ", describe(shape));
  check_tensor(name, *tensor, shape, types, access);
  return *tensor;
}

const Tensor& Arguments::input(const char* name, const Tensor* tensor, Shape shape, DataTypeSet types) {
  return require(name, tensor, shape, types, Access::read);
}

const Tensor* Arguments::optional_input(const char* name, const Tensor* tensor, Shape shape, DataTypeSet types) {
  if (tensor != nullptr) check_tensor(name, *tensor, shape, types, Access::read);
  return tensor;
}

const Tensor& Arguments::output(const char* name, const Tensor* tensor, Shape shape, DataTypeSet types) {
  return require(name, tensor, shape, types, Access::write);
}

const Tensor* Arguments::optional_output(const char* name, const Tensor* tensor, Shape shape, DataTypeSet types) {
  if (tensor != nullptr) check_tensor(name, *tensor, shape, types, Access::write);
  return tensor;
}

void Arguments::check_divides(Axis divisor, Axis multiple) const {
  const int64_t small = length(divisor), large = length(multiple);
  if (small == kUnset || large == kUnset || large % small == 0) return;
  fail_argument(origins_[static_cast<size_t>(divisor)], ": got ", rule(divisor).name, " = ", small,
                ", expected a divisor of ", rule(multiple).name, " = ", large, " (from ",
                origins_[static_cast<size_t>(multiple)], ")");
}

void Arguments::check_head_groups() const {
  check_divides(Axis::heads_index, Axis::heads_q);
  check_divides(Axis::heads_kv, Axis::heads_index);
  check_divides(Axis::heads_index_k, Axis::heads_index);
}

namespace {

// `what` is how the message calls the number after the argument's name.
void check_block_size(const char* name, const char* what, int64_t block_size, openmsa_device_type device) {
  if (block_size != 128 && block_size != 64 && block_size != 32) {
    fail_argument(name, ": got ", what, block_size, ", expected 128 or 64 (or 32, on the cpu only)");
  }
  if (block_size == 32 && device != OPENMSA_CPU) {
    fail_unsupported(name, ": got ", what, "32 with ", device_name(device),
                     " tensors, expected 128 or 64 (32 is supported on the cpu only)");
  }
}

}  // namespace

int64_t Arguments::block_size(int64_t block_size) const {
  check_block_size("block_size", "", block_size, device_type_);
  return block_size;
}

int64_t Arguments::page_size() const {
  const int64_t rows = length(Axis::page_rows);
  check_block_size(origins_[static_cast<size_t>(Axis::page_rows)], "block_size = ", rows, device_type_);
  return rows;
}

void Arguments::selection(const openmsa_selection& selection, SelectParams& params) {
  if (selection.topk < 1 || selection.topk > kInt32Max) {
    fail_argument("topk: got ", selection.topk, ", expected an integer from 1 to ", kInt32Max);
  }
  if (selection.init_blocks < 0) {
    fail_argument("init_blocks: got ", selection.init_blocks, ", expected an integer >= 0");
  }
  if (selection.local_blocks < 0) {
    fail_argument("local_blocks: got ", selection.local_blocks, ", expected an integer >= 0");
  }
  params.topk = selection.topk;
  // No sequence has more blocks than int32 numbers, so larger counts mean the same.
  params.init_blocks = std::min(selection.init_blocks, kInt32Max);
  params.local_blocks = std::min(selection.local_blocks, kInt32Max);
  set_length("topk", Axis::topk, selection.topk);
}

double Arguments::scale(const char* name, const double* value, Axis dim) const {
  if (value == nullptr) return 1.0 / std::sqrt(static_cast<double>(length(dim)));
  if (!usable_factor(*value)) fail_argument(name, ": got ", *value, kExpectedFactor);
  return *value;
}

CacheScale Arguments::cache_scale(const char* name, const openmsa_cache_scale& scale, const char* cache_name,
                                  const Tensor& cache) {
  CacheScale result;
  if (scale.value == nullptr && scale.tensor == nullptr) return result;
  if (!is_float8(cache.dtype)) {
    fail_argument(name, ": got a factor for a ", dtype_name(cache.dtype), " ", cache_name,
                  ", expected none (factors are for float8_e4m3 caches)");
  }
  if (scale.tensor != nullptr) {
    result.device_value = static_cast<const float*>(input(name, scale.tensor, {}, kFloat32Type).data);
    return result;
  }
  if (!usable_factor(*scale.value)) fail_argument(name, ": got ", *scale.value, kExpectedFactor);
  result.value = *scale.value;
  return result;
}

SequenceLayout Arguments::sequences(const openmsa_sequences& sequences, int64_t block_size) {
  SequenceLayout layout;
  layout.tokens_q = length(Axis::tokens_q);
  layout.tokens_k = length(Axis::tokens_k);
  if (layout.tokens_k / block_size > kInt32Max) {
    fail_argument(origins_[static_cast<size_t>(Axis::tokens_k)], ": got Tk = ", layout.tokens_k, ", expected at most ",
                  kInt32Max, " blocks (block numbers are int32)");
  }
  if (sequences.cu_seqlens_q == nullptr && sequences.cu_seqlens_k == nullptr) {
    if (sequences.k_starts != nullptr) {
      fail_argument("k_starts: got a tensor without cu_seqlens_q and cu_seqlens_k, expected all three");
    }
    return layout;
  }
  if (sequences.cu_seqlens_q == nullptr || sequences.cu_seqlens_k == nullptr) {
    const char* missing = sequences.cu_seqlens_q == nullptr ? "cu_seqlens_q" : "cu_seqlens_k";
    const char* given = sequences.cu_seqlens_q == nullptr ? "cu_seqlens_k" : "cu_seqlens_q";
    fail_argument(missing, ": missing although ", given, " is given, expected both or neither");
  }
  const Tensor& offsets_q = input("cu_seqlens_q", sequences.cu_seqlens_q, {Axis::offsets}, kInt32Type);
  const Tensor& offsets_k = input("cu_seqlens_k", sequences.cu_seqlens_k, {Axis::offsets}, kInt32Type);
  layout.batch = length(Axis::offsets) - 1;
  layout.cu_seqlens_q = static_cast<const int32_t*>(offsets_q.data);
  layout.cu_seqlens_k = static_cast<const int32_t*>(offsets_k.data);
  set_length("cu_seqlens_q", Axis::batch, layout.batch);
  if (const Tensor* starts = optional_input("k_starts", sequences.k_starts, {Axis::batch}, kInt32Type)) {
    layout.k_starts = static_cast<const int32_t*>(starts->data);
  }
  return layout;
}

SequenceLayout Arguments::requests(const openmsa_requests& requests) {
  SequenceLayout layout;
  layout.paged = true;
  layout.tokens_q = length(Axis::tokens_q);
  layout.pages = length(Axis::pages);
  layout.tokens_k = layout.pages * length(Axis::page_rows);
  const Tensor& table = input("block_table", requests.block_table, {Axis::batch, Axis::max_pages}, kInt32Type);
  const Tensor& lengths = input("seq_lens", requests.seq_lens, {Axis::batch}, kInt32Type);
  layout.batch = length(Axis::batch);
  set_length("block_table", Axis::offsets, layout.batch + 1);
  const Tensor& offsets = input("cu_seqlens_q", requests.cu_seqlens_q, {Axis::offsets}, kInt32Type);
  layout.block_table = static_cast<const int32_t*>(table.data);
  layout.max_pages = length(Axis::max_pages);
  layout.block_table_stride = layout.max_pages > 0 ? table.strides[0] : 0;  // no address comes from an empty table
  layout.seq_lens = static_cast<const int32_t*>(lengths.data);
  layout.cu_seqlens_q = static_cast<const int32_t*>(offsets.data);
  return layout;
}

void Arguments::set_workspace(const Tensor& workspace, int64_t bytes_needed, Execution& execution) {
  check_tensor("workspace", workspace, {Axis::bytes}, kUint8Type, Access::write);
  if (workspace.shape[0] < bytes_needed) {
    fail_argument("workspace: got ", workspace.shape[0], " bytes, expected at least ", bytes_needed);
  }
  execution.workspace = workspace.data;
  execution.workspace_bytes = workspace.shape[0];
}

void check_same_type(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) {
  if (tensor.dtype == other.dtype) return;
  fail_argument(name, ": got ", dtype_name(tensor.dtype), ", expected ", dtype_name(other.dtype), " as ", other_name);
}

void check_cache_type(const char* name, const Tensor& cache, const char* rows_name, const Tensor& rows) {
  if (cache.dtype == rows.dtype || is_float8(cache.dtype)) return;
  fail_argument(name, ": got ", dtype_name(cache.dtype), ", expected ", dtype_name(rows.dtype), " as ", rows_name,
                ", or float8_e4m3");
}

void check_has_gradient(const char* name, const Tensor& tensor) {
  if (!is_float8(tensor.dtype)) return;
  fail_unsupported(name, ": got float8_e4m3, which has no gradient, expected float32, float16 or bfloat16");
}

void check_layout_values(const Backend& backend, const SequenceLayout& layout, int64_t page_size, void* stream) {
  if (!check_values_of(backend)) return;
  if (layout.paged) {
    check_request_values(backend, layout, page_size, stream);
  } else {
    check_sequence_values(backend, layout, stream);
  }
}

void check_cache_scale_values(const Backend& backend, const char* name, const CacheScale& scale, void* stream) {
  if (scale.device_value == nullptr || !check_values_of(backend)) return;
  float value = 0;
  if (backend.device() == OPENMSA_CPU) {
    value = *scale.device_value;
  } else {
    backend.copy_to_host(&value, scale.device_value, sizeof(value), stream);
  }
  if (!usable_factor(value)) fail_argument(name, ": got ", value, kExpectedFactor);
}

}  // namespace openmsa
