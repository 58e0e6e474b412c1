#include "api/operands.h"
#include "api/operation.h"

namespace openmsa {
namespace {

struct PagedSelectBlocks {
  static constexpr const char* kName = "paged_select_blocks";
  SelectParams params;

  PagedSelectBlocks(const openmsa_paged_select_blocks_args& args, Arguments& arguments) {
    check_paged_index_inputs(arguments, args, params);
    arguments.check_head_groups();
    arguments.selection(args.selection, params);
    params.scale = arguments.scale("scale", args.scale, Axis::dim_index);
    params.layout = arguments.requests(args.requests);
    params.indices = arguments.output("indices", args.indices, kIndicesShape, kBlockNumberTypes);
    params.index_lse = arguments.optional_output("index_lse", args.index_lse, kIndexLseShape, kFloat32Type);
  }

  auto stages() { return std::tie(params); }
  void run(const Backend& backend) const { backend.select(params); }
};

}  // namespace

void paged_select_blocks(const openmsa_paged_select_blocks_args& args) { run_operation<PagedSelectBlocks>(args); }
int64_t workspace_size(const openmsa_paged_select_blocks_args& args) {
  return operation_workspace_size<PagedSelectBlocks>(args);
}

}  // namespace openmsa
