#include "reference/stages.h"

namespace openmsa {
namespace {

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
};

}  // namespace

const Backend& reference_backend() {
  static const ReferenceBackend backend;
  return backend;
}

}  // namespace openmsa
