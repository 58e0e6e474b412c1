#include "api/operands.h"
#include "api/operation.h"

namespace openmsa {
namespace {

struct PagedMsaAttention {
  static constexpr const char* kName = "paged_msa_attention";
  SelectParams select;
  AttendParams attend;

  PagedMsaAttention(const openmsa_paged_msa_attention_args& args, Arguments& arguments) {
    check_paged_attention_inputs(arguments, args, attend);
    check_paged_index_inputs(arguments, args, select);
    arguments.check_head_groups();
    arguments.selection(args.selection, select);
    attend.index_heads = arguments.length(Axis::heads_index);
    attend.scale = arguments.scale("scale", args.scale, Axis::dim);
    select.scale = arguments.scale("index_scale", args.index_scale, Axis::dim_index);
    attend.layout = arguments.requests(args.requests);
    select.layout = attend.layout;
    attend.out = check_out(arguments, args.out, attend.q);
    attend.lse = &arguments.output("lse", args.lse, kLseShape, kFloat32Type);
    attend.indices = &arguments.output("indices", args.indices, kIndicesShape, kInt32Type);
    select.indices = *attend.indices;
  }

  auto stages() { return std::tie(attend, select); }
  void run(const Backend& backend) const {
    backend.select(select);
    backend.attend(attend);
  }
};

}  // namespace

void paged_msa_attention(const openmsa_paged_msa_attention_args& args) { run_operation<PagedMsaAttention>(args); }
int64_t workspace_size(const openmsa_paged_msa_attention_args& args) {
  return operation_workspace_size<PagedMsaAttention>(args);
}

}  // namespace openmsa
