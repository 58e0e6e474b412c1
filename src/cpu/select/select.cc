#include "cpu/stages.h"
#include "reference/stages.h"

namespace openmsa::cpu {

void select(const SelectParams& params) { reference::select(params); }

}  // namespace openmsa::cpu
