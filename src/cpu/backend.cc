// The cpu backend: vector units through Highway, threads through OpenMP.
#include "cpu/common/targets.h"
#include "cpu/stages.h"

namespace openmsa {
namespace {

class CpuBackend final : public Backend {
 public:
  const char* name() const override { return "cpu"; }
  openmsa_device_type device() const override { return OPENMSA_CPU; }
  bool available() const override { return cpu::target_available(); }
  const char* target() const override {
    if (!available()) return "";
    try {
      cpu::choose_target();
    } catch (const Error&) {  // of the setting: calls tell it, this tells what there is
    }
    return cpu::target_name();
  }
  const char* operations() const override {
    return "select_blocks, sparse_attention, sparse_attention_backward, msa_attention, msa_attention_backward, "
           "paged_select_blocks, paged_sparse_attention, paged_msa_attention, combine, captured_mass, paged_append";
  }

  void check(const SelectParams& /*params*/) const override { cpu::choose_target(); }
  void check(const AttendParams& /*params*/) const override { cpu::choose_target(); }
  void check(const BackwardParams& /*params*/) const override { cpu::choose_target(); }
  void check(const CombineParams& /*params*/) const override { cpu::choose_target(); }
  void check(const CapturedMassParams& /*params*/) const override { cpu::choose_target(); }
  void check(const AppendParams& /*params*/) const override { cpu::choose_target(); }

  void select(const SelectParams& params) const override { cpu::select(params); }
  void attend(const AttendParams& params) const override { cpu::attend(params); }
  void backward(const BackwardParams& params) const override { cpu::backward(params); }
  void combine(const CombineParams& params) const override { cpu::combine(params); }
  void captured_mass(const CapturedMassParams& params) const override { cpu::captured_mass(params); }
  void append(const AppendParams& params) const override { cpu::append(params); }
};

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace openmsa
