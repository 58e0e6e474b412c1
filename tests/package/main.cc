#include <cmath>
#include <cstdio>
#include <openmsa/openmsa.hpp>
#include <vector>

// Merges two attentions with equal weights: the mean of their outputs.
int main() {
  const std::vector<float> outs = {1, 2, 3, 4}, lses = {0, 0};
  std::vector<float> out(2), lse(1);
  const openmsa::Tensor outs_view = openmsa::make_tensor(outs.data(), OPENMSA_FLOAT32, {2, 1, 1, 2});
  const openmsa::Tensor lses_view = openmsa::make_tensor(lses.data(), OPENMSA_FLOAT32, {2, 1, 1});
  const openmsa::Tensor out_view = openmsa::make_tensor(out.data(), OPENMSA_FLOAT32, {1, 1, 2});
  const openmsa::Tensor lse_view = openmsa::make_tensor(lse.data(), OPENMSA_FLOAT32, {1, 1});
  openmsa::CombineArgs args;
  args.outs = &outs_view;
  args.lses = &lses_view;
  args.out = &out_view;
  args.lse = &lse_view;
  openmsa::combine(args);
  if (std::abs(out[0] - 2) > 1e-6f || std::abs(out[1] - 3) > 1e-6f || std::abs(lse[0] - std::log(2.0f)) > 1e-6f) {
    return 1;
  }
  try {
    args.out = nullptr;
    openmsa::combine(args);
  } catch (const openmsa::Error& error) {
    std::printf("%s\n%s\n", error.what(), openmsa::info().c_str());
    return 0;
  }
  return 1;
}
