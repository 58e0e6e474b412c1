#include "api/operands.h"
#include "api/operation.h"

namespace openmsa {
namespace {

struct CapturedMass {
  static constexpr const char* kName = "captured_mass";
  CapturedMassParams params;

  CapturedMass(const openmsa_captured_mass_args& args, Arguments& arguments) {
    params.q = arguments.input("q", args.q, kQueryShape, kAttentionTypes);
    params.k = arguments.input("k", args.k, kKeyShape, kAttentionTypes);
    check_same_type("k", params.k, "q", params.q);
    params.indices = arguments.input("indices", args.indices, kIndicesShape, kBlockNumberTypes);
    arguments.check_head_groups();
    params.block_size = arguments.block_size(args.block_size);
    params.scale = arguments.scale("scale", args.scale, Axis::dim);
    params.layout = arguments.sequences(args.sequences, params.block_size);
    params.share = arguments.output("share", args.share, kIndexLseShape, kFloat32Type);
    params.best = arguments.output("best", args.best, kIndexLseShape, kFloat32Type);
  }

  auto stages() { return std::tie(params); }
  void run(const Backend& backend) const { backend.captured_mass(params); }
};

}  // namespace

void captured_mass(const openmsa_captured_mass_args& args) { run_operation<CapturedMass>(args); }
int64_t workspace_size(const openmsa_captured_mass_args& args) { return operation_workspace_size<CapturedMass>(args); }

}  // namespace openmsa
