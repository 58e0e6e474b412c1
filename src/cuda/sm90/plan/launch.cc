#include "cuda/sm90/plan/launch.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "api/error.h"
#include "cuda/common/error.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/plan/config.h"

namespace openmsa::cuda::sm90 {
namespace {

constexpr int64_t kAlignment = 256;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Sizes and places of a chunk of `tokens` queries.
struct Shape {
  int64_t count = 0;
  int64_t owner_bytes = 0, array_bytes = 0, sort_bytes = 0;
  int64_t places_per_head = 0, no_place = 0;
  int first_bit = 0, last_bit = 0;

  int64_t bytes() const { return owner_bytes + 4 * array_bytes + sort_bytes; }
};

Shape shape_of(const PlanParams& params, int64_t tokens) {
  const SequenceLayout& layout = params.layout;
  Shape shape;
  shape.count = tokens * params.indices.shape[0] * params.indices.shape[2];
  const auto words = [](int64_t count) { return aligned(count * static_cast<int64_t>(sizeof(uint32_t))); };
  shape.owner_bytes = layout.cu_seqlens_q != nullptr ? words(tokens) : 0;
  shape.array_bytes = words(shape.count);
  // Contiguous keys: blocks begin at any row, and those of one sequence at most once in block_size rows. Sorted by
  // place / block_size alone, in fewer passes, the items of a block are still neighbours, since a sequence's queries
  // are.
  const int64_t unit = layout.paged ? 1 : params.block_size;
  const int64_t places = layout.paged ? layout.pages : layout.tokens_k;
  shape.places_per_head = std::max<int64_t>((places + unit - 1) / unit, 1) * unit;
  constexpr int64_t kMostPlaces = std::numeric_limits<uint32_t>::max();
  if (shape.places_per_head > kMostPlaces / params.key_heads) {
    fail_unsupported(layout.paged ? "index_k_cache" : "index_k", ": backend sm90 does not support ", places,
                     layout.paged ? " pages of " : " keys of ", params.key_heads, " heads with index_lse; it supports ",
                     kMostPlaces / params.key_heads);
  }
  shape.no_place = shape.places_per_head * params.key_heads;
  shape.first_bit = std::countr_zero(static_cast<uint64_t>(unit));
  shape.last_bit = static_cast<int>(std::bit_width(static_cast<uint64_t>(shape.no_place)));
  shape.sort_bytes = aligned(sort_workspace(shape.count, shape.first_bit, shape.last_bit));
  return shape;
}

}  // namespace

IndexView index_view(const Tensor& indices) {
  return {indices.data, indices.strides[0], indices.strides[1], indices.strides[2], indices.dtype == OPENMSA_INT64};
}

int64_t plan_chunk(const Tensor& indices) {
  const int64_t entries = indices.shape[0] * indices.shape[2];
  return std::clamp<int64_t>(kPlanItems / entries, 1, kPlanTokens);
}

int64_t plan_workspace(const PlanParams& params) {
  return shape_of(params, std::min(params.layout.tokens_q, plan_chunk(params.indices))).bytes();
}

void launch_find_owners(const SequenceLayout& layout, int64_t block_size, int64_t first, int64_t rows, uint32_t* owners,
                        void* stream) {
  static_assert(kNoOwner == ~uint32_t{0}, "set bytewise");
  check_cuda(
      cudaMemsetAsync(owners, 0xff, static_cast<size_t>(rows) * sizeof(uint32_t), static_cast<cudaStream_t>(stream)),
      "cudaMemsetAsync");
  if (layout.batch == 0) return;
  constexpr int64_t kMostSequences = 4096, kRounds = 4, kMostShares = 64;
  OwnerArguments args{};
  args.layout = layout;
  args.block_size = block_size;
  args.first = first;
  args.end = first + rows;
  args.owners = owners;
  LaunchShape shape;
  shape.blocks_x = std::min(layout.batch, kMostSequences);
  shape.blocks_y =
      static_cast<int>(std::clamp<int64_t>(layout.tokens_q / layout.batch / (kRounds * kPlanThreads), 1, kMostShares));
  shape.threads = kPlanThreads;
  launch_kernel("find_owners", plan_kernels().find_owners, shape, stream, &args);
}

Plan launch_plan(const PlanParams& params) {
  const Shape shape = shape_of(params, params.tokens);
  auto* next = static_cast<unsigned char*>(params.workspace);
  const auto take = [&next](int64_t bytes) {
    void* const taken = next;
    next += bytes;
    return taken;
  };
  auto* const owners = static_cast<uint32_t*>(take(shape.owner_bytes));
  uint32_t* places[2];
  uint32_t* items[2];
  for (uint32_t*& array : places) array = static_cast<uint32_t*>(take(shape.array_bytes));
  for (uint32_t*& array : items) array = static_cast<uint32_t*>(take(shape.array_bytes));

  ListArguments args{};
  args.layout = params.layout;
  args.block_size = params.block_size;
  args.indices = index_view(params.indices);
  args.heads = static_cast<uint32_t>(params.indices.shape[0]);
  args.topk = static_cast<uint32_t>(params.indices.shape[2]);
  args.heads_per_key_head = args.heads / static_cast<uint32_t>(params.key_heads);
  args.places_per_head = static_cast<uint32_t>(shape.places_per_head);
  args.no_place = static_cast<uint32_t>(shape.no_place);
  args.first_token = params.first_token;
  args.count = static_cast<uint32_t>(shape.count);
  args.places = places[0];
  args.items = items[0];
  if (params.layout.cu_seqlens_q != nullptr) {
    launch_find_owners(params.layout, params.block_size, params.first_token, params.tokens, owners, params.stream);
    args.owners = owners;
  }
  LaunchShape list;
  list.blocks_x = (shape.count + kPlanThreads - 1) / kPlanThreads;
  list.threads = kPlanThreads;
  launch_kernel("list_items", plan_kernels().list_items, list, params.stream, &args);
  const bool second = sort_pairs(places, items, shape.count, shape.first_bit, shape.last_bit, take(shape.sort_bytes),
                                 shape.sort_bytes, params.stream);

  Plan plan;
  plan.places = places[second ? 1 : 0];
  plan.items = items[second ? 1 : 0];
  plan.count = shape.count;
  plan.places_per_head = args.places_per_head;
  plan.no_place = args.no_place;
  return plan;
}

}  // namespace openmsa::cuda::sm90
