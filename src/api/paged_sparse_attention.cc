#include "api/operands.h"
#include "api/operation.h"

namespace openmsa {
namespace {

struct PagedSparseAttention {
  static constexpr const char* kName = "paged_sparse_attention";
  AttendParams params;

  PagedSparseAttention(const openmsa_paged_sparse_attention_args& args, Arguments& arguments) {
    check_paged_attention_inputs(arguments, args, params);
    params.indices = &arguments.input("indices", args.indices, kIndicesShape, kBlockNumberTypes);
    params.index_heads = arguments.length(Axis::heads_index);
    arguments.check_head_groups();
    params.scale = arguments.scale("scale", args.scale, Axis::dim);
    params.layout = arguments.requests(args.requests);
    params.out = check_out(arguments, args.out, params.q);
    params.lse = arguments.optional_output("lse", args.lse, kLseShape, kFloat32Type);
  }

  auto stages() { return std::tie(params); }
  void run(const Backend& backend) const { backend.attend(params); }
};

}  // namespace

void paged_sparse_attention(const openmsa_paged_sparse_attention_args& args) {
  run_operation<PagedSparseAttention>(args);
}
int64_t workspace_size(const openmsa_paged_sparse_attention_args& args) {
  return operation_workspace_size<PagedSparseAttention>(args);
}

}  // namespace openmsa
