#include "api/operands.h"
#include "api/operation.h"

namespace openmsa {
namespace {

// What forward and backward share. `index` is filled, whether or not the call needs it: its tensors carry Hi.
template <typename Args, typename Params>
void check_msa_inputs(Arguments& arguments, const Args& args, Params& params, IndexBranch& index) {
  check_attention_inputs(arguments, args, params);
  check_index_inputs(arguments, args, index);
  arguments.check_head_groups();
  params.index_heads = arguments.length(Axis::heads_index);
  params.block_size = arguments.block_size(args.block_size);
  params.scale = arguments.scale("scale", args.scale, Axis::dim);
  index.scale = arguments.scale("index_scale", args.index_scale, Axis::dim_index);
  params.layout = arguments.sequences(args.sequences, params.block_size);
}

void check_no_indices(const Tensor* indices) {
  if (indices != nullptr) fail_argument("indices: got a tensor with warmup, expected null (warm-up selects nothing)");
}

// Dense attention and the index statistics over every visible key.
struct MsaWarmup {
  static constexpr const char* kName = "msa_attention";
  IndexBranch index;
  AttendParams attend;

  MsaWarmup(const openmsa_msa_attention_args& args, Arguments& arguments) {
    check_msa_inputs(arguments, args, attend, index);
    attend.out = check_out(arguments, args.out, attend.q);
    attend.lse = &arguments.output("lse", args.lse, kLseShape, kFloat32Type);
    attend.index_lse = arguments.optional_output("index_lse", args.index_lse, kIndexLseShape, kFloat32Type);
    attend.kl = arguments.optional_output("kl", args.kl, kScalarShape, kFloat32Type);
    if (attend.kl != nullptr && attend.index_lse == nullptr) {
      fail_argument("index_lse: missing although kl is given, expected float32 [Hi, Tq]");
    }
    if (attend.index_lse != nullptr) attend.index = &index;
    if (args.warmup != 0) check_no_indices(args.indices);
  }
  MsaWarmup(const MsaWarmup&) = delete;  // attend points at index
  MsaWarmup& operator=(const MsaWarmup&) = delete;

  auto stages() { return std::tie(attend); }
  void run(const Backend& backend) const { backend.attend(attend); }
};

struct MsaAttention : MsaWarmup {
  SelectParams select;

  MsaAttention(const openmsa_msa_attention_args& args, Arguments& arguments) : MsaWarmup(args, arguments) {
    select.layout = attend.layout;
    select.index_q = index.index_q;
    select.index_k = index.index_k;
    select.block_size = attend.block_size;
    select.scale = index.scale;
    arguments.selection(args.selection, select);
    attend.indices = &arguments.output("indices", args.indices, kIndicesShape, kInt32Type);
    select.indices = *attend.indices;
  }

  auto stages() { return std::tie(attend, select); }
  void run(const Backend& backend) const {
    backend.select(select);
    backend.attend(attend);
  }
};

struct MsaAttentionBackward {
  static constexpr const char* kName = "msa_attention_backward";
  IndexBranch index;
  BackwardParams params;

  MsaAttentionBackward(const openmsa_msa_attention_backward_args& args, Arguments& arguments) {
    check_msa_inputs(arguments, args, params, index);
    params.index = &index;
    check_forward_results(arguments, args, params);
    if (args.warmup != 0) {
      check_no_indices(args.indices);
    } else {
      params.indices = &arguments.input("indices", args.indices, kIndicesShape, kBlockNumberTypes);
    }
    if (args.d_out != nullptr) {
      check_attention_gradients(arguments, args, params);
    } else {
      check_absent("d_q", args.d_q, "d_out");
      check_absent("d_k", args.d_k, "d_out");
      check_absent("d_v", args.d_v, "d_out");
    }
    check_kl_gradients(arguments, args);
    params.deterministic = args.deterministic != 0;
  }
  MsaAttentionBackward(const MsaAttentionBackward&) = delete;  // params points at index
  MsaAttentionBackward& operator=(const MsaAttentionBackward&) = delete;

  auto stages() { return std::tie(params); }
  void run(const Backend& backend) const { backend.backward(params); }

 private:
  static void check_absent(const char* name, const Tensor* gradient, const char* upstream) {
    if (gradient != nullptr) fail_argument(name, ": got a tensor without ", upstream, ", expected both or neither");
  }

  // d_kl and, exactly with it, d_index_q and d_index_k; kl itself.
  void check_kl_gradients(Arguments& arguments, const openmsa_msa_attention_backward_args& args) {
    params.d_kl = arguments.optional_input("d_kl", args.d_kl, kScalarShape, kFloat32Type);
    params.kl = arguments.optional_output("kl", args.kl, kScalarShape, kFloat32Type);
    if (params.d_kl != nullptr) {
      check_has_gradient("index_q", index.index_q);
      check_has_gradient("index_k", index.index_k);
      params.d_index_q = &arguments.output("d_index_q", args.d_index_q, kIndexQueryShape, kAttentionTypes);
      params.d_index_k = &arguments.output("d_index_k", args.d_index_k, kIndexKeyShape, kAttentionTypes);
      check_same_type("d_index_q", *params.d_index_q, "index_q", index.index_q);
      check_same_type("d_index_k", *params.d_index_k, "index_k", index.index_k);
    } else {
      check_absent("d_index_q", args.d_index_q, "d_kl");
      check_absent("d_index_k", args.d_index_k, "d_kl");
    }
    params.index_lse = params.d_kl != nullptr || params.kl != nullptr
                           ? &arguments.input("index_lse", args.index_lse, kIndexLseShape, kFloat32Type)
                           : arguments.optional_input("index_lse", args.index_lse, kIndexLseShape, kFloat32Type);
  }
};

}  // namespace

void msa_attention(const openmsa_msa_attention_args& args) {
  if (args.warmup != 0) {
    run_operation<MsaWarmup>(args);
  } else {
    run_operation<MsaAttention>(args);
  }
}
int64_t workspace_size(const openmsa_msa_attention_args& args) {
  return args.warmup != 0 ? operation_workspace_size<MsaWarmup>(args) : operation_workspace_size<MsaAttention>(args);
}

void msa_attention_backward(const openmsa_msa_attention_backward_args& args) {
  run_operation<MsaAttentionBackward>(args);
}
int64_t workspace_size(const openmsa_msa_attention_backward_args& args) {
  return operation_workspace_size<MsaAttentionBackward>(args);
}

}  // namespace openmsa
