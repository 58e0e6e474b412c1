#include "cuda/sm90/checks.h"

#include "api/dtype.h"
#include "api/error.h"
#include "cuda/common/checks.h"
#include "cuda/sm90/select/config.h"

namespace openmsa::cuda::sm90 {
namespace {

constexpr DataTypeSet kIndexTypes{OPENMSA_FLOAT16, OPENMSA_BFLOAT16, OPENMSA_FLOAT8_E4M3};
constexpr DataTypeSet kMainTypes{OPENMSA_FLOAT16, OPENMSA_BFLOAT16};

constexpr int64_t kMostStrideBytes = int64_t{1} << 40;  // of a bulk copy

// What bulk copies of rows need.
void check_rows(const char* name, const Tensor& tensor, const DataTypeSet& types) {
  if (!types.contains(tensor.dtype)) {
    fail_unsupported(name, ": backend ", kBackendName, " does not support ", dtype_name(tensor.dtype), "; it supports ",
                     types.names());
  }
  const int64_t head_dim = tensor.shape[tensor.rank - 1];
  if (head_dim != 64 && head_dim != 128) {
    fail_unsupported(name, ": backend ", kBackendName, " does not support head dimension ", head_dim,
                     "; it supports 64 and 128");
  }
  check_vector_alignment(kBackendName, name, tensor);
  for (int32_t axis = 0; axis + 1 < tensor.rank; ++axis) {
    const int64_t elements = tensor.strides[axis] < 0 ? -tensor.strides[axis] : tensor.strides[axis];
    if (tensor.shape[axis] > 1 && elements >= kMostStrideBytes / dtype_size(tensor.dtype)) {
      fail_unsupported(name, ": backend ", kBackendName, " does not support a stride of ", tensor.strides[axis],
                       " elements (axis ", axis, "); it supports less than 2^40 bytes");
    }
  }
}

void check_forward_strides(const char* name, const Tensor& tensor) {
  for (int32_t axis = 0; axis + 1 < tensor.rank; ++axis) {
    if (tensor.shape[axis] > 1 && tensor.strides[axis] < 0) {
      fail_unsupported(name, ": backend ", kBackendName, " does not support the negative stride of axis ", axis, ", ",
                       tensor.strides[axis], " elements, in attention; it supports strides from 0 on");
    }
  }
}

void check_layout(const SequenceLayout& layout) {
  const auto check = [](const char* name, const int32_t* data) {
    check_type_alignment(kBackendName, name, data, sizeof(int32_t));
  };
  check("cu_seqlens_q", layout.cu_seqlens_q);
  check("cu_seqlens_k", layout.cu_seqlens_k);
  check("k_starts", layout.k_starts);
  check("block_table", layout.block_table);
  check("seq_lens", layout.seq_lens);
}

// Kernels count tokens in int32, as offsets and lengths do; 2^31 rows of 64 bytes are the memory of a device.
void check_most(const char* name, int64_t count, const char* what) {
  if (count > kMostTokens) {
    fail_unsupported(name, ": backend ", kBackendName, " does not support ", count, " ", what, "; it supports at most ",
                     kMostTokens);
  }
}

void check_block_size(int64_t block_size) {
  if (block_size != 128 && block_size != 64) {
    fail_unsupported("block_size: backend ", kBackendName, " does not support ", block_size,
                     "; it supports 128 and 64");
  }
}

void check_topk(const char* name, int64_t topk) {
  if (topk < 1 || topk > kMaxTopk) {
    fail_unsupported(name, ": backend ", kBackendName, " does not support ", topk, "; it supports 1 to ", kMaxTopk);
  }
}

void check_index_heads(const char* name, int64_t heads) {
  if (heads < 1 || heads > kMaxIndexHeads) {
    fail_unsupported(name, ": backend ", kBackendName, " does not support ", heads, " index heads; it supports 1 to ",
                     kMaxIndexHeads);
  }
}

void check_float_output(const char* name, const Tensor* tensor) {
  if (tensor != nullptr) check_type_alignment(kBackendName, name, tensor->data, sizeof(float));
}

void check_group(const Tensor& q, int64_t index_heads) {
  const int64_t group = q.shape[1] / index_heads;
  if (group != 1 && group != 2 && group != 4 && group != 8 && group != 16) {
    fail_unsupported("q: backend ", kBackendName, " does not support ", group,
                     " query heads per index head; it supports 1, 2, 4, 8 and 16");
  }
}

}  // namespace

void check_select(const SelectParams& params) {
  const SequenceLayout& layout = params.layout;
  const char* const k_name = layout.paged ? "index_k_cache" : "index_k";
  check_rows("index_q", params.index_q, kIndexTypes);
  check_rows(k_name, params.index_k, kIndexTypes);
  check_block_size(params.block_size);
  check_topk("topk", params.topk);
  check_index_heads("index_q", params.index_q.shape[1]);
  check_most("index_q", layout.tokens_q, "queries");
  if (!layout.paged) check_most(k_name, layout.tokens_k, "keys");
  check_type_alignment(kBackendName, "indices", params.indices.data, dtype_size(params.indices.dtype));
  check_float_output("index_lse", params.index_lse);
  check_layout(layout);
  check_sm90_device(kBackendName, "index_q", params.index_q);
}

void check_attend(const AttendParams& params) {
  const SequenceLayout& layout = params.layout;
  const char* const k_name = layout.paged ? "k_cache" : "k";
  const char* const v_name = layout.paged ? "v_cache" : "v";
  if (params.indices == nullptr) {
    fail_unsupported("warmup: backend ", kBackendName, " does not support it; it supports selected blocks only");
  }
  if (params.kl != nullptr) {
    fail_unsupported("kl: backend ", kBackendName, " does not compute it in the forward pass; leave it out");
  }
  check_rows("q", params.q, kMainTypes);
  check_rows(k_name, params.k, kMainTypes);
  check_rows(v_name, params.v, kMainTypes);
  if (params.v.shape[params.v.rank - 1] != params.q.shape[2]) {
    fail_unsupported(v_name, ": backend ", kBackendName, " does not support head dimension ",
                     params.v.shape[params.v.rank - 1], " beside ", params.q.shape[2], " of q; it supports equal ones");
  }
  check_forward_strides("q", params.q);
  check_forward_strides(k_name, params.k);
  check_forward_strides(v_name, params.v);
  check_vector_alignment(kBackendName, "out", params.out);
  check_block_size(params.block_size);
  check_topk("indices", params.indices->shape[2]);
  check_index_heads("indices", params.index_heads);
  check_group(params.q, params.index_heads);
  check_most("q", layout.tokens_q, "queries");
  // A plan sorts its entries by block, page, token and slot in one number of 64 bits.
  constexpr int64_t kMostPages = int64_t{1} << 25;
  if (layout.paged && layout.pages > kMostPages) {
    fail_unsupported(k_name, ": backend ", kBackendName, " does not support ", layout.pages,
                     " pages; it supports at most ", kMostPages);
  }
  if (!layout.paged) check_most(k_name, layout.tokens_k, "keys");
  check_type_alignment(kBackendName, "indices", params.indices->data, dtype_size(params.indices->dtype));
  check_float_output("lse", params.lse);
  check_float_output("index_lse", params.index_lse);
  check_layout(layout);
  check_sm90_device(kBackendName, "q", params.q);
}

void check_combine(const CombineParams& params) {
  check_rows("outs", params.outs, kMainTypes);
  check_vector_alignment(kBackendName, "out", params.out);
  check_float_output("lses", &params.lses);
  check_float_output("lse", &params.lse);
  check_sm90_device(kBackendName, "outs", params.outs);
}

void check_captured_mass(const CapturedMassParams& params) {
  check_rows("q", params.q, kMainTypes);
  check_rows("k", params.k, kMainTypes);
  check_block_size(params.block_size);
  check_topk("indices", params.indices.shape[2]);
  check_index_heads("indices", params.indices.shape[0]);
  check_group(params.q, params.indices.shape[0]);
  check_most("q", params.layout.tokens_q, "queries");
  check_most("k", params.layout.tokens_k, "keys");
  check_type_alignment(kBackendName, "indices", params.indices.data, dtype_size(params.indices.dtype));
  check_float_output("share", &params.share);
  check_float_output("best", &params.best);
  check_layout(params.layout);
  check_sm90_device(kBackendName, "q", params.q);
}

void check_append(const AppendParams& params) {
  check_rows("k", params.k, kMainTypes);
  check_rows("v", params.v, kMainTypes);
  check_rows("index_k", params.index_k, kIndexTypes);
  check_rows("k_cache", params.k_cache, kIndexTypes);
  check_rows("v_cache", params.v_cache, kIndexTypes);
  check_rows("index_k_cache", params.index_k_cache, kIndexTypes);
  check_most("k", params.layout.tokens_q, "tokens");
  check_layout(params.layout);
  check_sm90_device(kBackendName, "k", params.k);
}

}  // namespace openmsa::cuda::sm90
