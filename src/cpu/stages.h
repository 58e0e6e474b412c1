// The stages of the cpu backend, one room each.
#pragma once

#include "api/stages.h"

namespace openmsa::cpu {

void select(const SelectParams& params);
void attend(const AttendParams& params);
void backward(const BackwardParams& params);
void combine(const CombineParams& params);
void captured_mass(const CapturedMassParams& params);
void append(const AppendParams& params);

}  // namespace openmsa::cpu
