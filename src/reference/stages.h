// The stages of the reference: the meaning of every operation in float64 and plain loops, one file each.
#pragma once

#include "api/stages.h"

namespace openmsa::reference {

void select(const SelectParams& params);
void attend(const AttendParams& params);
void backward(const BackwardParams& params);
void combine(const CombineParams& params);
void captured_mass(const CapturedMassParams& params);
void append(const AppendParams& params);

}  // namespace openmsa::reference
