#include "cpu/stages.h"
#include "reference/stages.h"

namespace openmsa::cpu {

void attend(const AttendParams& params) { reference::attend(params); }

}  // namespace openmsa::cpu
