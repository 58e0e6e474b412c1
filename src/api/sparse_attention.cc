#include "api/operands.h"
#include "api/operation.h"

namespace openmsa {
namespace {

// What forward and backward share, into either's Params.
template <typename Args, typename Params>
void check_sparse_attention_inputs(Arguments& arguments, const Args& args, Params& params) {
  check_attention_inputs(arguments, args, params);
  params.indices = &arguments.input("indices", args.indices, kIndicesShape, kBlockNumberTypes);
  params.index_heads = arguments.length(Axis::heads_index);
  arguments.check_head_groups();
  params.block_size = arguments.block_size(args.block_size);
  params.scale = arguments.scale("scale", args.scale, Axis::dim);
  params.layout = arguments.sequences(args.sequences, params.block_size);
}

struct SparseAttention {
  static constexpr const char* kName = "sparse_attention";
  AttendParams params;

  SparseAttention(const openmsa_sparse_attention_args& args, Arguments& arguments) {
    check_sparse_attention_inputs(arguments, args, params);
    params.out = check_out(arguments, args.out, params.q);
    params.lse = arguments.optional_output("lse", args.lse, kLseShape, kFloat32Type);
  }

  auto stages() { return std::tie(params); }
  void run(const Backend& backend) const { backend.attend(params); }
};

struct SparseAttentionBackward {
  static constexpr const char* kName = "sparse_attention_backward";
  BackwardParams params;

  SparseAttentionBackward(const openmsa_sparse_attention_backward_args& args, Arguments& arguments) {
    check_sparse_attention_inputs(arguments, args, params);
    check_forward_results(arguments, args, params);
    check_attention_gradients(arguments, args, params);
    params.deterministic = args.deterministic != 0;
  }

  auto stages() { return std::tie(params); }
  void run(const Backend& backend) const { backend.backward(params); }
};

}  // namespace

void sparse_attention(const openmsa_sparse_attention_args& args) { run_operation<SparseAttention>(args); }
int64_t workspace_size(const openmsa_sparse_attention_args& args) {
  return operation_workspace_size<SparseAttention>(args);
}

void sparse_attention_backward(const openmsa_sparse_attention_backward_args& args) {
  run_operation<SparseAttentionBackward>(args);
}
int64_t workspace_size(const openmsa_sparse_attention_backward_args& args) {
  return operation_workspace_size<SparseAttentionBackward>(args);
}

}  // namespace openmsa
