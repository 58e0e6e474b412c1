// What the sm90 backend refuses among valid arguments, by name, before anything is written.
#pragma once

#include "api/stages.h"

namespace openmsa::cuda::sm90 {

inline constexpr const char* kBackendName = "sm90";

void check_select(const SelectParams& params);
void check_attend(const AttendParams& params);
void check_combine(const CombineParams& params);
void check_captured_mass(const CapturedMassParams& params);
void check_append(const AppendParams& params);

}  // namespace openmsa::cuda::sm90
