#include "cpu/stages.h"
#include "reference/stages.h"

namespace openmsa::cpu {

void append(const AppendParams& params) { reference::append(params); }

}  // namespace openmsa::cpu
