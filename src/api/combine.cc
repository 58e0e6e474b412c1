#include "api/operands.h"
#include "api/operation.h"

namespace openmsa {
namespace {

struct Combine {
  static constexpr const char* kName = "combine";
  CombineParams params;

  Combine(const openmsa_combine_args& args, Arguments& arguments) {
    params.outs =
        arguments.input("outs", args.outs, {Axis::splits, Axis::tokens_q, Axis::heads_q, Axis::dim_v}, kAttentionTypes);
    params.lses = arguments.input("lses", args.lses, {Axis::splits, Axis::heads_q, Axis::tokens_q}, kFloat32Type);
    params.out = arguments.output("out", args.out, kOutShape, kAttentionTypes);
    check_same_type("out", params.out, "outs", params.outs);
    params.lse = arguments.output("lse", args.lse, kLseShape, kFloat32Type);
  }

  auto stages() { return std::tie(params); }
  void run(const Backend& backend) const { backend.combine(params); }
};

}  // namespace

void combine(const openmsa_combine_args& args) { run_operation<Combine>(args); }
int64_t workspace_size(const openmsa_combine_args& args) { return operation_workspace_size<Combine>(args); }

}  // namespace openmsa
