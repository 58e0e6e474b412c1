// Merges attentions of the same queries over disjoint sets of keys.
#include <vector>

#include "reference/kl.h"
#include "reference/scores.h"
#include "reference/stages.h"
#include "reference/tensor_access.h"

namespace openmsa::reference {
namespace {

struct Scratch {
  std::vector<double> part, sum;
};

}  // namespace

void combine(const CombineParams& params) {
  const Rows outs(params.outs), out(params.out);
  const int64_t splits = params.outs.shape[0], tokens = params.outs.shape[1], dim = outs.dim();

  parallel_for<Scratch>(tokens * outs.heads(), [&](int64_t row, Scratch& s) {
    const int64_t query = row / outs.heads(), head = row % outs.heads();
    const auto lse_of = [&](int64_t split) -> double {
      const int64_t* strides = params.lses.strides;
      return static_cast<const float*>(params.lses.data)[split * strides[0] + head * strides[1] + query * strides[2]];
    };
    const double lse = log_sum_exp(splits, lse_of);

    s.part.resize(static_cast<size_t>(dim));
    s.sum.assign(static_cast<size_t>(dim), 0.0);
    for (int64_t split = 0; split < splits; ++split) {
      const double weight = probability(lse_of(split), lse);
      if (weight == 0) continue;  // a part without mass has no say, whatever it holds
      outs.load(split * tokens + query, head, s.part.data());
      add_scaled(weight, s.part.data(), dim, s.sum.data());
    }
    out.store(query, head, s.sum.data());
    element(params.lse, head, query) = static_cast<float>(lse);
  });
}

}  // namespace openmsa::reference
