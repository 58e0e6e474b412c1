#include "cpu/stages.h"
#include "reference/stages.h"

namespace openmsa::cpu {

void captured_mass(const CapturedMassParams& params) { reference::captured_mass(params); }

}  // namespace openmsa::cpu
