#include "cli/verify_problem.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "cli/errors.h"
#include "cli/random.h"

namespace openmsa::cli {
namespace {

constexpr double kCacheScale = 0.5;

Array integers(const std::vector<int32_t>& values) {
  Array array = make_array(host_device(), OPENMSA_INT32, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), array.data<int32_t>());
  return array;
}

Array offsets_of(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> offsets{0};
  for (const int32_t length : lengths) offsets.push_back(offsets.back() + length);
  return integers(offsets);
}

// The outputs of one operation: made on the device, brought back at the end.
class Outputs {
 public:
  explicit Outputs(const VerifyInputs& inputs) : inputs_(inputs) {}

  const Tensor* add(const char* name, int32_t dtype, const Shape& shape) {
    arrays_[name] = make_array(*inputs_.device, dtype, shape);
    return &arrays_[name].tensor;
  }
  const Tensor* like(const char* name, const Array& array) {
    const Tensor& tensor = array.tensor;
    return add(name, tensor.dtype, Shape(tensor.shape, tensor.shape + tensor.rank));
  }
  // Starts as a copy.
  const Tensor* copy(const char* name, const Array& array) {
    arrays_[name] = copy_to(*inputs_.device, array);
    return &arrays_[name].tensor;
  }
  const Tensor* out() {
    return add("out", inputs_.dtype, {inputs_.tokens_q, inputs_.shape.heads_q, inputs_.shape.dim});
  }
  const Tensor* lse() { return add("lse", OPENMSA_FLOAT32, {inputs_.shape.heads_q, inputs_.tokens_q}); }
  const Tensor* of_index_heads(const char* name) {
    return add(name, OPENMSA_FLOAT32, {inputs_.shape.heads_index, inputs_.tokens_q});
  }
  const Tensor* indices() {
    return add("indices", OPENMSA_INT32, {inputs_.shape.heads_index, inputs_.tokens_q, inputs_.shape.topk});
  }
  const Tensor* scalar(const char* name) { return add(name, OPENMSA_FLOAT32, {}); }

  Results fetch() const {
    inputs_.device->synchronize();
    Results results;
    for (const auto& [name, array] : arrays_) {
      Array host = make_array(host_device(), array.tensor.dtype,
                              Shape(array.tensor.shape, array.tensor.shape + array.tensor.rank));
      inputs_.device->download(host.tensor.data, array.tensor.data, array.bytes());
      results.emplace_back(name, std::move(host));
    }
    return results;
  }

 private:
  const VerifyInputs& inputs_;
  std::map<std::string, Array> arrays_;  // whose elements keep their place
};

openmsa_selection selection_of(const VerifyInputs& in) {
  return {in.shape.topk, in.shape.init_blocks, in.shape.local_blocks};
}
openmsa_sequences sequences_of(const VerifyInputs& in) {
  return {in.cu_seqlens_q.pointer(), in.cu_seqlens_k.pointer(), nullptr};
}
openmsa_requests requests_of(const VerifyInputs& in) {
  return {in.block_table.pointer(), in.seq_lens.pointer(), in.cu_seqlens_q.pointer()};
}

template <typename Args>
void set_attention(const VerifyInputs& in, Args* args) {
  args->q = in.q.pointer();
  args->k = in.k.pointer();
  args->v = in.v.pointer();
  args->sequences = sequences_of(in);
  args->block_size = in.shape.block_size;
  args->execution.stream = in.device->stream();
}

template <typename Args>
void set_index_branch(const VerifyInputs& in, Args* args) {
  args->index_q = in.index_q.pointer();
  args->index_k = in.index_k.pointer();
}

template <typename Args>
void set_paged_attention(const VerifyInputs& in, bool float8, Args* args) {
  args->q = in.q.pointer();
  args->k_cache = float8 ? in.float8_k_cache.pointer() : in.k_cache.pointer();
  args->v_cache = float8 ? in.float8_v_cache.pointer() : in.v_cache.pointer();
  if (float8) args->k_scale.value = args->v_scale.value = &kCacheScale;
  args->requests = requests_of(in);
  args->execution.stream = in.device->stream();
}

Results run_select(const VerifyInputs& in) {
  Outputs outputs(in);
  SelectBlocksArgs args;
  set_index_branch(in, &args);
  args.sequences = sequences_of(in);
  args.selection = selection_of(in);
  args.block_size = in.shape.block_size;
  args.execution.stream = in.device->stream();
  args.indices = outputs.indices();
  args.index_lse = outputs.of_index_heads("index_lse");
  select_blocks(args);
  return outputs.fetch();
}

Results run_attend(const VerifyInputs& in, const Results& earlier) {
  Outputs outputs(in);
  const Array indices = copy_to(*in.device, result_named(earlier, "indices"));
  SparseAttentionArgs args;
  set_attention(in, &args);
  args.indices = indices.pointer();
  args.out = outputs.out();
  args.lse = outputs.lse();
  sparse_attention(args);
  return outputs.fetch();
}

Results run_attend_backward(const VerifyInputs& in, const Results& earlier) {
  Outputs outputs(in);
  const Array indices = copy_to(*in.device, result_named(earlier, "indices"));
  const Array out = copy_to(*in.device, result_named(earlier, "out")),
              lse = copy_to(*in.device, result_named(earlier, "lse"));
  SparseAttentionBackwardArgs args;
  set_attention(in, &args);
  args.indices = indices.pointer();
  args.out = out.pointer();
  args.lse = lse.pointer();
  args.d_out = in.d_out.pointer();
  args.deterministic = 1;
  args.d_q = outputs.like("d_q", in.q);
  args.d_k = outputs.like("d_k", in.k);
  args.d_v = outputs.like("d_v", in.v);
  sparse_attention_backward(args);
  return outputs.fetch();
}

Results run_msa(const VerifyInputs& in, bool warmup) {
  Outputs outputs(in);
  MsaAttentionArgs args;
  set_attention(in, &args);
  set_index_branch(in, &args);
  args.selection = selection_of(in);
  args.warmup = warmup ? 1 : 0;
  args.out = outputs.out();
  args.lse = outputs.lse();
  args.indices = warmup ? nullptr : outputs.indices();
  args.index_lse = outputs.of_index_heads("index_lse");
  args.kl = outputs.scalar("kl");
  msa_attention(args);
  return outputs.fetch();
}

Results run_msa_backward(const VerifyInputs& in, bool warmup, const Results& earlier) {
  Outputs outputs(in);
  const auto earlier_array = [&](const char* name) { return copy_to(*in.device, result_named(earlier, name)); };
  const Array out = earlier_array("out"), lse = earlier_array("lse"), index_lse = earlier_array("index_lse");
  const Array indices = warmup ? Array() : earlier_array("indices");
  const bool index_gradient = in.index_dtype != OPENMSA_FLOAT8_E4M3;
  MsaAttentionBackwardArgs args;
  set_attention(in, &args);
  set_index_branch(in, &args);
  args.warmup = warmup ? 1 : 0;
  args.deterministic = 1;
  args.out = out.pointer();
  args.lse = lse.pointer();
  args.indices = indices.pointer();
  args.index_lse = index_lse.pointer();
  args.d_out = in.d_out.pointer();
  args.d_q = outputs.like("d_q", in.q);
  args.d_k = outputs.like("d_k", in.k);
  args.d_v = outputs.like("d_v", in.v);
  if (index_gradient) {
    args.d_kl = in.d_kl.pointer();
    args.d_index_q = outputs.like("d_index_q", in.index_q);
    args.d_index_k = outputs.like("d_index_k", in.index_k);
  }
  args.kl = outputs.scalar("kl");
  msa_attention_backward(args);
  return outputs.fetch();
}

Results run_paged_select(const VerifyInputs& in) {
  Outputs outputs(in);
  PagedSelectBlocksArgs args;
  args.index_q = in.index_q.pointer();
  args.index_k_cache = in.index_k_cache.pointer();
  args.requests = requests_of(in);
  args.selection = selection_of(in);
  args.execution.stream = in.device->stream();
  args.indices = outputs.indices();
  args.index_lse = outputs.of_index_heads("index_lse");
  paged_select_blocks(args);
  return outputs.fetch();
}

Results run_paged_attend(const VerifyInputs& in, bool float8, const Results& earlier) {
  Outputs outputs(in);
  const Array indices = copy_to(*in.device, result_named(earlier, "indices"));
  PagedSparseAttentionArgs args;
  set_paged_attention(in, float8, &args);
  args.indices = indices.pointer();
  args.out = outputs.out();
  args.lse = outputs.lse();
  paged_sparse_attention(args);
  return outputs.fetch();
}

Results run_paged_msa(const VerifyInputs& in, bool float8) {
  Outputs outputs(in);
  PagedMsaAttentionArgs args;
  set_paged_attention(in, float8, &args);
  args.index_q = in.index_q.pointer();
  args.index_k_cache = in.index_k_cache.pointer();
  args.selection = selection_of(in);
  args.out = outputs.out();
  args.lse = outputs.lse();
  args.indices = outputs.indices();
  paged_msa_attention(args);
  return outputs.fetch();
}

Results run_paged_append(const VerifyInputs& in, bool float8) {
  Outputs outputs(in);
  PagedAppendArgs args;
  args.k = in.new_k.pointer();
  args.v = in.new_v.pointer();
  args.index_k = in.new_index_k.pointer();
  if (float8) args.k_scale.value = args.v_scale.value = &kCacheScale;
  args.requests = requests_of(in);
  args.execution.stream = in.device->stream();
  args.k_cache = outputs.copy("k_cache", float8 ? in.float8_k_cache : in.k_cache);
  args.v_cache = outputs.copy("v_cache", float8 ? in.float8_v_cache : in.v_cache);
  args.index_k_cache = outputs.copy("index_k_cache", in.index_k_cache);
  paged_append(args);
  return outputs.fetch();
}

Results run_combine(const VerifyInputs& in) {
  Outputs outputs(in);
  CombineArgs args;
  args.outs = in.outs.pointer();
  args.lses = in.lses.pointer();
  args.execution.stream = in.device->stream();
  args.out = outputs.out();
  args.lse = outputs.lse();
  combine(args);
  return outputs.fetch();
}

Results run_captured_mass(const VerifyInputs& in, const Results& earlier) {
  Outputs outputs(in);
  const Array indices = copy_to(*in.device, result_named(earlier, "indices"));
  CapturedMassArgs args;
  args.q = in.q.pointer();
  args.k = in.k.pointer();
  args.indices = indices.pointer();
  args.sequences = sequences_of(in);
  args.block_size = in.shape.block_size;
  args.execution.stream = in.device->stream();
  args.share = outputs.of_index_heads("share");
  args.best = outputs.of_index_heads("best");
  captured_mass(args);
  return outputs.fetch();
}

}  // namespace

VerifyInputs::VerifyInputs(const VerifyShape& shape_, int32_t dtype_, int32_t index_dtype_, IndexVectors vectors)
    : shape(shape_), dtype(dtype_), index_dtype(index_dtype_), device(&host_device()) {
  const VerifyShape& s = shape;
  tokens_q = std::accumulate(s.queries.begin(), s.queries.end(), int64_t{0});
  tokens_k = std::accumulate(s.keys.begin(), s.keys.end(), int64_t{0});
  const auto index_vectors = vectors == IndexVectors::integers ? random_integers : random_array;
  uint64_t seed = 0;
  q = random_array(dtype, {tokens_q, s.heads_q, s.dim}, ++seed);
  k = random_array(dtype, {tokens_k, s.heads_kv, s.dim}, ++seed);
  v = random_array(dtype, {tokens_k, s.heads_kv, s.dim}, ++seed);
  index_q = index_vectors(index_dtype, {tokens_q, s.heads_index, s.dim}, ++seed);
  index_k = index_vectors(index_dtype, {tokens_k, s.heads_index_k, s.dim}, ++seed);
  d_out = random_array(dtype, {tokens_q, s.heads_q, s.dim}, ++seed);
  d_kl = make_array(host_device(), OPENMSA_FLOAT32, {});
  *d_kl.data<float>() = 1;
  cu_seqlens_q = offsets_of(s.queries);
  cu_seqlens_k = offsets_of(s.keys);

  int64_t pages = 0, most = 1;
  for (const int32_t length : s.keys) {
    const int64_t needed = (length + s.block_size - 1) / s.block_size;
    pages += needed;
    most = std::max(most, needed);
  }
  const auto pool = [&](int32_t type, int64_t heads, auto make) {
    return make(type, Shape{std::max<int64_t>(pages, 1), s.block_size, heads, s.dim}, ++seed);
  };
  k_cache = pool(dtype, s.heads_kv, random_array);
  v_cache = pool(dtype, s.heads_kv, random_array);
  index_k_cache = pool(index_dtype, s.heads_index_k, index_vectors);
  float8_k_cache = pool(OPENMSA_FLOAT8_E4M3, s.heads_kv, random_array);
  float8_v_cache = pool(OPENMSA_FLOAT8_E4M3, s.heads_kv, random_array);
  const auto requests = static_cast<int64_t>(s.keys.size());
  block_table = make_array(host_device(), OPENMSA_INT32, {requests, most});
  seq_lens = integers(s.keys);
  // The last page first: no request's pages stand in the order of its keys.
  int64_t next = pages;
  for (int64_t request = 0; request < requests; ++request) {
    for (int64_t page = 0; page < most; ++page) {
      const bool used = page * s.block_size < s.keys[static_cast<size_t>(request)];
      block_table.data<int32_t>()[request * most + page] = used ? static_cast<int32_t>(--next) : -1;
    }
  }
  new_k = random_array(dtype, {tokens_q, s.heads_kv, s.dim}, ++seed);
  new_v = random_array(dtype, {tokens_q, s.heads_kv, s.dim}, ++seed);
  new_index_k = index_vectors(index_dtype, {tokens_q, s.heads_index_k, s.dim}, ++seed);
  outs = random_array(dtype, {3, tokens_q, s.heads_q, s.dim}, ++seed);
  lses = random_array(OPENMSA_FLOAT32, {3, s.heads_q, tokens_q}, ++seed);
}

VerifyInputs VerifyInputs::on(Device& other) const {
  VerifyInputs moved = *this;
  moved.device = &other;
  if (&other == device) return moved;
  for (Array VerifyInputs::*array : {&VerifyInputs::q,
                                     &VerifyInputs::k,
                                     &VerifyInputs::v,
                                     &VerifyInputs::index_q,
                                     &VerifyInputs::index_k,
                                     &VerifyInputs::d_out,
                                     &VerifyInputs::d_kl,
                                     &VerifyInputs::cu_seqlens_q,
                                     &VerifyInputs::cu_seqlens_k,
                                     &VerifyInputs::k_cache,
                                     &VerifyInputs::v_cache,
                                     &VerifyInputs::index_k_cache,
                                     &VerifyInputs::float8_k_cache,
                                     &VerifyInputs::float8_v_cache,
                                     &VerifyInputs::block_table,
                                     &VerifyInputs::seq_lens,
                                     &VerifyInputs::new_k,
                                     &VerifyInputs::new_v,
                                     &VerifyInputs::new_index_k,
                                     &VerifyInputs::outs,
                                     &VerifyInputs::lses}) {
    moved.*array = copy_to(other, this->*array);
  }
  return moved;
}

const Array& result_named(const Results& results, const std::string& name) {
  for (const auto& [result, array] : results) {
    if (result == name) return array;
  }
  throw Error(OPENMSA_INTERNAL_ERROR, "verify: no result " + name);
}

Results run_operation(const std::string& operation, const VerifyInputs& inputs, const Results& earlier) {
  if (operation == "select_blocks") return run_select(inputs);
  if (operation == "sparse_attention") return run_attend(inputs, earlier);
  if (operation == "sparse_attention_backward") return run_attend_backward(inputs, earlier);
  if (operation == "msa_attention") return run_msa(inputs, false);
  if (operation == "msa_attention warm-up") return run_msa(inputs, true);
  if (operation == "msa_attention_backward") return run_msa_backward(inputs, false, earlier);
  if (operation == "msa_attention_backward warm-up") return run_msa_backward(inputs, true, earlier);
  if (operation == "paged_select_blocks") return run_paged_select(inputs);
  if (operation == "paged_sparse_attention") return run_paged_attend(inputs, false, earlier);
  if (operation == "paged_sparse_attention fp8") return run_paged_attend(inputs, true, earlier);
  if (operation == "paged_msa_attention") return run_paged_msa(inputs, false);
  if (operation == "paged_msa_attention fp8") return run_paged_msa(inputs, true);
  if (operation == "paged_append") return run_paged_append(inputs, false);
  if (operation == "paged_append fp8") return run_paged_append(inputs, true);
  if (operation == "combine") return run_combine(inputs);
  if (operation == "captured_mass") return run_captured_mass(inputs, earlier);
  throw Error(OPENMSA_INTERNAL_ERROR, "verify: no operation " + operation);
}

}  // namespace openmsa::cli
