// The stages of the reference: the meaning of every operation in float64 and plain loops, one file each.
#pragma once

#include "api/stages.h"
#include "host/elements.h"
#include "host/heads.h"
#include "host/parallel.h"
#include "host/sequences.h"

namespace openmsa::reference {

using host::element;
using host::factor_of;
using host::Heads;
using host::KeyBlock;
using host::load_index;
using host::parallel_for;
using host::QueryKeys;
using host::selected_blocks;
using host::Sequences;
using host::store_index;
using host::visible_tokens;

void select(const SelectParams& params);
void attend(const AttendParams& params);
void backward(const BackwardParams& params);
void combine(const CombineParams& params);
void captured_mass(const CapturedMassParams& params);
void append(const AppendParams& params);

}  // namespace openmsa::reference
