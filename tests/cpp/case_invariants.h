// What holds between the results of different calls, whatever the backend: batches, pages and orders do not matter.
#pragma once

#include "cpp/case_run.h"

namespace openmsa::cases {

// Each fails the running test (EXPECT) where its sentence is wrong. `results` are those of the case itself on `in`.

// Every sequence of the batch, called alone, gives the same selection.
void check_sequences_select_alone(const Inputs& in, const Results& results);
// Every sequence called alone gives the same out, lse and index statistics; its gradients add up to the batch's.
void check_sequences_train_alone(const Inputs& in, const Results& forward, const Results& gradients);
// The contiguous operation on keys gathered from the pages gives the same selection.
void check_paged_select_is_contiguous(const Inputs& in, const Results& results);
void check_paged_attend_is_contiguous(const Inputs& in, const HostTensor& indices, const Results& results);
// Entries in another order, repeated, and with garbage among them mean the same: topk + kExtraEntries of them.
inline constexpr int64_t kExtraEntries = 4;
void check_selection_order(const Inputs& in, const HostTensor& indices, const Results& results);
// NaN in blocks that no query selected changes nothing.
void check_unselected_keys(const Inputs& in, const HostTensor& indices, const Results& results);
// d_k, d_v and d_index_k of keys outside every selection, and gradients of queries that see nothing, are 0. Without
// indices every visible key is selected.
void check_zero_gradients(const Inputs& in, const HostTensor* indices, const Results& gradients);
// Attentions over halves of the selection merge to the whole.
void check_halves_combine(const Inputs& in, const HostTensor& indices, const Results& results);

}  // namespace openmsa::cases
