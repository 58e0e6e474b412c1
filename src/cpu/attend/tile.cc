#include "cpu/attend/tile.h"

#include <algorithm>
#include <cstring>

#include "cpu/common/tensor_rows.h"
#include "host/elements.h"

namespace openmsa::cpu {
namespace {

int64_t heads_of(const Tensor& tensor) { return tensor.shape[tensor.rank - 2]; }

AttendBlock block_of(const AttendCall& call, int64_t index_head, const TilePlan& plan, const PlanBlock& block) {
  const AttendParams& p = call.params;
  const int64_t kv_head = call.heads.kv_head(index_head);
  AttendBlock work;
  work.k = token_rows(p.k, block.first, kv_head, call.k_factor);
  work.v = token_rows(p.v, block.first, kv_head, call.v_factor);
  if (p.index != nullptr) {
    work.index_k = token_rows(p.index->index_k, block.first, call.heads.index_key_head(index_head));
  }
  work.keys = block.keys;
  work.entries = plan.entries().data() + block.begin;
  work.count = block.end - block.begin;
  return work;
}

}  // namespace

AttendCall::AttendCall(const AttendParams& attend_params)
    : params(attend_params),
      sequences(params.layout, params.block_size),
      heads{heads_of(params.q), heads_of(params.k), params.index_heads,
            params.index != nullptr ? heads_of(params.index->index_k) : 1},
      key_columns(params.q.shape[2]),
      value_columns(params.out.shape[2]),
      sums_stride(attend_padded_columns(value_columns)),
      k_factor(host::factor_of(params.k_scale)),
      v_factor(host::factor_of(params.v_scale)),
      kl(params.kl != nullptr ? static_cast<size_t>(params.layout.tokens_q * heads.index) : 0) {}

int64_t TileState::floats(const AttendCall& call, int64_t tokens) {
  const int64_t rows = tokens * call.heads.group();
  return rows * call.sums_stride + 2 * (rows + tokens);
}

TileState TileState::start(const AttendCall& call, int64_t tokens, float* memory) {
  static_assert(sizeof(RunningSum) == 2 * sizeof(float) && alignof(RunningSum) == alignof(float));
  const int64_t rows = tokens * call.heads.group(), sums = rows * call.sums_stride;
  std::memset(memory, 0, static_cast<size_t>(sums) * sizeof(float));
  auto* running = reinterpret_cast<RunningSum*>(memory + sums);
  std::uninitialized_fill_n(running, rows + tokens, RunningSum{});
  return {memory, running, call.params.index_lse != nullptr ? running + rows : nullptr};
}

float* TileWorker::own_state(const AttendCall& call, int64_t tokens) {
  return state_.require(TileState::floats(call, tokens));
}

AttendTile TileWorker::prepare(const AttendCall& call, int64_t index_head, const QueryTile& tile) {
  const AttendParams& p = call.params;
  const int64_t group = call.heads.group(), block_size = p.block_size;
  const int64_t chunk_tokens = std::max<int64_t>(1, kChunkRows / group), chunk_rows = chunk_tokens * group;

  AttendTile work;
  work.group = group;
  work.block_size = block_size;
  work.q = {head_rows(p.q, tile.first_query, index_head * group, static_cast<float>(p.scale)), p.q.strides[0]};

  AttendBuffers& buffers = work.buffers;
  buffers.k_panels = k_panels_.require(call.key_columns * block_size);
  buffers.v_panels = v_panels_.require(call.sums_stride * block_size);
  buffers.queries = queries_.require(chunk_rows * call.key_columns);
  buffers.scores = scores_.require(chunk_rows * block_size);
  corrections_.resize(static_cast<size_t>(chunk_rows));
  sums_.resize(static_cast<size_t>(chunk_rows));
  keys_.resize(static_cast<size_t>(chunk_rows));
  buffers.corrections = corrections_.data();
  buffers.sums = sums_.data();
  buffers.keys = keys_.data();

  if (p.index_lse != nullptr) {
    const Tensor& index_q = p.index->index_q;
    work.index_q = {head_rows(index_q, tile.first_query, index_head, static_cast<float>(p.index->scale)),
                    index_q.strides[0]};
    buffers.index_k_panels = index_k_panels_.require(index_q.shape[2] * block_size);
    buffers.index_queries = index_queries_.require(chunk_tokens * index_q.shape[2]);
    buffers.index_scores = index_scores_.require(chunk_tokens * block_size);
  }
  return work;
}

void TileWorker::walk(const AttendCall& call, int64_t index_head, const QueryTile& tile, const TilePlan& tile_plan,
                      int64_t first, int64_t end, const TileState& state) {
  AttendTile work = prepare(call, index_head, tile);
  work.sums = state.sums;
  work.sums_stride = call.sums_stride;
  work.running = state.running;
  work.index_running = state.index_running;
  for (int64_t block = first; block < end; ++block) {
    attend_block(work, block_of(call, index_head, tile_plan, tile_plan.blocks()[static_cast<size_t>(block)]));
  }
}

void TileWorker::finish(AttendCall& call, int64_t index_head, const QueryTile& tile, const TilePlan& tile_plan,
                        const TileState& state) {
  const AttendParams& p = call.params;
  const int64_t group = call.heads.group(), first_head = index_head * group;
  lse_.clear();
  index_lse_.clear();
  factors_.resize(static_cast<size_t>(group));
  for (int64_t t = 0; t < tile.queries; ++t) {
    const int64_t query = tile.first_query + t;
    for (int64_t h = 0; h < group; ++h) {
      const RunningSum& row = state.running[t * group + h];
      lse_.push_back(log_sum_exp(row));
      if (p.lse != nullptr) host::element(*p.lse, first_head + h, query) = lse_.back();
      factors_[static_cast<size_t>(h)] = row.sum == 0.0F ? 0.0F : 1.0F / row.sum;  // no mass: 0
    }
    attend_store(state.sums + t * group * call.sums_stride, call.sums_stride, factors_.data(), group,
                 output_head_rows(p.out, query, first_head));
    if (p.index_lse == nullptr) continue;
    index_lse_.push_back(log_sum_exp(state.index_running[t]));
    host::element(*p.index_lse, index_head, query) = index_lse_.back();
  }
  if (p.kl != nullptr) walk_kl(call, index_head, tile, tile_plan);
}

void TileWorker::walk_kl(AttendCall& call, int64_t index_head, const QueryTile& tile, const TilePlan& tile_plan) {
  kl_.assign(static_cast<size_t>(tile.queries), 0.0);
  AttendTile work = prepare(call, index_head, tile);
  work.lse = lse_.data();
  work.index_lse = index_lse_.data();
  work.kl = kl_.data();
  for (const PlanBlock& block : tile_plan.blocks()) {
    attend_kl_block(work, block_of(call, index_head, tile_plan, block));
  }
  for (int64_t t = 0; t < tile.queries; ++t) {
    call.kl[static_cast<size_t>((tile.first_query + t) * call.heads.index + index_head)] = kl_[static_cast<size_t>(t)];
  }
}

}  // namespace openmsa::cpu
