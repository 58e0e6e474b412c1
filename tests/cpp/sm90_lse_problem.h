// index_lse by the launchers of the sm90 backend and by the reference, for any selection or whole prefixes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpp/sm90_problem.h"
#include "cuda/sm90/select/lse.h"

namespace openmsa::testing {

// Selections [Hi, Tq, topk]. Blocks in any order, some repeated, some beyond what the row sees, some no block at all.
HostTensor any_indices(const Options& o, uint64_t seed = 5);
// What the reference selects.
HostTensor selected_indices(const SelectProblem& problem);
// The entries of queries [begin, begin + rows).
HostTensor index_rows(const HostTensor& indices, int64_t begin, int64_t rows);

// A problem, the selection (absent: whole prefixes) and the scale (0: the problem's), in a device's memory.
class PlacedLse {
 public:
  PlacedLse(DeviceMemory& memory, const SelectProblem& problem, const HostTensor& indices, double scale = 0);

  const cuda::sm90::LseParams& params() const { return params_; }
  bool selected() const { return indices_.present(); }
  std::vector<float> result() const;  // [Hi, Tq]
  int64_t workspace() const;
  void launch(void* workspace) const;

 private:
  PlacedProblem placed_;
  PlacedTensor indices_, lse_;
  cuda::sm90::LseParams params_;
};

// Runs in guarded workspace.
std::vector<float> lse_on_gpu(const PlacedLse& placed);
std::vector<float> lse_on_gpu(const SelectProblem& problem, const HostTensor& indices = {}, double scale = 0);
std::vector<float> lse_on_reference(const SelectProblem& problem, const HostTensor& indices = {}, double scale = 0);
// Of rows [heads][of], the queries [begin, begin + rows).
std::vector<float> lse_rows(const std::vector<float>& all, int64_t heads, int64_t begin, int64_t rows);

// NaN and infinities at the same places, else within 2e-5: products are exact and sums float32, far nearer than the
// 2e-3 that 16-bit inputs may differ by.
void expect_close_lse(const std::vector<float>& got, const std::vector<float>& expected, const std::string& what);
void expect_same_lse(const std::vector<float>& got, const std::vector<float>& expected, const std::string& what);
// The GPU beside the reference: this selection or whole prefixes; both, with any_indices.
void compare_lse(const SelectProblem& problem, const HostTensor& indices, const std::string& what, double scale = 0);
void compare_both_lse(const SelectProblem& problem, const std::string& what, double scale = 0);

}  // namespace openmsa::testing
