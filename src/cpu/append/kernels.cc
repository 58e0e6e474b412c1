#include "cpu/append/kernels.h"

#include "cpu/common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/append/kernels.cc"
#include "hwy/foreach_target.h"

// After foreach_target.h
#include "cpu/common/pack-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

// Quotients, not products with the inverse: what is rounded to storage is the same everywhere.
void AppendQuotients(const StoredRows& from, float divisor, uint8_t* to) {
  const FloatVector divisors = hn::Set(Floats(), divisor);
  with_stored(from, [&](const auto* row) HWY_ATTR {
    int64_t i = 0;
    for (; i + kLanes <= from.columns; i += kLanes) store_narrowed(hn::Div(load_widened(row + i), divisors), to + i);
    for (; i < from.columns; ++i) narrow_one(widen_one(row + i) / divisor, to + i);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace openmsa::cpu {

HWY_EXPORT(AppendQuotients);

void append_quotients(const StoredRows& from, float divisor, uint8_t* to) {
  HWY_DYNAMIC_DISPATCH(AppendQuotients)(from, divisor, to);
}

}  // namespace openmsa::cpu
#endif
