// Comparisons of results: by bits, by nan/inf places and tolerances, and of selections by the margin rule.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "api/stages.h"
#include "cpp/case_run.h"

namespace openmsa::cases {

// The elements of a floating-point tensor of rank 0 to 4, in row-major order.
std::vector<double> decode(const HostTensor& tensor);
// Entries of a block-number tensor [Hi, Tq, topk] in row-major order.
std::vector<int64_t> decode_blocks(const HostTensor& indices);

::testing::AssertionResult same_bits(const HostTensor& got, const HostTensor& want);
// All results of the same names have the same bits.
::testing::AssertionResult same_bits(const Results& got, const Results& want);

// NaN and infinities in the same places; the relative norm of the difference of the finite elements at most `relative`,
// and no element off by more than 8 * relative * the largest magnitude. Differences of numbers of size `floor` that
// should cancel may leave `floor` times the tolerance.
::testing::AssertionResult close(const HostTensor& got, const HostTensor& want, double relative, double floor = 0);

// The contract's tolerance of a result (docs/definition.md, accuracy).
double tolerance(const Case& c, const std::string& result);
// Gradients of the index branch are sums of pi - p, times d_kl index_scale / (Hi Tq). Where the two are equal, float32
// log-sum-exps leave 1e-7 of probabilities near 1: a thousandth of that size is the floor, as in the Python tests.
double floor_of(const Case& c, const std::string& result);
// Every result but indices, each with its tolerance.
::testing::AssertionResult close(const Case& c, const Results& got, const Results& want);

// Rows of a selection that differ from the reference's, against the float64 block scores of `params` (CPU tensors):
// forced blocks, order, -1 suffix, and no better block left out, where blocks whose scores differ by at most `margin`
// may change places and equal scores may not.
::testing::AssertionResult valid_selection(const HostTensor& got, const HostTensor& want, const SelectParams& params,
                                           double margin);
// 5e-6 x scale x max |index_q| x max |index_k|, over what the queries of the call see.
double selection_margin(const Inputs& in);

}  // namespace openmsa::cases
