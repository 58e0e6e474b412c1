// Calls of sm90 attention: graphs, streams, workspace, repeats, hostile values, many sequences, sizes beyond 2^31.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "cpp/case_compare.h"
#include "cpp/sm90_attend_problem.h"
#include "cuda/common/error.h"

namespace openmsa::testing {
namespace {

using cases::gpu_memory;
using cuda::check_cuda;

void overwrite(const PlacedTensor& placed, HostTensor& host, const std::vector<int32_t>& values) {
  if (!placed.present()) return;
  host = int32_tensor(values);
  gpu_memory().upload(placed.tensor()->data, values.data(), static_cast<int64_t>(values.size() * sizeof(int32_t)));
}

// A call captured into a graph, and the problem that its replays must solve when what it reads changes in place.
class CapturedAttend {
 public:
  explicit CapturedAttend(const AttendProblem& captured) : problem(captured), placed_(gpu_memory(), problem) {
    const AttendParams params = placed_.params();
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    sm90_backend().check(params);
    sm90_backend().attend(params);
    check_cuda(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&replay_, graph, 0), "cudaGraphInstantiate");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  CapturedAttend(const CapturedAttend&) = delete;
  CapturedAttend& operator=(const CapturedAttend&) = delete;
  ~CapturedAttend() { static_cast<void>(cudaGraphExecDestroy(replay_)); }

  void expect_replay(const std::string& what) {
    const AttendOptions& o = problem.options;
    overwrite(placed_.cu_seqlens_q, problem.cu_seqlens_q, o.cu_seqlens_q);
    overwrite(placed_.block_table, problem.block_table, o.block_table);
    overwrite(placed_.seq_lens, problem.seq_lens, o.seq_lens);
    gpu_memory().upload(placed_.indices.tensor()->data, problem.indices.element(),
                        o.index_heads * o.tokens_q * o.topk * static_cast<int64_t>(sizeof(int32_t)));
    placed_.clear_outputs();
    check_cuda(cudaGraphLaunch(replay_, stream_), "cudaGraphLaunch");
    expect_close({placed_.out(), placed_.lse()}, attend_on_reference(problem), o, what);
  }

  AttendProblem problem;

 private:
  PlacedAttend placed_;
  cudaStream_t stream_ = static_cast<cudaStream_t>(gpu_memory().stream());
  cudaGraphExec_t replay_ = nullptr;
};

TEST(Sm90AttendGraph, ReplaySeesWhatChangedInPlace) {
  SKIP_WITHOUT_GPU();
  AttendOptions o;
  o.topk = 3;
  o = in_pages(o, {700, 300, 0}, {20, 11, 1});
  // Every page holds numbers: what is visible changes.
  AttendProblem problem(o);
  std::mt19937_64 random(6);
  for (HostTensor* const tensor : {&problem.q, &problem.k, &problem.v}) {
    for (size_t at = static_cast<size_t>(tensor->offset); at + 256 < tensor->storage.size(); at += 2) {
      const auto bits = static_cast<uint16_t>(0x3f00 + random() % 0x100 + (random() % 2 << 15));
      std::copy_n(reinterpret_cast<const unsigned char*>(&bits), 2, &tensor->storage[at]);
    }
  }
  CapturedAttend captured(problem);
  AttendOptions& now = captured.problem.options;
  captured.expect_replay("as captured");
  now.seq_lens = {128, 500, 641};
  captured.expect_replay("other lengths");
  std::reverse(now.block_table.begin(), now.block_table.end());
  captured.expect_replay("other tables");
  now.cu_seqlens_q = {0, 1, 1, 31};
  captured.expect_replay("other query offsets, one padded row");
  captured.problem.indices = AttendProblem(now, hostile_blocks, normal, 9).indices;
  captured.expect_replay("other blocks");
  now.seq_lens = {0, 0, 0};
  captured.expect_replay("no keys");
}

TEST(Sm90Attend, WorkspaceMayHoldAnything) {
  SKIP_WITHOUT_GPU();
  AttendOptions square, wide, empty;
  square.tokens_q = square.tokens_k = 600;
  wide.tokens_q = 20;
  wide.tokens_k = 9000;
  wide.topk = 40;
  wide.group = 2;
  empty.tokens_q = empty.tokens_k = 0;
  for (const AttendOptions& o : {square, wide, in_pages(square, {900, 0, 300}, {3, 1, 2}), empty}) {
    const AttendProblem problem(o);
    PlacedAttend placed(gpu_memory(), problem);
    AttendParams params = placed.params();
    params.execution.workspace_bytes = sm90_backend().workspace(params);
    const GuardedWorkspace workspace(gpu_memory(), params.execution.workspace_bytes);
    params.execution.workspace = workspace.data();
    Attention first;
    for (const int fill : {0, 0x5a, 0x7f, 0xff}) {
      const std::vector<unsigned char> image(static_cast<size_t>(params.execution.workspace_bytes),
                                             static_cast<unsigned char>(fill));
      if (!image.empty()) gpu_memory().upload(workspace.data(), image.data(), params.execution.workspace_bytes);
      placed.clear_outputs();
      sm90_backend().attend(params);
      const Attention got{placed.out(), placed.lse()};
      if (fill == 0) {
        first = got;
        expect_close(got, attend_on_reference(problem), o, describe(o));
      }
      expect_same_bits(got, first, describe(o) + ", fill " + std::to_string(fill));
      workspace.expect_guards_as_they_were();
    }
  }
}

int32_t hostile(std::mt19937_64& random, int32_t usual) {
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min(), kMax = std::numeric_limits<int32_t>::max();
  const int32_t values[] = {kMin, -1, 0, 1, usual / 2, usual - 1, usual, usual + 1, kMax};
  return random() % 2 == 0 ? values[random() % std::size(values)] : static_cast<int32_t>(random() % (usual + 1));
}

TEST(Sm90Attend, HostileOffsets) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 random(3);
  for (int round = 0; round < 40; ++round) {
    AttendOptions o;
    o.tokens_q = 150;
    o.dim = o.block_size = 64;
    o.group = 1 << round % 5;
    o.tokens_k = round % 4 < 2 ? 500 : 3000;
    const size_t batch = 1 + random() % 5;
    for (size_t b = 0; b <= batch; ++b) {
      o.cu_seqlens_q.push_back(hostile(random, 150));
      o.cu_seqlens_k.push_back(hostile(random, static_cast<int32_t>(o.tokens_k)));
    }
    if (round % 2 == 1) {
      for (size_t b = 0; b < batch; ++b) o.k_starts.push_back(hostile(random, static_cast<int32_t>(o.tokens_k)));
    }
    expect_gpu_attends_as_reference(AttendProblem(o, hostile_blocks), "contiguous, round " + std::to_string(round));
  }
}

TEST(Sm90Attend, HostileTables) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 random(4);
  for (int round = 0; round < 40; ++round) {
    AttendOptions o;
    o.tokens_q = 60;
    o.dim = o.block_size = 64;
    o.group = 1 << round % 5;
    o.pages = 9;
    o.max_pages = round % 2 == 0 ? 7 : 40;
    const size_t batch = 1 + random() % 5;
    o.cu_seqlens_q.push_back(hostile(random, 60));
    for (size_t b = 0; b < batch; ++b) {
      o.cu_seqlens_q.push_back(hostile(random, 60));
      o.seq_lens.push_back(hostile(random, static_cast<int32_t>(o.max_pages * 64)));
      for (int64_t page = 0; page < o.max_pages; ++page) o.block_table.push_back(hostile(random, 9));
    }
    expect_gpu_attends_as_reference(AttendProblem(o, hostile_blocks), "paged, round " + std::to_string(round));
  }
}

TEST(Sm90AttendLarge, RepeatsAreBitwiseEqual) {
  SKIP_WITHOUT_GPU();
  AttendOptions square, small_group, many;
  square.tokens_q = square.tokens_k = 4000;
  square.topk = 16;
  small_group.tokens_q = small_group.tokens_k = 3000;
  small_group.group = 2;
  small_group.topk = 20;
  many.tokens_q = 33;
  many.tokens_k = 40000;
  many.topk = 64;
  for (const AttendOptions& o : {square, small_group, many, in_pages(square, {20000, 3000, 64}, {1, 400, 2})}) {
    const AttendProblem problem(o);
    const Attention first = attend_on_gpu(problem);
    for (int repeat = 0; repeat < 20; ++repeat) expect_same_bits(attend_on_gpu(problem), first, describe(o));
  }
}

// Neighbours in a tile and the order of a row's entries change no more than the order of sums.
TEST(Sm90Attend, RowsOfOtherBatches) {
  SKIP_WITHOUT_GPU();
  AttendOptions o;
  o.tokens_q = 90;
  o.tokens_k = 2000;
  o.topk = 6;
  const AttendProblem whole(o);
  const Attention expected = attend_on_gpu(whole);
  for (const int64_t rows : {1, 5, 83}) {
    AttendOptions part = o;
    part.tokens_q = rows;
    AttendProblem last = whole;
    last.options = part;
    last.q = cases::make_host_tensor(o.dtype, {rows, 32, 128}, {}, 0xff);
    std::copy_n(whole.q.element(o.tokens_q - rows), rows * 32 * 128 * 2, last.q.element());
    last.indices = cases::make_host_tensor(OPENMSA_INT32, {2, rows, o.topk}, {}, 0xff);
    for (int64_t head = 0; head < 2; ++head) {
      std::copy_n(whole.indices.element(head, o.tokens_q - rows), rows * o.topk * 4, last.indices.element(head));
    }
    expect_close(attend_on_gpu(last), rows_of(expected, o, o.tokens_q - rows, rows), part, std::to_string(rows));
  }
}

TEST(Sm90AttendLarge, ManyRequests) {
  SKIP_WITHOUT_GPU();
  constexpr int32_t kRequests = 20000;
  AttendOptions o;
  o.tokens_q = kRequests;
  o.index_heads = 1;
  o.group = 4;
  o.dim = o.block_size = 64;
  o.topk = 2;
  o.pages = 50;
  o.max_pages = 2;
  for (int32_t b = 0; b <= kRequests; ++b) o.cu_seqlens_q.push_back(b);
  for (int32_t b = 0; b < kRequests; ++b) {
    o.seq_lens.push_back(b % 70);
    o.block_table.push_back(b % 50);
    o.block_table.push_back((b + 7) % 50);
  }
  o.cu_seqlens_q[1] = o.cu_seqlens_q[0];  // one row of the second request more
  // The problem's own walk over the sequences is quadratic: all pages hold numbers instead.
  AttendOptions plain = o;
  plain.tokens_q = 1;
  AttendProblem problem(plain);
  problem.options = o;
  std::mt19937_64 random(8);
  problem.q = cases::make_host_tensor(o.dtype, {o.tokens_q, 4, 64}, {}, 0);
  problem.indices = cases::make_host_tensor(OPENMSA_INT32, {1, o.tokens_q, 2}, {}, 0xff);
  for (int64_t row = 0; row < o.tokens_q; ++row) {
    for (int64_t d = 0; d < 256; ++d) set_element(problem.q, normal(random), row, d / 64, d % 64);
    const int32_t entries[2] = {static_cast<int32_t>(random() % 3), 0};
    std::copy_n(reinterpret_cast<const unsigned char*>(entries), 8, problem.indices.element(0, row));
  }
  for (HostTensor* const tensor : {&problem.k, &problem.v}) {
    for (int64_t page = 0; page < 50; ++page) {
      for (int64_t i = 0; i < 64 * 64; ++i) set_element(*tensor, normal(random), page, i / 64, 0, i % 64);
    }
  }
  expect_gpu_attends_as_reference(problem, "requests of one query");
}

TEST(Sm90AttendLarge, TwoStreams) {
  SKIP_WITHOUT_GPU();
  AttendOptions square, wide;
  square.tokens_q = square.tokens_k = 2000;
  wide.tokens_q = 20;
  wide.tokens_k = 20000;
  wide.topk = 32;
  const AttendProblem a(square, distinct_blocks, normal, 1), b(wide, distinct_blocks, normal, 2);
  const Attention expected_a = attend_on_gpu(a), expected_b = attend_on_gpu(b);
  const PlacedAttend placed_a(gpu_memory(), a), placed_b(gpu_memory(), b);
  cudaStream_t streams[2] = {};
  for (cudaStream_t& stream : streams) {
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  for (int round = 0; round < 20; ++round) {
    AttendParams params_a = placed_a.params(), params_b = placed_b.params();
    params_a.execution.stream = streams[0];
    params_b.execution.stream = streams[1];
    sm90_backend().attend(params_a);
    sm90_backend().attend(params_b);
  }
  for (cudaStream_t stream : streams) {
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
  }
  expect_same_bits({placed_a.out(), placed_a.lse()}, expected_a, "stream 0");
  expect_same_bits({placed_b.out(), placed_b.lse()}, expected_b, "stream 1");
}

// Tokens of K and V, then pages, lie 2^20 elements apart; only the rows that are used are written.
TEST(Sm90AttendLarge, StridesBeyondInt32) {
  SKIP_WITHOUT_GPU();
  AttendOptions o;
  o.tokens_q = 40;
  o.tokens_k = 2200;
  const AttendProblem problem(o);
  const Attention expected = attend_on_reference(problem);
  const PlacedAttend placed(gpu_memory(), problem);
  constexpr int64_t kStride = int64_t{1} << 20;
  AttendParams params = placed.params();
  const int64_t bytes = 18 * 128 * kStride * 2;
  auto* const wide = static_cast<unsigned char*>(gpu_memory().allocate(bytes));
  // V's rows lie half a row's stride behind K's.
  for (const auto& [image, first] : {std::pair{&problem.k, int64_t{0}}, {&problem.v, kStride}}) {
    check_cuda(cudaMemcpy2D(wide + first, 2 * kStride, image->element(), 256, 256, static_cast<size_t>(o.tokens_k),
                            cudaMemcpyHostToDevice),
               "cudaMemcpy2D");
  }
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  params.k.data = wide;
  params.v.data = wide + kStride;
  params.k.strides[0] = params.v.strides[0] = kStride;
  sm90_backend().check(params);
  sm90_backend().attend(params);
  expect_close({placed.out(), placed.lse()}, expected, o, "token stride 2^20");

  AttendOptions pages = in_pages(o, {2200}, {40});
  pages.pages = 18;
  pages.max_pages = 20;
  pages.block_table.clear();
  for (int32_t page = 0; page < 20; ++page) pages.block_table.push_back(std::min<int32_t>(page, 17));
  AttendProblem page_problem(pages);
  page_problem.q = problem.q;
  page_problem.indices = problem.indices;
  const PlacedAttend page_placed(gpu_memory(), page_problem);
  AttendParams page_params = page_placed.params();
  for (Tensor* const tensor : {&page_params.k, &page_params.v}) {
    tensor->strides[0] = 128 * kStride;
    tensor->strides[1] = kStride;
  }
  page_params.k.data = wide;
  page_params.v.data = wide + kStride;
  sm90_backend().attend(page_params);
  expect_close({page_placed.out(), page_placed.lse()}, expected, o, "page stride 2^27");
  gpu_memory().release(wide);
}

// 2^31 elements of q and out: the last rows of copies of one document, each beyond the chunk before.
TEST(Sm90AttendLarge, QueriesBeyondInt32) {
  SKIP_WITHOUT_GPU();
  constexpr int64_t kCopies = 400;
  AttendOptions o;
  o.tokens_q = o.tokens_k = 700;
  o.index_heads = 4;
  o.topk = 16;
  const AttendProblem document(o);
  const Attention expected = attend_on_gpu(document);
  expect_close(rows_of(expected, o, 600, 100), rows_of(attend_on_reference(document), o, 600, 100), o, "document");
  const int64_t tokens = kCopies * o.tokens_q, heads = o.index_heads * o.group;
  ASSERT_GT(tokens * heads * o.dim, int64_t{1} << 31);
  const PlacedAttend placed(gpu_memory(), document);
  AttendParams params = placed.params();
  std::vector<void*> allocations;
  const auto repeat = [&](Tensor* tensor, int32_t axis) {
    const int64_t row = tensor->strides[axis] * (tensor->dtype == OPENMSA_INT32 ? 4 : 2);
    auto* const all = static_cast<char*>(gpu_memory().allocate(tokens * row));
    allocations.push_back(all);
    for (int64_t copy = 0; copy < kCopies; ++copy) {
      check_cuda(cudaMemcpy(all + copy * o.tokens_q * row, tensor->data, static_cast<size_t>(o.tokens_q * row),
                            cudaMemcpyDeviceToDevice),
                 "cudaMemcpy");
    }
    tensor->data = all;
    tensor->shape[axis] = tokens;
  };
  repeat(&params.q, 0);
  repeat(&params.k, 0);
  repeat(&params.v, 0);
  repeat(&params.out, 0);
  // Token-major, so that copies follow each other.
  std::vector<int32_t> rows(static_cast<size_t>(tokens * o.index_heads * o.topk));
  for (int64_t i = 0; i < tokens * o.index_heads; ++i) {
    std::copy_n(
        reinterpret_cast<const int32_t*>(document.indices.element(i % o.index_heads, i / o.index_heads % o.tokens_q)),
        o.topk, rows.data() + i * o.topk);
  }
  void* const indices = gpu_memory().allocate(static_cast<int64_t>(rows.size() * 4));
  allocations.push_back(indices);
  gpu_memory().upload(indices, rows.data(), static_cast<int64_t>(rows.size() * 4));
  Tensor chosen = make_tensor(indices, OPENMSA_INT32, {o.index_heads, tokens, o.topk});
  chosen.strides[0] = o.topk;
  chosen.strides[1] = o.index_heads * o.topk;
  params.indices = &chosen;
  params.lse = nullptr;
  std::vector<int32_t> ends;
  for (int64_t b = 0; b <= kCopies; ++b) ends.push_back(static_cast<int32_t>(b * o.tokens_q));
  const PlacedTensor offsets(gpu_memory(), int32_tensor(ends));
  params.layout.batch = kCopies;
  params.layout.tokens_q = params.layout.tokens_k = tokens;
  params.layout.cu_seqlens_q = params.layout.cu_seqlens_k = static_cast<const int32_t*>(offsets.tensor()->data);
  sm90_backend().check(params);
  sm90_backend().attend(params);
  for (const int64_t copy : {int64_t{0}, int64_t{1}, kCopies / 2, kCopies - 1}) {
    HostTensor part = cases::make_host_tensor(o.dtype, {o.tokens_q, heads, o.dim}, {}, 0);
    gpu_memory().download(part.element(),
                          static_cast<char*>(params.out.data) + copy * o.tokens_q * params.out.strides[0] * 2,
                          o.tokens_q * heads * o.dim * 2);
    // Documents do not begin where tiles do: sums run in other orders.
    AttendOptions without_lse = o;
    without_lse.with_lse = false;
    expect_close({cases::decode(part), {}}, {expected.out, {}}, without_lse, "copy " + std::to_string(copy));
  }
  for (void* const pointer : allocations) gpu_memory().release(pointer);
}

}  // namespace
}  // namespace openmsa::testing
