// How results are compared, and the limits of docs/definition.md.
#pragma once

#include <string>
#include <vector>

#include "cli/verify_problem.h"

namespace openmsa::cli {

struct Comparison {
  std::string result;
  double error = 0;  // infinite where NaN, infinities or -1 stand in other places
  double limit = 0;
  bool passed() const { return error <= limit; }
};

// Every result of `want`, the reference's. `selected` tells how `indices` are compared: equal, or as a selection of
// real index vectors, whose blocks may change places where their scores differ by no more than the margin.
std::vector<Comparison> compare(const std::string& operation, const VerifyInputs& inputs, IndexVectors selected,
                                const Results& got, const Results& want);

}  // namespace openmsa::cli
