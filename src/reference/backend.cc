#include "api/error.h"
#include "reference/stages.h"

namespace openmsa {
namespace {

constexpr int64_t kMaxHeadDim = 256;

void check_head_dim(const char* name, const Tensor& tensor) {
  const int64_t dim = tensor.shape[tensor.rank - 1];
  if (dim < 1 || dim > kMaxHeadDim) {
    fail_unsupported(name, ": head dimension ", dim, " is not supported by backend reference; it supports 1 to ",
                     kMaxHeadDim);
  }
}

class ReferenceBackend final : public Backend {
 public:
  const char* name() const override { return "reference"; }
  openmsa_device_type device() const override { return OPENMSA_CPU; }
  bool available() const override { return true; }
  const char* operations() const override {
    return "select_blocks, sparse_attention, sparse_attention_backward, msa_attention, msa_attention_backward, "
           "paged_select_blocks, paged_sparse_attention, paged_msa_attention, combine, captured_mass, paged_append";
  }

  void select(const SelectParams& params) const override { reference::select(params); }
  void attend(const AttendParams& params) const override { reference::attend(params); }
  void backward(const BackwardParams& params) const override { reference::backward(params); }
  void combine(const CombineParams& params) const override { reference::combine(params); }
  void captured_mass(const CapturedMassParams& params) const override { reference::captured_mass(params); }
  void append(const AppendParams& params) const override { reference::append(params); }

  void check(const SelectParams& params) const override { check_head_dim("index_q", params.index_q); }
  void check(const AttendParams& params) const override {
    check_head_dim("q", params.q);
    check_head_dim("v", params.v);
    if (params.index != nullptr) check_head_dim("index_q", params.index->index_q);
  }
  void check(const BackwardParams& params) const override {
    check_head_dim("q", params.q);
    check_head_dim("v", params.v);
    if (params.index != nullptr) check_head_dim("index_q", params.index->index_q);
  }
  void check(const CombineParams& params) const override { check_head_dim("outs", params.outs); }
  void check(const CapturedMassParams& params) const override { check_head_dim("q", params.q); }
  void check(const AppendParams& params) const override {
    check_head_dim("k", params.k);
    check_head_dim("v", params.v);
    check_head_dim("index_k", params.index_k);
  }
};

}  // namespace

const Backend& reference_backend() {
  static const ReferenceBackend backend;
  return backend;
}

}  // namespace openmsa
