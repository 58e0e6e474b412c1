#include "api/operands.h"
#include "api/operation.h"

namespace openmsa {
namespace {

struct SelectBlocks {
  static constexpr const char* kName = "select_blocks";
  SelectParams params;

  SelectBlocks(const openmsa_select_blocks_args& args, Arguments& arguments) {
    check_index_inputs(arguments, args, params);
    arguments.check_head_groups();
    arguments.selection(args.selection, params);
    params.block_size = arguments.block_size(args.block_size);
    params.scale = arguments.scale("scale", args.scale, Axis::dim_index);
    params.layout = arguments.sequences(args.sequences, params.block_size);
    params.indices = arguments.output("indices", args.indices, kIndicesShape, kBlockNumberTypes);
    params.index_lse = arguments.optional_output("index_lse", args.index_lse, kIndexLseShape, kFloat32Type);
  }

  auto stages() { return std::tie(params); }
  void run(const Backend& backend) const { backend.select(params); }
};

}  // namespace

void select_blocks(const openmsa_select_blocks_args& args) { run_operation<SelectBlocks>(args); }
int64_t workspace_size(const openmsa_select_blocks_args& args) { return operation_workspace_size<SelectBlocks>(args); }

}  // namespace openmsa
