#include "api/operands.h"
#include "api/operation.h"

namespace openmsa {
namespace {

struct PagedAppend {
  static constexpr const char* kName = "paged_append";
  AppendParams params;

  PagedAppend(const openmsa_paged_append_args& args, Arguments& arguments) {
    params.k = arguments.input("k", args.k, {Axis::tokens_q, Axis::heads_kv, Axis::dim}, kAttentionTypes);
    params.v = arguments.input("v", args.v, {Axis::tokens_q, Axis::heads_kv, Axis::dim_v}, kAttentionTypes);
    check_same_type("v", params.v, "k", params.k);
    params.index_k = arguments.input("index_k", args.index_k, {Axis::tokens_q, Axis::heads_index_k, Axis::dim_index},
                                     kIndexBranchTypes);
    params.k_cache = arguments.output("k_cache", args.k_cache, kKeyCacheShape, kIndexBranchTypes);
    params.v_cache = arguments.output("v_cache", args.v_cache, kValueCacheShape, kIndexBranchTypes);
    params.index_k_cache =
        arguments.output("index_k_cache", args.index_k_cache, kIndexKeyCacheShape, kIndexBranchTypes);
    check_cache_type("k_cache", params.k_cache, "k", params.k);
    check_cache_type("v_cache", params.v_cache, "v", params.v);
    check_cache_type("index_k_cache", params.index_k_cache, "index_k", params.index_k);
    arguments.page_size();
    params.k_scale = arguments.cache_scale("k_scale", args.k_scale, "k_cache", params.k_cache);
    params.v_scale = arguments.cache_scale("v_scale", args.v_scale, "v_cache", params.v_cache);
    params.layout = arguments.requests(args.requests);
  }

  auto stages() { return std::tie(params); }
  void run(const Backend& backend) const { backend.append(params); }
};

}  // namespace

void paged_append(const openmsa_paged_append_args& args) { run_operation<PagedAppend>(args); }
int64_t workspace_size(const openmsa_paged_append_args& args) { return operation_workspace_size<PagedAppend>(args); }

}  // namespace openmsa
