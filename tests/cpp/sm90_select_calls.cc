// Calls of the sm90 selection: graphs, streams, workspace, hostile values, many sequences.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "cpp/sm90_problem.h"
#include "cuda/common/error.h"

namespace openmsa::testing {
namespace {

using cases::gpu_memory;
using cuda::check_cuda;

constexpr int32_t kInt32Min = std::numeric_limits<int32_t>::min();
constexpr int32_t kInt32Max = std::numeric_limits<int32_t>::max();

void overwrite(const PlacedTensor& tensor, const std::vector<int32_t>& values) {
  gpu_memory().upload(tensor.tensor()->data, values.data(), static_cast<int64_t>(values.size() * sizeof(int32_t)));
}

// A call captured into a graph, and the problem that its replays must solve when offsets and tables change in place.
class CapturedSelect {
 public:
  explicit CapturedSelect(const Options& o, bool own_workspace = true) : problem(o), placed_(gpu_memory(), problem) {
    SelectParams params = placed_.params();
    if (own_workspace) {
      params.execution.workspace_bytes = sm90_backend().workspace(params);
      workspace_ = std::make_unique<GuardedWorkspace>(gpu_memory(), params.execution.workspace_bytes);
      params.execution.workspace = workspace_->data();
    }
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    sm90_backend().check(params);
    sm90_backend().select(params);
    check_cuda(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&replay_, graph, 0), "cudaGraphInstantiate");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  CapturedSelect(const CapturedSelect&) = delete;
  CapturedSelect& operator=(const CapturedSelect&) = delete;
  ~CapturedSelect() { static_cast<void>(cudaGraphExecDestroy(replay_)); }

  void expect_replay(const std::string& what) {
    overwrite_if_there(placed_.cu_seqlens_q, problem.cu_seqlens_q, problem.options.cu_seqlens_q);
    overwrite_if_there(placed_.cu_seqlens_k, problem.cu_seqlens_k, problem.options.cu_seqlens_k);
    overwrite_if_there(placed_.k_starts, problem.k_starts, problem.options.k_starts);
    overwrite_if_there(placed_.block_table, problem.block_table, problem.options.block_table);
    overwrite_if_there(placed_.seq_lens, problem.seq_lens, problem.options.seq_lens);
    placed_.clear_outputs();
    check_cuda(cudaGraphLaunch(replay_, stream_), "cudaGraphLaunch");
    expect_equal({placed_.indices(), placed_.index_lse()}, run_on_reference(problem), what);
    if (workspace_ != nullptr) workspace_->expect_guards_as_they_were();
  }

  SelectProblem problem;

 private:
  static void overwrite_if_there(const PlacedTensor& placed, HostTensor& host, const std::vector<int32_t>& values) {
    if (!placed.present()) return;
    host = int32_tensor(values);
    overwrite(placed, values);
  }

  PlacedProblem placed_;
  std::unique_ptr<GuardedWorkspace> workspace_;
  cudaStream_t stream_ = static_cast<cudaStream_t>(gpu_memory().stream());
  cudaGraphExec_t replay_ = nullptr;
};

// Registered before every other test that launches, so that the capture holds the kernels' first use.
TEST(Sm90Graph, ReplaySeesWhatChangedInPlace) {
  SKIP_WITHOUT_GPU();
  Options o = paged_options({700, 300, 0}, {2, 1, 1}, 128);
  o.topk = 3;
  CapturedSelect captured(o, false);
  Options& now = captured.problem.options;
  captured.expect_replay("as captured");
  now.seq_lens = {128, 500, 641};
  captured.expect_replay("other lengths");
  std::reverse(now.block_table.begin(), now.block_table.end());
  captured.expect_replay("other tables");
  now.cu_seqlens_q = {0, 1, 1, 3};
  captured.expect_replay("other query offsets, one padded row");
}

TEST(Sm90Graph, ReplayWithLongAndShortRequests) {
  SKIP_WITHOUT_GPU();
  Options o = paged_options({9000, 9000, 9000, 9000}, {4, 4, 4, 4}, 128);
  o.topk = 5;
  o.seq_lens = {0, 0, 0, 0};  // captured before any request is there
  CapturedSelect captured(o);
  captured.expect_replay("as captured");
  for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{9000, 1, 129, 4},
                                              {9000, 9000, 8999, 8065},
                                              {0, 9000, 0, 0},
                                              {300, 300, 300, 300},
                                              {kInt32Max, -5, 9000, 2}}) {
    captured.problem.options.seq_lens = lengths;
    captured.expect_replay("lengths " + ::testing::PrintToString(lengths));
  }
}

TEST(Sm90Graph, ReplayWithOtherDocuments) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = 200;
  o.tokens_k = 9000;
  o.topk = 20;
  o.cu_seqlens_q = {0, 100, 200};
  o.cu_seqlens_k = {0, 4000, 9000};
  o.k_starts = {0, 4000};
  CapturedSelect captured(o);
  Options& now = captured.problem.options;
  captured.expect_replay("as captured");
  const std::vector<int32_t> changes[][3] = {{{0, 1, 200}, {0, 8900, 9000}, {0, 0}},
                                             {{0, 200, 200}, {0, 9000, 9000}, {0, 9000}},
                                             {{0, 0, 0}, {0, 0, 0}, {0, 0}},
                                             {{50, 150, 20}, {0, 9000, 9000}, {0, 100}},
                                             {{0, 3, 4}, {0, 5000, 9000}, {0, 0}}};
  for (const auto& [q, k, starts] : changes) {
    now.cu_seqlens_q = q;
    now.cu_seqlens_k = k;
    now.k_starts = starts;
    captured.expect_replay("queries " + ::testing::PrintToString(q));
  }
}

TEST(Sm90Select, WorkspaceMayHoldAnything) {
  SKIP_WITHOUT_GPU();
  Options square, wide, paged = paged_options({9000, 0, 300}, {3, 1, 2}, 128), empty;
  square.tokens_q = square.tokens_k = 600;
  wide.tokens_q = 20;
  wide.tokens_k = 9000;
  wide.topk = 40;
  paged.tokens_q += 7;
  empty.tokens_q = empty.tokens_k = 0;
  for (const Options& o : {square, wide, paged, empty}) {
    const SelectProblem problem(o);
    PlacedProblem placed(gpu_memory(), problem);
    const Selection expected = run_on_reference(problem);
    SelectParams params = placed.params();
    params.execution.workspace_bytes = sm90_backend().workspace(params);
    const GuardedWorkspace workspace(gpu_memory(), params.execution.workspace_bytes);
    params.execution.workspace = workspace.data();
    for (const int fill : {0, 0x5a, 0x7f, 0xff}) {
      const std::vector<unsigned char> image(static_cast<size_t>(params.execution.workspace_bytes),
                                             static_cast<unsigned char>(fill));
      if (!image.empty()) gpu_memory().upload(workspace.data(), image.data(), params.execution.workspace_bytes);
      placed.clear_outputs();
      sm90_backend().select(params);
      expect_equal({placed.indices(), placed.index_lse()}, expected, describe(o) + ", fill " + std::to_string(fill));
      workspace.expect_guards_as_they_were();
    }
  }
}

// Values that a fault could put behind the pointers: the kernel clamps them as the reference does, and touches nothing
// else.
int32_t hostile(std::mt19937_64& random, int32_t usual) {
  const int32_t values[] = {kInt32Min, -1, 0, 1, usual / 2, usual - 1, usual, usual + 1, kInt32Max};
  return random() % 2 == 0 ? values[random() % std::size(values)] : static_cast<int32_t>(random() % (usual + 1));
}

TEST(Sm90Select, HostileOffsets) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 random(3);
  for (int round = 0; round < 40; ++round) {
    Options o;
    o.tokens_q = 150;
    o.dim = o.block_size = 64;
    o.index_heads = 2;
    o.topk = round % 3 == 0 ? 20 : 3;
    o.tokens_k = round % 4 < 2 ? 500 : 3000;
    const size_t batch = 1 + random() % 5;
    for (size_t b = 0; b <= batch; ++b) {
      o.cu_seqlens_q.push_back(hostile(random, 150));
      o.cu_seqlens_k.push_back(hostile(random, static_cast<int32_t>(o.tokens_k)));
    }
    if (round % 2 == 1) {
      for (size_t b = 0; b < batch; ++b) o.k_starts.push_back(hostile(random, static_cast<int32_t>(o.tokens_k)));
    }
    expect_gpu_equals_reference(SelectProblem(o), "contiguous, round " + std::to_string(round));
  }
}

TEST(Sm90Select, HostileTables) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 random(4);
  for (int round = 0; round < 40; ++round) {
    Options o;
    o.tokens_q = 60;
    o.dim = o.block_size = 64;
    o.index_heads = 2;
    o.topk = round % 5 == 0 ? 20 : 3;
    o.local_blocks = round % 4;
    o.init_blocks = round % 3;
    o.pages = 9;
    o.max_pages = round % 2 == 0 ? 7 : 40;
    const size_t batch = 1 + random() % 5;
    o.cu_seqlens_q.push_back(hostile(random, 60));
    for (size_t b = 0; b < batch; ++b) {
      o.cu_seqlens_q.push_back(hostile(random, 60));
      o.seq_lens.push_back(hostile(random, static_cast<int32_t>(o.max_pages * 64)));
      for (int64_t page = 0; page < o.max_pages; ++page) o.block_table.push_back(hostile(random, 9));
    }
    expect_gpu_equals_reference(SelectProblem(o), "paged, round " + std::to_string(round));
  }
}

// More rows than a grid's y or z axis holds, in one sequence; the reference checks the last ones.
TEST(Sm90SelectLarge, ManyQueries) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = o.tokens_k = 70000;
  o.index_heads = 1;
  o.dim = 64;
  o.topk = 4;
  o.dtype = OPENMSA_FLOAT8_E4M3;
  const SelectProblem problem(o);
  expect_equal(rows_of(run_on_gpu(problem), o, o.tokens_q - 3, 3), run_on_reference(last_queries(problem, 3)),
               "the last queries");
}

TEST(Sm90SelectLarge, ManyRequests) {
  SKIP_WITHOUT_GPU();
  constexpr int32_t kRequests = 70000;
  Options o;
  o.tokens_q = kRequests;
  o.index_heads = 1;
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
  expect_gpu_equals_reference(SelectProblem(o), "70,000 requests of one query");
}

TEST(Sm90SelectLarge, ManyDocuments) {
  SKIP_WITHOUT_GPU();
  constexpr int32_t kDocuments = 70000;
  Options o;
  o.index_heads = 1;
  o.dim = o.block_size = 64;
  o.topk = 2;
  o.cu_seqlens_q = o.cu_seqlens_k = {0};
  for (int32_t b = 0; b < kDocuments; ++b) {
    o.cu_seqlens_q.push_back(o.cu_seqlens_q.back() + b % 3);
    o.cu_seqlens_k.push_back(o.cu_seqlens_k.back() + (b == 40000 ? 20000 : b % 5));
  }
  o.tokens_q = o.cu_seqlens_q.back();
  o.tokens_k = o.cu_seqlens_k.back();
  expect_gpu_equals_reference(SelectProblem(o), "70,000 documents, one of them long");
  std::swap(o.cu_seqlens_q[30000], o.cu_seqlens_q[60000]);
  expect_gpu_equals_reference(SelectProblem(o), "70,000 documents, two offsets out of order");
}

TEST(Sm90SelectLarge, TwoStreams) {
  SKIP_WITHOUT_GPU();
  Options square, wide;
  square.tokens_q = square.tokens_k = 3000;
  wide.tokens_q = 20;
  wide.tokens_k = 40000;
  square.topk = wide.topk = 4;
  const SelectProblem a(square, normal, 1), b(wide, normal, 2);
  const Selection expected_a = run_on_gpu(a), expected_b = run_on_gpu(b);
  const PlacedProblem placed_a(gpu_memory(), a), placed_b(gpu_memory(), b);
  cudaStream_t streams[2] = {};
  for (cudaStream_t& stream : streams) {
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  for (int round = 0; round < 20; ++round) {
    SelectParams params_a = placed_a.params(), params_b = placed_b.params();
    params_a.execution.stream = streams[0];
    params_b.execution.stream = streams[1];
    sm90_backend().select(params_a);
    sm90_backend().select(params_b);
  }
  for (cudaStream_t stream : streams) {
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
  }
  expect_same_bits({placed_a.indices(), placed_a.index_lse()}, expected_a, "stream 0");
  expect_same_bits({placed_b.indices(), placed_b.index_lse()}, expected_b, "stream 1");
}

TEST(Sm90Select, LeavesTheCurrentDeviceAsItWas) {
  SKIP_WITHOUT_GPU();
  int count = 0, device = -1;
  check_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  check_cuda(cudaSetDevice(count - 1), "cudaSetDevice");
  Options o;
  expect_gpu_equals_reference(SelectProblem(o), "with the last device current");
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  EXPECT_EQ(device, count - 1);
  check_cuda(cudaSetDevice(0), "cudaSetDevice");
}

}  // namespace
}  // namespace openmsa::testing
