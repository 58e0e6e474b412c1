#include "cpu/captured_mass/kernels.h"

#include "cpu/common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/captured_mass/kernels.cc"
#include "hwy/foreach_target.h"

// After foreach_target.h
#include "cpu/common/math-inl.h"
#include "cpu/common/matrix-inl.h"
#include "cpu/common/pack-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

int64_t MassScoreStride(int64_t keys) { return padded_columns(keys); }

void MassQueries(const StoredRows& rows, int64_t count, float* queries) {
  widen_rows(rows, count, queries, rows.columns);
}

void MassBlockOf(const MassBlock& block) {
  const int64_t depth = block.k.columns, stride = padded_columns(block.keys);
  pack_transposed(block.k, block.keys, block.panels);
  multiply<false>(block.rows, block.keys, depth, LeftMatrix{block.queries, depth, 1}, block.panels, block.scores,
                  stride);
  for (int64_t row = 0; row < block.rows; ++row) {
    RunningSum& sum = block.sums[row * block.sums_stride];
    sum.largest = -kInfinity;
    sum.sum = 0.0f;
    take_in(block.scores + row * stride, block.row_keys[row], &sum);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace openmsa::cpu {

HWY_EXPORT(MassScoreStride);
HWY_EXPORT(MassQueries);
HWY_EXPORT(MassBlockOf);

int64_t mass_score_stride(int64_t keys) { return HWY_DYNAMIC_DISPATCH(MassScoreStride)(keys); }
void mass_queries(const StoredRows& rows, int64_t count, float* queries) {
  HWY_DYNAMIC_DISPATCH(MassQueries)(rows, count, queries);
}
void mass_block(const MassBlock& block) { HWY_DYNAMIC_DISPATCH(MassBlockOf)(block); }

}  // namespace openmsa::cpu
#endif
