#include "cpu/stages.h"
#include "reference/stages.h"

namespace openmsa::cpu {

void backward(const BackwardParams& params) { reference::backward(params); }

}  // namespace openmsa::cpu
