#include "cpp/case_run.h"

#include <cmath>
#include <stdexcept>

namespace openmsa::cases {
namespace {

// The outputs of one call.
class Outputs {
 public:
  explicit Outputs(const Call& call) : call_(call) {}

  const Tensor* add(const char* name, const HostTensor& image) {
    placed_.emplace_back(name, PlacedTensor(call_.in.memory, image));
    return placed_.back().second.tensor();
  }
  const Tensor* add(const char* name, TensorId like) { return add(name, make_output(call_.in.c, like, call_.fill)); }
  const Tensor* add_scalar(const char* name) {
    return add(name, make_host_tensor(OPENMSA_FLOAT32, {}, {}, call_.fill));
  }
  const Tensor* add_blocks32(const char* name) {
    Case c = call_.in.c;
    c.indices_dtype = OPENMSA_INT32;
    return add(name, make_output(c, TensorId::indices, call_.fill));
  }

  // Runs a call of the public API. Throws std::logic_error where a call that failed has written.
  template <typename Api>
  void run(const Api& api) const {
    try {
      api();
    } catch (const Error& error) {
      for (const auto& [name, tensor] : placed_) {
        if (tensor.fetch().storage != tensor.image().storage) {
          throw std::logic_error(name + " has been written by a call that failed: " + error.what());
        }
      }
      throw;
    }
  }

  Results fetch() const {
    Results results;
    for (const auto& [name, tensor] : placed_) {
      try {
        results[name] = tensor.fetch();
      } catch (const std::runtime_error& error) {
        throw std::runtime_error(name + ": " + error.what());
      }
    }
    return results;
  }

 private:
  const Call& call_;
  std::list<std::pair<std::string, PlacedTensor>> placed_;  // a list: add() hands out pointers
};

double scale_or_default(const std::optional<double>& scale, int64_t dim) {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(dim)));
}

const double* pointer(const std::optional<double>& value) { return value ? &*value : nullptr; }

openmsa_selection selection_of(const Case& c) { return {c.topk, c.init_blocks, c.local_blocks}; }

openmsa_cache_scale cache_scale_of(const double* value, const PlacedTensor& tensor) { return {value, tensor.tensor()}; }

// Fields that the argument structures share.
template <typename Args>
void set_attention(const Inputs& in, Args* args) {
  args->q = in.q.tensor();
  args->k = in.k.tensor();
  args->v = in.v.tensor();
  args->sequences = in.sequences();
  args->block_size = in.c.block_size;
  args->scale = pointer(in.c.scale);
  args->execution.stream = in.memory.stream();
}

template <typename Args>
void set_paged_attention(const Inputs& in, Args* args) {
  args->q = in.q.tensor();
  args->k_cache = in.k.tensor();
  args->v_cache = in.v.tensor();
  args->requests = in.requests();
  args->scale = pointer(in.c.scale);
  args->k_scale = cache_scale_of(in.k_scale_value, in.k_scale_tensor);
  args->v_scale = cache_scale_of(in.v_scale_value, in.v_scale_tensor);
  args->execution.stream = in.memory.stream();
}

AttendParams attend_params(const Inputs& in, const Tensor* indices, const Tensor* out, const Tensor* lse) {
  AttendParams params;
  params.layout = in.layout();
  params.q = *in.q.tensor();
  params.k = *in.k.tensor();
  params.v = *in.v.tensor();
  params.k_scale = in.k_scale();
  params.v_scale = in.v_scale();
  params.indices = indices;
  params.index_heads = in.c.heads_index;
  params.block_size = in.c.block_size;
  params.scale = scale_or_default(in.c.scale, in.c.dim);
  params.execution.stream = in.memory.stream();
  params.out = *out;
  params.lse = lse;
  return params;
}

BackwardParams backward_params(const Inputs& in, const Tensor* indices, const Tensor* out, const Tensor* lse) {
  BackwardParams params;
  params.layout = in.layout();
  params.q = *in.q.tensor();
  params.k = *in.k.tensor();
  params.v = *in.v.tensor();
  params.out = *out;
  params.lse = *lse;
  params.d_out = in.d_out.tensor();
  params.indices = indices;
  params.index_heads = in.c.heads_index;
  params.block_size = in.c.block_size;
  params.scale = scale_or_default(in.c.scale, in.c.dim);
  params.deterministic = true;
  params.execution.stream = in.memory.stream();
  return params;
}

IndexBranch index_branch(const Inputs& in) {
  IndexBranch index;
  index.index_q = *in.index_q.tensor();
  index.index_k = *in.index_k.tensor();
  index.scale = scale_or_default(in.c.index_scale, in.c.dim_index);
  return index;
}

}  // namespace

const Images& input_images(const Case& c, bool poisoned) {
  static std::string owner;
  static Images clean, with_poison;
  if (owner != c.name) {
    clean.clear();
    with_poison.clear();
    owner = c.name;
  }
  Images& images = poisoned ? with_poison : clean;
  if (!images.empty()) return images;
  std::vector<TensorId> tensors = {TensorId::q,       TensorId::k,       TensorId::v,
                                   TensorId::index_q, TensorId::index_k, TensorId::d_out};
  if (c.paged) tensors.insert(tensors.end(), {TensorId::new_k, TensorId::new_v, TensorId::new_index_k});
  if (!c.selection.empty()) tensors.push_back(TensorId::indices);
  if (c.splits > 0) tensors.insert(tensors.end(), {TensorId::outs, TensorId::lses});
  for (TensorId tensor : tensors) images.emplace(tensor, make_input(c, tensor, poisoned));
  return images;
}

Inputs::Inputs(const Case& case_, DeviceMemory& memory_, const Images& images_)
    : c(case_), memory(memory_), images(images_) {
  const auto place = [&](TensorId tensor) {
    const auto found = images.find(tensor);
    return found == images.end() ? PlacedTensor() : PlacedTensor(memory, found->second);
  };
  const auto place_ints = [&](const std::vector<int32_t>& values) { return PlacedTensor(memory, make_int32(values)); };
  q = place(TensorId::q);
  k = place(TensorId::k);
  v = place(TensorId::v);
  index_q = place(TensorId::index_q);
  index_k = place(TensorId::index_k);
  d_out = place(TensorId::d_out);
  indices = place(TensorId::indices);
  outs = place(TensorId::outs);
  lses = place(TensorId::lses);
  if (c.cu_seqlens_q) cu_seqlens_q = place_ints(*c.cu_seqlens_q);
  if (c.cu_seqlens_k) cu_seqlens_k = place_ints(*c.cu_seqlens_k);
  if (c.k_starts) k_starts = place_ints(*c.k_starts);
  d_kl = PlacedTensor(memory, make_scalar(kUpstreamOfKl));
  if (!c.paged) return;
  new_k = place(TensorId::new_k);
  new_v = place(TensorId::new_v);
  new_index_k = place(TensorId::new_index_k);
  block_table = PlacedTensor(memory, make_block_table(*c.paged));
  seq_lens = place_ints(c.paged->seq_lens);
  const auto set_scale = [&](const std::optional<double>& scale, const double** value, PlacedTensor* tensor) {
    if (!scale) return;
    if (c.paged->scale_form == "tensor") {
      *tensor = PlacedTensor(memory, make_scalar(static_cast<float>(*scale)));
    } else {
      *value = &*scale;
    }
  };
  set_scale(c.paged->k_scale, &k_scale_value, &k_scale_tensor);
  set_scale(c.paged->v_scale, &v_scale_value, &v_scale_tensor);
}

CacheScale Inputs::cache_scale(const double* value, const PlacedTensor& tensor) {
  CacheScale scale;
  if (value != nullptr) scale.value = *value;
  if (tensor.present()) scale.device_value = static_cast<const float*>(tensor.tensor()->data);
  return scale;
}

SequenceLayout Inputs::layout() const {
  const auto ints = [](const PlacedTensor& tensor) {
    return tensor.present() ? static_cast<const int32_t*>(tensor.tensor()->data) : nullptr;
  };
  SequenceLayout layout;
  layout.tokens_q = c.tokens_q;
  layout.tokens_k = c.tokens_k;
  layout.cu_seqlens_q = ints(cu_seqlens_q);
  layout.cu_seqlens_k = ints(cu_seqlens_k);
  layout.k_starts = ints(k_starts);
  if (c.packed()) layout.batch = static_cast<int64_t>(c.cu_seqlens_q->size()) - 1;
  if (c.paged) {
    layout.paged = true;
    layout.block_table = ints(block_table);
    layout.block_table_stride = c.paged->table_stride;
    layout.max_pages = c.paged->max_pages;
    layout.pages = c.paged->pages;
    layout.seq_lens = ints(seq_lens);
  }
  return layout;
}

openmsa_sequences Inputs::sequences() const {
  return {cu_seqlens_q.tensor(), cu_seqlens_k.tensor(), k_starts.tensor()};
}

openmsa_requests Inputs::requests() const { return {block_table.tensor(), seq_lens.tensor(), cu_seqlens_q.tensor()}; }

SelectParams select_params(const Inputs& in, const Tensor* indices, const Tensor* index_lse) {
  SelectParams params;
  params.layout = in.layout();
  params.index_q = *in.index_q.tensor();
  params.index_k = *in.index_k.tensor();
  params.topk = in.c.topk;
  params.init_blocks = in.c.init_blocks;
  params.local_blocks = in.c.local_blocks;
  params.block_size = in.c.block_size;
  params.scale = scale_or_default(in.c.index_scale, in.c.dim_index);
  params.execution.stream = in.memory.stream();
  params.indices = *indices;
  params.index_lse = index_lse;
  return params;
}

Results select(const Call& call) {
  const Inputs& in = call.in;
  Outputs outputs(call);
  const Tensor* indices = outputs.add("indices", TensorId::indices);
  const Tensor* index_lse = outputs.add("index_lse", TensorId::index_lse);
  if (call.direct != nullptr) {
    call.direct->select(select_params(in, indices, index_lse));
  } else if (in.c.paged) {
    PagedSelectBlocksArgs args;
    args.index_q = in.index_q.tensor();
    args.index_k_cache = in.index_k.tensor();
    args.requests = in.requests();
    args.selection = selection_of(in.c);
    args.scale = pointer(in.c.index_scale);
    args.execution.stream = in.memory.stream();
    args.indices = indices;
    args.index_lse = index_lse;
    outputs.run([&] { paged_select_blocks(args); });
  } else {
    SelectBlocksArgs args;
    args.index_q = in.index_q.tensor();
    args.index_k = in.index_k.tensor();
    args.sequences = in.sequences();
    args.selection = selection_of(in.c);
    args.block_size = in.c.block_size;
    args.scale = pointer(in.c.index_scale);
    args.execution.stream = in.memory.stream();
    args.indices = indices;
    args.index_lse = index_lse;
    outputs.run([&] { select_blocks(args); });
  }
  return outputs.fetch();
}

Results attend(const Call& call, const PlacedTensor& indices) {
  const Inputs& in = call.in;
  Outputs outputs(call);
  const Tensor* out = outputs.add("out", TensorId::out);
  const Tensor* lse = outputs.add("lse", TensorId::lse);
  if (call.direct != nullptr) {
    call.direct->attend(attend_params(in, indices.tensor(), out, lse));
  } else if (in.c.paged) {
    PagedSparseAttentionArgs args;
    set_paged_attention(in, &args);
    args.indices = indices.tensor();
    args.out = out;
    args.lse = lse;
    outputs.run([&] { paged_sparse_attention(args); });
  } else {
    SparseAttentionArgs args;
    set_attention(in, &args);
    args.indices = indices.tensor();
    args.out = out;
    args.lse = lse;
    outputs.run([&] { sparse_attention(args); });
  }
  return outputs.fetch();
}

Results backward(const Call& call, const PlacedTensor& indices, const PlacedTensor& out, const PlacedTensor& lse) {
  const Inputs& in = call.in;
  Outputs outputs(call);
  const Tensor* d_q = outputs.add("d_q", TensorId::q);
  const Tensor* d_k = outputs.add("d_k", TensorId::k);
  const Tensor* d_v = outputs.add("d_v", TensorId::v);
  if (call.direct != nullptr) {
    BackwardParams params = backward_params(in, indices.tensor(), out.tensor(), lse.tensor());
    params.d_q = d_q;
    params.d_k = d_k;
    params.d_v = d_v;
    call.direct->backward(params);
  } else {
    SparseAttentionBackwardArgs args;
    set_attention(in, &args);
    args.indices = indices.tensor();
    args.out = out.tensor();
    args.lse = lse.tensor();
    args.d_out = in.d_out.tensor();
    args.deterministic = 1;
    args.d_q = d_q;
    args.d_k = d_k;
    args.d_v = d_v;
    outputs.run([&] { sparse_attention_backward(args); });
  }
  return outputs.fetch();
}

Results msa(const Call& call, bool warmup) {
  const Inputs& in = call.in;
  Outputs outputs(call);
  const Tensor* out = outputs.add("out", TensorId::out);
  const Tensor* lse = outputs.add("lse", TensorId::lse);
  const Tensor* indices = warmup ? nullptr : outputs.add_blocks32("indices");
  const Tensor* index_lse = outputs.add("index_lse", TensorId::index_lse);
  const Tensor* kl = outputs.add_scalar("kl");
  if (call.direct != nullptr) {
    if (!warmup) call.direct->select(select_params(in, indices, nullptr));
    const IndexBranch index = index_branch(in);
    AttendParams params = attend_params(in, indices, out, lse);
    params.index = &index;
    params.index_lse = index_lse;
    params.kl = kl;
    call.direct->attend(params);
  } else {
    MsaAttentionArgs args;
    set_attention(in, &args);
    args.index_q = in.index_q.tensor();
    args.index_k = in.index_k.tensor();
    args.selection = selection_of(in.c);
    args.index_scale = pointer(in.c.index_scale);
    args.warmup = warmup ? 1 : 0;
    args.out = out;
    args.lse = lse;
    args.indices = indices;
    args.index_lse = index_lse;
    args.kl = kl;
    outputs.run([&] { msa_attention(args); });
  }
  return outputs.fetch();
}

Results msa_backward(const Call& call, bool warmup, const Results& forward) {
  const Inputs& in = call.in;
  const PlacedTensor out(in.memory, forward.at("out")), lse(in.memory, forward.at("lse"));
  const PlacedTensor index_lse(in.memory, forward.at("index_lse"));
  const PlacedTensor indices = warmup ? PlacedTensor() : PlacedTensor(in.memory, forward.at("indices"));
  const bool index_gradient = in.c.index_dtype != OPENMSA_FLOAT8_E4M3;
  Outputs outputs(call);
  const Tensor* d_q = outputs.add("d_q", TensorId::q);
  const Tensor* d_k = outputs.add("d_k", TensorId::k);
  const Tensor* d_v = outputs.add("d_v", TensorId::v);
  const Tensor* d_index_q = index_gradient ? outputs.add("d_index_q", TensorId::index_q) : nullptr;
  const Tensor* d_index_k = index_gradient ? outputs.add("d_index_k", TensorId::index_k) : nullptr;
  const Tensor* kl = outputs.add_scalar("kl");
  if (call.direct != nullptr) {
    const IndexBranch index = index_branch(in);
    BackwardParams params = backward_params(in, indices.tensor(), out.tensor(), lse.tensor());
    params.index = &index;
    params.index_lse = index_lse.tensor();
    params.d_kl = index_gradient ? in.d_kl.tensor() : nullptr;
    params.d_q = d_q;
    params.d_k = d_k;
    params.d_v = d_v;
    params.d_index_q = d_index_q;
    params.d_index_k = d_index_k;
    params.kl = kl;
    call.direct->backward(params);
  } else {
    MsaAttentionBackwardArgs args;
    set_attention(in, &args);
    args.index_q = in.index_q.tensor();
    args.index_k = in.index_k.tensor();
    args.index_scale = pointer(in.c.index_scale);
    args.warmup = warmup ? 1 : 0;
    args.deterministic = 1;
    args.out = out.tensor();
    args.lse = lse.tensor();
    args.indices = indices.tensor();
    args.index_lse = index_lse.tensor();
    args.d_out = in.d_out.tensor();
    args.d_kl = index_gradient ? in.d_kl.tensor() : nullptr;
    args.d_q = d_q;
    args.d_k = d_k;
    args.d_v = d_v;
    args.d_index_q = d_index_q;
    args.d_index_k = d_index_k;
    args.kl = kl;
    outputs.run([&] { msa_attention_backward(args); });
  }
  return outputs.fetch();
}

Results paged_msa(const Call& call) {
  const Inputs& in = call.in;
  Outputs outputs(call);
  const Tensor* out = outputs.add("out", TensorId::out);
  const Tensor* lse = outputs.add("lse", TensorId::lse);
  const Tensor* indices = outputs.add_blocks32("indices");
  if (call.direct != nullptr) {
    call.direct->select(select_params(in, indices, nullptr));
    call.direct->attend(attend_params(in, indices, out, lse));
  } else {
    PagedMsaAttentionArgs args;
    set_paged_attention(in, &args);
    args.index_q = in.index_q.tensor();
    args.index_k_cache = in.index_k.tensor();
    args.selection = selection_of(in.c);
    args.index_scale = pointer(in.c.index_scale);
    args.out = out;
    args.lse = lse;
    args.indices = indices;
    outputs.run([&] { paged_msa_attention(args); });
  }
  return outputs.fetch();
}

Results mass(const Call& call, const PlacedTensor& indices) {
  const Inputs& in = call.in;
  Outputs outputs(call);
  const Tensor* share = outputs.add("share", TensorId::index_lse);
  const Tensor* best = outputs.add("best", TensorId::index_lse);
  if (call.direct != nullptr) {
    CapturedMassParams params;
    params.layout = in.layout();
    params.q = *in.q.tensor();
    params.k = *in.k.tensor();
    params.indices = *indices.tensor();
    params.block_size = in.c.block_size;
    params.scale = scale_or_default(in.c.scale, in.c.dim);
    params.execution.stream = in.memory.stream();
    params.share = *share;
    params.best = *best;
    call.direct->captured_mass(params);
  } else {
    CapturedMassArgs args;
    args.q = in.q.tensor();
    args.k = in.k.tensor();
    args.indices = indices.tensor();
    args.sequences = in.sequences();
    args.block_size = in.c.block_size;
    args.scale = pointer(in.c.scale);
    args.execution.stream = in.memory.stream();
    args.share = share;
    args.best = best;
    outputs.run([&] { captured_mass(args); });
  }
  return outputs.fetch();
}

Results combine(const Call& call) {
  const Inputs& in = call.in;
  Outputs outputs(call);
  const Tensor* out = outputs.add("out", TensorId::out);
  const Tensor* lse = outputs.add("lse", TensorId::lse);
  if (call.direct != nullptr) {
    CombineParams params;
    params.outs = *in.outs.tensor();
    params.lses = *in.lses.tensor();
    params.execution.stream = in.memory.stream();
    params.out = *out;
    params.lse = *lse;
    call.direct->combine(params);
  } else {
    CombineArgs args;
    args.outs = in.outs.tensor();
    args.lses = in.lses.tensor();
    args.execution.stream = in.memory.stream();
    args.out = out;
    args.lse = lse;
    outputs.run([&] { openmsa::combine(args); });
  }
  return outputs.fetch();
}

Results append(const Call& call) {
  const Inputs& in = call.in;
  // Neighbours of what is written hold NaN, which must stay.
  const Images& caches = input_images(in.c, true);
  Outputs outputs(call);
  const Tensor* k_cache = outputs.add("k_cache", caches.at(TensorId::k));
  const Tensor* v_cache = outputs.add("v_cache", caches.at(TensorId::v));
  const Tensor* index_k_cache = outputs.add("index_k_cache", caches.at(TensorId::index_k));
  if (call.direct != nullptr) {
    AppendParams params;
    params.layout = in.layout();
    params.k = *in.new_k.tensor();
    params.v = *in.new_v.tensor();
    params.index_k = *in.new_index_k.tensor();
    params.k_scale = in.k_scale();
    params.v_scale = in.v_scale();
    params.execution.stream = in.memory.stream();
    params.k_cache = *k_cache;
    params.v_cache = *v_cache;
    params.index_k_cache = *index_k_cache;
    call.direct->append(params);
  } else {
    PagedAppendArgs args;
    args.k = in.new_k.tensor();
    args.v = in.new_v.tensor();
    args.index_k = in.new_index_k.tensor();
    args.requests = in.requests();
    args.k_scale = cache_scale_of(in.k_scale_value, in.k_scale_tensor);
    args.v_scale = cache_scale_of(in.v_scale_value, in.v_scale_tensor);
    args.execution.stream = in.memory.stream();
    args.k_cache = k_cache;
    args.v_cache = v_cache;
    args.index_k_cache = index_k_cache;
    outputs.run([&] { paged_append(args); });
  }
  return outputs.fetch();
}

std::string operation_name(const Case& c, const std::string& op) {
  const std::string prefix = c.paged ? "paged_" : "";
  if (op == "select" || op == "paged_select") return prefix + "select_blocks";
  if (op == "attend" || op == "paged_attend") return prefix + "sparse_attention";
  if (op == "backward") return "sparse_attention_backward";
  if (op == "msa" || op == "warmup" || op == "paged_msa") return prefix + "msa_attention";
  if (op == "mass") return "captured_mass";
  if (op == "append") return "paged_append";
  return op;
}

}  // namespace openmsa::cases
