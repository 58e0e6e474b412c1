#include "cpp/api_calls.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "api/dtype.h"
#include "api/numeric.h"

namespace openmsa::tests {
namespace {

template <typename Slots>
auto& find(Slots& slots, const std::string& name) {
  const auto found = std::find_if(slots.begin(), slots.end(), [&](const auto& slot) { return slot.name == name; });
  if (found == slots.end()) throw std::logic_error("the call has no " + name);
  return *found;
}

template <typename Args>
class TypedCall final : public Call {
 public:
  TypedCall(openmsa_operation id, void (*function)(const Args&), openmsa_status (*c_function)(const Args*))
      : id_(id), function_(function), c_function_(c_function) {}

  Args args{};

 protected:
  void run_operation() override { function_(args); }
  int64_t ask_workspace_size() override { return openmsa::workspace_size(args); }
  openmsa_status run_c_operation() override { return c_function_(&args); }
  openmsa_status ask_workspace_size_c(int64_t* bytes) override { return openmsa_workspace_size(id_, &args, bytes); }

 private:
  openmsa_operation id_;
  void (*function_)(const Args&);
  openmsa_status (*c_function_)(const Args*);
};

// Writes value(n) as the n-th element of a row-major tensor of any float type.
template <typename Value>
void fill(const Tensor& tensor, int64_t elements, const Value& value) {
  for (int64_t n = 0; n < elements; ++n) {
    const float x = value(n);
    switch (tensor.dtype) {
      case OPENMSA_FLOAT32:
        static_cast<float*>(tensor.data)[n] = x;
        break;
      case OPENMSA_FLOAT16:
        static_cast<uint16_t*>(tensor.data)[n] = float_to_float16(x);
        break;
      case OPENMSA_BFLOAT16:
        static_cast<uint16_t*>(tensor.data)[n] = float_to_bfloat16(x);
        break;
      default:
        static_cast<uint8_t*>(tensor.data)[n] = float_to_float8_e4m3(x);
    }
  }
}

// Adds the parts of a call; shapes are those of openmsa.h.
class Builder {
 public:
  Builder(Call& call, const ProblemSize& size) : call_(call), s_(size) {
    tokens_q_ = std::accumulate(s_.queries.begin(), s_.queries.end(), int64_t{0});
    tokens_k_ = std::accumulate(s_.keys.begin(), s_.keys.end(), int64_t{0});
    for (int32_t keys : s_.keys) max_pages_ = std::max(max_pages_, (keys + s_.block - 1) / s_.block);
  }

  using Field = const Tensor*&;

  TensorSlot& add(const char* name, Field field, DataType type, const std::vector<int64_t>& shape, bool output = false,
                  bool optional = false) {
    TensorSlot& slot = call_.tensors.emplace_back();
    slot.name = name;
    slot.field = &field;
    slot.output = output;
    slot.optional = optional;
    place(slot, type, shape, {}, kPoison);
    return slot;
  }
  void input(const char* name, Field field, DataType type, const std::vector<int64_t>& shape, bool optional = false) {
    const TensorSlot& slot = add(name, field, type, shape, false, optional);
    const auto seed = static_cast<float>(call_.tensors.size());
    fill(slot.view, slot.memory.fetch().elements(),
         [&](int64_t n) { return std::sin(1.7f * seed + 0.37f * static_cast<float>(n)); });
  }
  void integers(const char* name, Field field, const std::vector<int64_t>& shape, const std::vector<int32_t>& values,
                bool optional = false) {
    const TensorSlot& slot = add(name, field, OPENMSA_INT32, shape, false, optional);
    std::copy(values.begin(), values.end(), static_cast<int32_t*>(slot.view.data));
  }
  void output(const char* name, Field field, DataType type, const std::vector<int64_t>& shape, bool optional = false) {
    add(name, field, type, shape, true, optional);
  }
  void number(const char* name, int64_t& field, int64_t value) {
    call_.numbers.push_back({name, value, &field, nullptr});
  }
  void flag(const char* name, int32_t& field) { call_.numbers.push_back({name, 0, nullptr, &field}); }
  void factor(const char* name, const double*& field) { call_.factors.push_back({name, &field, 0.5, false}); }

  void sequences(openmsa_sequences& sequences) {
    const auto batch = static_cast<int64_t>(s_.queries.size());
    integers("cu_seqlens_q", sequences.cu_seqlens_q, {batch + 1}, offsets(s_.queries), true);
    integers("cu_seqlens_k", sequences.cu_seqlens_k, {batch + 1}, offsets(s_.keys), true);
    std::vector<int32_t> starts = offsets(s_.keys);
    starts.pop_back();
    integers("k_starts", sequences.k_starts, {batch}, starts, true);
  }
  void requests(openmsa_requests& requests) {
    const auto batch = static_cast<int64_t>(s_.queries.size());
    std::vector<int32_t> table(static_cast<size_t>(batch * max_pages_));
    std::iota(table.rbegin(), table.rend(), 0);
    integers("block_table", requests.block_table, {batch, max_pages_}, table);
    integers("seq_lens", requests.seq_lens, {batch}, s_.keys);
    integers("cu_seqlens_q", requests.cu_seqlens_q, {batch + 1}, offsets(s_.queries));
  }
  // Paged calls have rows that belong to no request. Call first.
  void pad_queries() { tokens_q_ += s_.padded_queries; }
  void selection(openmsa_selection& selection) {
    number("topk", selection.topk, s_.topk);
    number("init_blocks", selection.init_blocks, 1);
    number("local_blocks", selection.local_blocks, 1);
  }
  void cache_scale(const char* name, const char* tensor_name, openmsa_cache_scale& scale) {
    factor(name, scale.value);
    call_.factors.back().present = s_.cache_type == OPENMSA_FLOAT8_E4M3;
    input(tensor_name, scale.tensor, OPENMSA_FLOAT32, {}, true);
    call_.tensors.back().present = false;
    fill(call_.tensors.back().view, 1, [](int64_t) { return 0.5f; });
  }
  template <typename Args>
  void execution(Args& args) {
    add("workspace", args.execution.workspace, OPENMSA_UINT8, {4096}, true, true);
  }

  std::vector<int64_t> q_shape() const { return {tokens_q_, s_.heads_q, s_.dim}; }
  std::vector<int64_t> k_shape() const { return {tokens_k_, s_.heads_kv, s_.dim}; }
  std::vector<int64_t> v_shape() const { return {tokens_k_, s_.heads_kv, s_.dim_v}; }
  std::vector<int64_t> index_q_shape() const { return {tokens_q_, s_.heads_index, s_.dim_index}; }
  std::vector<int64_t> index_k_shape() const { return {tokens_k_, s_.heads_index_k, s_.dim_index}; }
  std::vector<int64_t> cache_shape(int64_t heads, int64_t dim) const {
    return {static_cast<int64_t>(s_.queries.size()) * max_pages_, s_.block, heads, dim};
  }
  std::vector<int64_t> out_shape() const { return {tokens_q_, s_.heads_q, s_.dim_v}; }
  std::vector<int64_t> lse_shape() const { return {s_.heads_q, tokens_q_}; }
  std::vector<int64_t> indices_shape() const { return {s_.heads_index, tokens_q_, s_.topk}; }
  std::vector<int64_t> index_lse_shape() const { return {s_.heads_index, tokens_q_}; }

  template <typename Args>
  void qkv(Args& args) {
    input("q", args.q, s_.type, q_shape());
    input("k", args.k, s_.type, k_shape());
    input("v", args.v, s_.type, v_shape());
  }
  template <typename Args>
  void index_qk(Args& args) {
    input("index_q", args.index_q, s_.index_type, index_q_shape());
    input("index_k", args.index_k, s_.index_type, index_k_shape());
  }
  template <typename Args>
  void paged_qkv(Args& args) {
    input("q", args.q, s_.type, q_shape());
    input("k_cache", args.k_cache, s_.cache_type, cache_shape(s_.heads_kv, s_.dim));
    input("v_cache", args.v_cache, s_.cache_type, cache_shape(s_.heads_kv, s_.dim_v));
  }
  template <typename Args>
  void paged_index_qk(Args& args) {
    input("index_q", args.index_q, s_.index_type, index_q_shape());
    input("index_k_cache", args.index_k_cache, s_.index_type, cache_shape(s_.heads_index_k, s_.dim_index));
  }
  void chosen(Field field, bool optional = false) {
    std::vector<int32_t> values(static_cast<size_t>(s_.heads_index * tokens_q_ * s_.topk));
    for (size_t n = 0; n < values.size(); ++n) values[n] = static_cast<int32_t>(n % 4) - 1;
    integers("indices", field, indices_shape(), values, optional);
  }
  template <typename Args>
  void forward_results(Args& args) {
    input("out", args.out, s_.type, out_shape());
    input("lse", args.lse, OPENMSA_FLOAT32, lse_shape());
  }
  template <typename Args>
  void attention_gradients(Args& args, bool optional) {
    input("d_out", args.d_out, s_.type, out_shape(), optional);
    output("d_q", args.d_q, s_.type, q_shape());
    output("d_k", args.d_k, s_.type, k_shape());
    output("d_v", args.d_v, s_.type, v_shape());
  }

  void build(openmsa_select_blocks_args& a) {
    index_qk(a), sequences(a.sequences), selection(a.selection);
    number("block_size", a.block_size, s_.block), factor("scale", a.scale), execution(a);
    output("indices", a.indices, OPENMSA_INT32, indices_shape());
    output("index_lse", a.index_lse, OPENMSA_FLOAT32, index_lse_shape(), true);
  }
  void build(openmsa_sparse_attention_args& a) {
    qkv(a), chosen(a.indices), sequences(a.sequences);
    number("block_size", a.block_size, s_.block), factor("scale", a.scale), execution(a);
    output("out", a.out, s_.type, out_shape());
    output("lse", a.lse, OPENMSA_FLOAT32, lse_shape(), true);
  }
  void build(openmsa_sparse_attention_backward_args& a) {
    qkv(a), chosen(a.indices), forward_results(a), sequences(a.sequences);
    number("block_size", a.block_size, s_.block), factor("scale", a.scale), execution(a);
    flag("deterministic", a.deterministic);
    attention_gradients(a, false);
  }
  void build(openmsa_msa_attention_args& a) {
    qkv(a), index_qk(a), sequences(a.sequences), selection(a.selection);
    number("block_size", a.block_size, s_.block), factor("scale", a.scale), factor("index_scale", a.index_scale);
    execution(a), flag("warmup", a.warmup);
    output("out", a.out, s_.type, out_shape());
    output("lse", a.lse, OPENMSA_FLOAT32, lse_shape());
    output("indices", a.indices, OPENMSA_INT32, indices_shape());
    output("index_lse", a.index_lse, OPENMSA_FLOAT32, index_lse_shape());
    output("kl", a.kl, OPENMSA_FLOAT32, {}, true);
  }
  void build(openmsa_msa_attention_backward_args& a) {
    qkv(a), index_qk(a), forward_results(a), chosen(a.indices), sequences(a.sequences);
    input("index_lse", a.index_lse, OPENMSA_FLOAT32, index_lse_shape());
    input("d_kl", a.d_kl, OPENMSA_FLOAT32, {}, true);
    number("block_size", a.block_size, s_.block), factor("scale", a.scale), factor("index_scale", a.index_scale);
    execution(a), flag("warmup", a.warmup), flag("deterministic", a.deterministic);
    attention_gradients(a, true);
    output("d_index_q", a.d_index_q, s_.index_type, index_q_shape());
    output("d_index_k", a.d_index_k, s_.index_type, index_k_shape());
    output("kl", a.kl, OPENMSA_FLOAT32, {}, true);
  }
  void build(openmsa_paged_select_blocks_args& a) {
    pad_queries(), paged_index_qk(a), selection(a.selection);
    factor("scale", a.scale), execution(a);
    output("indices", a.indices, OPENMSA_INT32, indices_shape());
    output("index_lse", a.index_lse, OPENMSA_FLOAT32, index_lse_shape(), true);
    requests(a.requests);
  }
  void build(openmsa_paged_sparse_attention_args& a) {
    pad_queries(), paged_qkv(a), chosen(a.indices), factor("scale", a.scale), execution(a);
    cache_scale("k_scale", "k_scale tensor", a.k_scale), cache_scale("v_scale", "v_scale tensor", a.v_scale);
    output("out", a.out, s_.type, out_shape());
    output("lse", a.lse, OPENMSA_FLOAT32, lse_shape(), true);
    requests(a.requests);
  }
  void build(openmsa_paged_msa_attention_args& a) {
    pad_queries(), paged_qkv(a), paged_index_qk(a), selection(a.selection);
    factor("scale", a.scale), factor("index_scale", a.index_scale), execution(a);
    cache_scale("k_scale", "k_scale tensor", a.k_scale), cache_scale("v_scale", "v_scale tensor", a.v_scale);
    output("out", a.out, s_.type, out_shape());
    output("lse", a.lse, OPENMSA_FLOAT32, lse_shape());
    output("indices", a.indices, OPENMSA_INT32, indices_shape());
    requests(a.requests);
  }
  void build(openmsa_combine_args& a) {
    input("outs", a.outs, s_.type, {s_.splits, tokens_q_, s_.heads_q, s_.dim_v});
    input("lses", a.lses, OPENMSA_FLOAT32, {s_.splits, s_.heads_q, tokens_q_});
    execution(a);
    output("out", a.out, s_.type, out_shape());
    output("lse", a.lse, OPENMSA_FLOAT32, lse_shape());
  }
  void build(openmsa_captured_mass_args& a) {
    input("q", a.q, s_.type, q_shape());
    input("k", a.k, s_.type, k_shape());
    chosen(a.indices), sequences(a.sequences);
    number("block_size", a.block_size, s_.block), factor("scale", a.scale), execution(a);
    output("share", a.share, OPENMSA_FLOAT32, index_lse_shape());
    output("best", a.best, OPENMSA_FLOAT32, index_lse_shape());
  }
  void build(openmsa_paged_append_args& a) {
    pad_queries();
    input("k", a.k, s_.type, {tokens_q_, s_.heads_kv, s_.dim});
    input("v", a.v, s_.type, {tokens_q_, s_.heads_kv, s_.dim_v});
    input("index_k", a.index_k, s_.index_type, {tokens_q_, s_.heads_index_k, s_.dim_index});
    cache_scale("k_scale", "k_scale tensor", a.k_scale), cache_scale("v_scale", "v_scale tensor", a.v_scale);
    execution(a);
    output("k_cache", a.k_cache, s_.cache_type, cache_shape(s_.heads_kv, s_.dim));
    output("v_cache", a.v_cache, s_.cache_type, cache_shape(s_.heads_kv, s_.dim_v));
    output("index_k_cache", a.index_k_cache, s_.index_type, cache_shape(s_.heads_index_k, s_.dim_index));
    requests(a.requests);
  }

 private:
  static std::vector<int32_t> offsets(const std::vector<int32_t>& lengths) {
    std::vector<int32_t> result(1, 0);
    for (int32_t length : lengths) result.push_back(result.back() + length);
    return result;
  }

  Call& call_;
  const ProblemSize& s_;
  int64_t tokens_q_ = 0, tokens_k_ = 0, max_pages_ = 0;
};

template <typename Args>
std::unique_ptr<Call> make(const ProblemSize& size, openmsa_operation id, void (*function)(const Args&),
                           openmsa_status (*c_function)(const Args*)) {
  auto call = std::make_unique<TypedCall<Args>>(id, function, c_function);
  Builder(*call, size).build(call->args);
  return call;
}

}  // namespace

TensorSlot& Call::tensor(const std::string& name) { return find(tensors, name); }
NumberSlot& Call::number(const std::string& name) { return find(numbers, name); }
FactorSlot& Call::factor(const std::string& name) { return find(factors, name); }

void Call::bind() {
  for (TensorSlot& slot : tensors) *slot.field = slot.present ? &slot.view : nullptr;
  for (FactorSlot& slot : factors) *slot.field = slot.present ? &slot.value : nullptr;
  for (NumberSlot& slot : numbers) {
    if (slot.field64 != nullptr) *slot.field64 = slot.value;
    if (slot.field32 != nullptr) *slot.field32 = static_cast<int32_t>(slot.value);
  }
}

std::unique_ptr<Call> make_call(const std::string& operation, const ProblemSize& size) {
  const auto found = std::find(kOperationNames.begin(), kOperationNames.end(), operation);
  switch (static_cast<openmsa_operation>(found - kOperationNames.begin())) {
    case OPENMSA_SELECT_BLOCKS:
      return make(size, OPENMSA_SELECT_BLOCKS, select_blocks, openmsa_select_blocks);
    case OPENMSA_SPARSE_ATTENTION:
      return make(size, OPENMSA_SPARSE_ATTENTION, sparse_attention, openmsa_sparse_attention);
    case OPENMSA_SPARSE_ATTENTION_BACKWARD:
      return make(size, OPENMSA_SPARSE_ATTENTION_BACKWARD, sparse_attention_backward,
                  openmsa_sparse_attention_backward);
    case OPENMSA_MSA_ATTENTION:
      return make(size, OPENMSA_MSA_ATTENTION, msa_attention, openmsa_msa_attention);
    case OPENMSA_MSA_ATTENTION_BACKWARD:
      return make(size, OPENMSA_MSA_ATTENTION_BACKWARD, msa_attention_backward, openmsa_msa_attention_backward);
    case OPENMSA_PAGED_SELECT_BLOCKS:
      return make(size, OPENMSA_PAGED_SELECT_BLOCKS, paged_select_blocks, openmsa_paged_select_blocks);
    case OPENMSA_PAGED_SPARSE_ATTENTION:
      return make(size, OPENMSA_PAGED_SPARSE_ATTENTION, paged_sparse_attention, openmsa_paged_sparse_attention);
    case OPENMSA_PAGED_MSA_ATTENTION:
      return make(size, OPENMSA_PAGED_MSA_ATTENTION, paged_msa_attention, openmsa_paged_msa_attention);
    case OPENMSA_COMBINE:
      return make(size, OPENMSA_COMBINE, combine, openmsa_combine);
    case OPENMSA_CAPTURED_MASS:
      return make(size, OPENMSA_CAPTURED_MASS, captured_mass, openmsa_captured_mass);
    case OPENMSA_PAGED_APPEND:
      return make(size, OPENMSA_PAGED_APPEND, paged_append, openmsa_paged_append);
  }
  throw std::logic_error("no operation " + operation);
}

void place(TensorSlot& slot, DataType dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
           unsigned char fill) {
  slot.memory = cases::PlacedTensor(cases::cpu_memory(), cases::make_host_tensor(dtype, shape, strides, fill));
  slot.view = *slot.memory.tensor();
}

}  // namespace openmsa::tests
