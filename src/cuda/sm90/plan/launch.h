// Host side of plan: for each block of keys, the rows that chose it.
#pragma once

#include <cstdint>

#include "api/stages.h"
#include "cuda/sm90/plan/config.h"

namespace openmsa::cuda::sm90 {

struct PlanParams {
  SequenceLayout layout;
  int64_t block_size = 128;
  int64_t key_heads = 1;                // Hik
  Tensor indices{};                     // [Hi, Tq, topk] int32 or int64
  int64_t first_token = 0, tokens = 0;  // the chunk: at most plan_chunk(indices) queries
  void* stream = nullptr;
  void* workspace = nullptr;  // plan_workspace() bytes, aligned to 256
};

// The chunk's items (config.h), those of one block together and each block's in the order (query, head, slot), and
// beside each the place of its block. Entries that name no visible block have place `no_place` and come last. Equal
// inputs give equal arrays.
struct Plan {
  const uint32_t* places = nullptr;  // [count], device
  const uint32_t* items = nullptr;   // [count], device
  int64_t count = 0;
  uint32_t places_per_head = 0, no_place = 0;
};

// Queries planned at a time.
int64_t plan_chunk(const Tensor& indices);
// For any chunk of the call.
int64_t plan_workspace(const PlanParams& params);
Plan launch_plan(const PlanParams& params);

// owners[i] = the sequence of packed row first + i (config.h, kNoOwner without one). Nothing to do, and no owners
// needed, for a layout without cu_seqlens_q.
void launch_find_owners(const SequenceLayout& layout, int64_t block_size, int64_t first, int64_t rows, uint32_t* owners,
                        void* stream);

IndexView index_view(const Tensor& indices);

// Bytes of scratch that sort_pairs needs; kernels.cu.
int64_t sort_workspace(int64_t count, int first_bit, int last_bit);
// Sorts by bits [first_bit, last_bit) of the keys, equal ones in their order. Either pair of arrays holds the result:
// returns true when it is the second.
bool sort_pairs(uint32_t* const (&keys)[2], uint32_t* const (&values)[2], int64_t count, int first_bit, int last_bit,
                void* scratch, int64_t scratch_bytes, void* stream);

struct PlanKernels {
  const void* find_owners;
  const void* list_items;
};
PlanKernels plan_kernels();

}  // namespace openmsa::cuda::sm90
