// Arguments that several operations share: their shapes and the checks that belong together.
#pragma once

#include "api/checks.h"

namespace openmsa {

inline constexpr Shape kQueryShape = {Axis::tokens_q, Axis::heads_q, Axis::dim};
inline constexpr Shape kKeyShape = {Axis::tokens_k, Axis::heads_kv, Axis::dim};
inline constexpr Shape kValueShape = {Axis::tokens_k, Axis::heads_kv, Axis::dim_v};
inline constexpr Shape kIndexQueryShape = {Axis::tokens_q, Axis::heads_index, Axis::dim_index};
inline constexpr Shape kIndexKeyShape = {Axis::tokens_k, Axis::heads_index_k, Axis::dim_index};
inline constexpr Shape kKeyCacheShape = {Axis::pages, Axis::page_rows, Axis::heads_kv, Axis::dim};
inline constexpr Shape kValueCacheShape = {Axis::pages, Axis::page_rows, Axis::heads_kv, Axis::dim_v};
inline constexpr Shape kIndexKeyCacheShape = {Axis::pages, Axis::page_rows, Axis::heads_index_k, Axis::dim_index};
inline constexpr Shape kIndicesShape = {Axis::heads_index, Axis::tokens_q, Axis::topk};
inline constexpr Shape kOutShape = {Axis::tokens_q, Axis::heads_q, Axis::dim_v};
inline constexpr Shape kLseShape = {Axis::heads_q, Axis::tokens_q};
inline constexpr Shape kIndexLseShape = {Axis::heads_index, Axis::tokens_q};
inline constexpr Shape kScalarShape = {};

// q, k, v of a contiguous operation, into AttendParams or BackwardParams.
template <typename Args, typename Params>
void check_attention_inputs(Arguments& arguments, const Args& args, Params& params) {
  params.q = arguments.input("q", args.q, kQueryShape, kAttentionTypes);
  params.k = arguments.input("k", args.k, kKeyShape, kAttentionTypes);
  params.v = arguments.input("v", args.v, kValueShape, kAttentionTypes);
  check_same_type("k", params.k, "q", params.q);
  check_same_type("v", params.v, "q", params.q);
}

// index_q and index_k of a contiguous operation, into SelectParams or IndexBranch.
template <typename Args, typename Params>
void check_index_inputs(Arguments& arguments, const Args& args, Params& params) {
  params.index_q = arguments.input("index_q", args.index_q, kIndexQueryShape, kIndexBranchTypes);
  params.index_k = arguments.input("index_k", args.index_k, kIndexKeyShape, kIndexBranchTypes);
  check_same_type("index_k", params.index_k, "index_q", params.index_q);
}

template <typename Args>
void check_paged_attention_inputs(Arguments& arguments, const Args& args, AttendParams& params) {
  params.q = arguments.input("q", args.q, kQueryShape, kAttentionTypes);
  params.k = arguments.input("k_cache", args.k_cache, kKeyCacheShape, kIndexBranchTypes);
  params.v = arguments.input("v_cache", args.v_cache, kValueCacheShape, kIndexBranchTypes);
  check_cache_type("k_cache", params.k, "q", params.q);
  check_same_type("v_cache", params.v, "k_cache", params.k);
  params.k_scale = arguments.cache_scale("k_scale", args.k_scale, "k_cache", params.k);
  params.v_scale = arguments.cache_scale("v_scale", args.v_scale, "v_cache", params.v);
  params.block_size = arguments.page_size();
}

template <typename Args>
void check_paged_index_inputs(Arguments& arguments, const Args& args, SelectParams& params) {
  params.index_q = arguments.input("index_q", args.index_q, kIndexQueryShape, kIndexBranchTypes);
  params.index_k = arguments.input("index_k_cache", args.index_k_cache, kIndexKeyCacheShape, kIndexBranchTypes);
  check_same_type("index_k_cache", params.index_k, "index_q", params.index_q);
  params.block_size = arguments.page_size();
}

// The attention output has q's type.
inline Tensor check_out(Arguments& arguments, const Tensor* out, const Tensor& q) {
  const Tensor& checked = arguments.output("out", out, kOutShape, kAttentionTypes);
  check_same_type("out", checked, "q", q);
  return checked;
}

// out and lse as the forward call returned them.
template <typename Args>
void check_forward_results(Arguments& arguments, const Args& args, BackwardParams& params) {
  params.out = arguments.input("out", args.out, kOutShape, kAttentionTypes);
  check_same_type("out", params.out, "q", params.q);
  params.lse = arguments.input("lse", args.lse, kLseShape, kFloat32Type);
}

// d_out and, exactly with it, d_q, d_k and d_v.
template <typename Args>
void check_attention_gradients(Arguments& arguments, const Args& args, BackwardParams& params) {
  params.d_out = &arguments.input("d_out", args.d_out, kOutShape, kAttentionTypes);
  params.d_q = &arguments.output("d_q", args.d_q, kQueryShape, kAttentionTypes);
  params.d_k = &arguments.output("d_k", args.d_k, kKeyShape, kAttentionTypes);
  params.d_v = &arguments.output("d_v", args.d_v, kValueShape, kAttentionTypes);
  check_same_type("d_out", *params.d_out, "q", params.q);
  check_same_type("d_q", *params.d_q, "q", params.q);
  check_same_type("d_k", *params.d_k, "k", params.k);
  check_same_type("d_v", *params.d_v, "v", params.v);
}

}  // namespace openmsa
