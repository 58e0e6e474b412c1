#include "cpu/stages.h"
#include "reference/stages.h"

namespace openmsa::cpu {

void combine(const CombineParams& params) { reference::combine(params); }

}  // namespace openmsa::cpu
