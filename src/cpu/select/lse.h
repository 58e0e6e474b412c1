// The log-sum-exp over the selected blocks.
#pragma once

#include "api/stages.h"
#include "host/sequences.h"

namespace openmsa::cpu {

// Writes params.index_lse from params.indices, which are written.
void write_index_lse(const SelectParams& params, const host::Sequences& sequences);

}  // namespace openmsa::cpu
