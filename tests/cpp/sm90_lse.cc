// index_lse by the launchers of the sm90 backend, beside the reference: over selected blocks and over whole prefixes.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "cpp/sm90_lse_problem.h"
#include "cuda/common/error.h"
#include "cuda/sm90/plan/launch.h"

namespace openmsa::testing {
namespace {

using cases::gpu_memory;
using cuda::check_cuda;
using cuda::sm90::LseParams;

constexpr DataType kTypes[] = {OPENMSA_BFLOAT16, OPENMSA_FLOAT16, OPENMSA_FLOAT8_E4M3};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Sm90Lse, GraphReplaySeesWhatChangedInPlace) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = o.tokens_k = 700;
  o.cu_seqlens_q = {0, 200, 700};
  o.cu_seqlens_k = {0, 200, 700};
  o.topk = 3;
  SelectProblem problem(o, normal);
  for (const bool selected : {true, false}) {
    HostTensor indices = selected ? any_indices(o) : HostTensor{};
    const PlacedLse placed(gpu_memory(), problem, indices);
    const GuardedWorkspace workspace(gpu_memory(), placed.workspace());
    const auto stream = static_cast<cudaStream_t>(gpu_memory().stream());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    placed.launch(workspace.data());
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
    check_cuda(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    expect_close_lse(placed.result(), lse_on_reference(problem, indices), "as captured");
    const std::vector<int32_t> offsets = {0, 511, 700};
    SelectProblem other = problem;
    other.options.cu_seqlens_q = other.options.cu_seqlens_k = offsets;
    other.cu_seqlens_q = other.cu_seqlens_k = int32_tensor(offsets);
    for (const int32_t* const at : {placed.params().layout.cu_seqlens_q, placed.params().layout.cu_seqlens_k}) {
      gpu_memory().upload(const_cast<int32_t*>(at), offsets.data(), 3 * sizeof(int32_t));
    }
    check_cuda(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    expect_close_lse(placed.result(), lse_on_reference(other, indices), "other offsets");
    check_cuda(cudaGraphExecDestroy(replay), "cudaGraphExecDestroy");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
}

TEST(Sm90Lse, EveryTypeShapeLayoutAndLength) {
  SKIP_WITHOUT_GPU();
  for (const DataType dtype : kTypes) {
    for (const int64_t dim : {64, 128}) {
      for (const int64_t block : {64, 128}) {
        for (const int64_t length : {1, 127, 128, 129, 2047, 2049}) {
          Options o;
          o.dtype = dtype;
          o.dim = dim;
          o.block_size = block;
          o.tokens_q = std::min<int64_t>(length, 70);
          o.tokens_k = length;
          o.topk = 6;
          const SelectProblem problem(o, normal, static_cast<uint64_t>(length));
          compare_both_lse(problem, describe(o));
          const SelectProblem pages = in_pages(problem);
          const HostTensor indices = any_indices(o);
          compare_lse(pages, indices, describe(pages.options));
          expect_same_lse(lse_on_gpu(pages, indices), lse_on_gpu(problem, indices), "pages and rows, " + describe(o));
        }
      }
    }
  }
}

TEST(Sm90Lse, HeadsAndTopk) {
  SKIP_WITHOUT_GPU();
  for (const auto& [heads, key_heads] :
       {std::pair<int64_t, int64_t>{1, 1}, {16, 1}, {16, 16}, {16, 4}, {6, 2}, {5, 1}, {3, 3}}) {
    for (const int64_t topk : {1, 16, 64}) {
      Options o;
      o.index_heads = heads;
      o.index_key_heads = key_heads;
      o.topk = topk;
      o.tokens_q = 131;
      o.tokens_k = 1500;
      o.dim = o.block_size = 64;
      o.indices_dtype = topk == 16 ? OPENMSA_INT64 : OPENMSA_INT32;
      const SelectProblem problem(o, normal);
      compare_both_lse(problem, describe(o));
      const SelectProblem pages = in_pages(problem);
      compare_lse(pages, any_indices(pages.options), describe(pages.options));
    }
  }
}

// Blocks that many rows choose and blocks that few do, tiles of every fill, several sequences in one pass.
TEST(Sm90Lse, SelectionsOfLongSequences) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = o.tokens_k = 4000;
  o.topk = 8;
  const SelectProblem problem(o, normal);
  compare_lse(problem, selected_indices(problem), describe(o));
  o.cu_seqlens_q = o.cu_seqlens_k = {0, 3, 1003, 1003, 1200, 3990, 4000};
  const SelectProblem packed(o, normal);
  compare_lse(packed, selected_indices(packed), "packed");
  compare_lse(packed, {}, "packed");
}

TEST(Sm90Lse, StridedOutputsAndIndices) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = 200;
  o.tokens_k = 500;
  o.topk = 5;
  o.indices_strides = {7, 40, 1};  // token-major, with gaps
  o.lse_strides = {1, 6};
  compare_both_lse(SelectProblem(o, normal), "token-major");
  o.indices_strides = {-3000, -11, 2};
  o.lse_strides = {-400, -2};
  compare_both_lse(SelectProblem(o, normal), "backwards");
}

TEST(Sm90Lse, Sequences) {
  SKIP_WITHOUT_GPU();
  struct Variant {
    const char* what;
    std::vector<int32_t> q, k, starts;
  };
  const Variant variants[] = {
      {"packed documents", {0, 1, 128, 257, 257, 900}, {0, 1, 128, 257, 257, 900}, {}},
      {"prefixes of several lengths", {0, 100, 130, 131, 400}, {0, 300, 331, 700, 969}, {}},
      {"more queries than keys", {0, 200, 300, 700}, {0, 50, 350, 360}, {}},
      {"no keys", {0, 10, 40}, {0, 0, 40}, {}},
      {"fragments of one document", {0, 100, 300, 600}, {0, 100, 300, 600}, {0, 0, 0}},
      {"shared prefixes that begin anywhere", {0, 60, 130, 200}, {0, 400, 700, 900}, {3, 3, 701}},
  };
  for (const Variant& variant : variants) {
    for (const int64_t block : {64, 128}) {
      Options o;
      o.cu_seqlens_q = variant.q;
      o.cu_seqlens_k = variant.k;
      o.k_starts = variant.starts;
      o.tokens_q = variant.q.back();
      o.tokens_k = variant.k.back();
      o.block_size = block;
      o.topk = 4;
      compare_both_lse(SelectProblem(o, normal), variant.what);
    }
  }
  Options paged = paged_options({700, 1, 129, 0, 64, 1000}, {200, 1, 100, 5, 64, 30}, 64);
  paged.tokens_q += 9;  // padded rows
  paged.topk = 4;
  compare_both_lse(SelectProblem(paged, normal), "paged requests with padded rows");
}

TEST(Sm90Lse, NothingToDo) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = 0;
  o.tokens_k = 100;
  compare_both_lse(SelectProblem(o), "no queries");
  o.tokens_q = 5;
  o.tokens_k = 0;
  compare_both_lse(SelectProblem(o), "no keys");
  o.cu_seqlens_q = o.cu_seqlens_k = {0};
  compare_both_lse(SelectProblem(o), "no sequences");
}

TEST(Sm90Lse, NanAndInfiniteScores) {
  SKIP_WITHOUT_GPU();
  for (const DataType dtype : {OPENMSA_BFLOAT16, OPENMSA_FLOAT16}) {
    Options o;
    o.dtype = dtype;
    o.tokens_q = 150;
    o.tokens_k = 900;
    o.topk = 3;
    SelectProblem problem(o, normal);
    // Of either sign, as the query's element 0 has it: -inf counts for nothing, +inf makes the sum infinite.
    for (const int64_t key : {5, 130, 131, 640}) set_element(problem.index_k, kInfinity, key, 0, 0);
    compare_both_lse(problem, "some infinite scores");
    for (const int64_t key : {270, 271, 899}) set_element(problem.index_k, std::nanf(""), key, 0, 3);
    compare_both_lse(problem, "and some NaN");
    for (int64_t query = 0; query < o.tokens_q; ++query) {
      for (int64_t head = 0; head < o.index_heads; ++head) set_element(problem.index_q, -1, query, head, 0);
    }
    for (int64_t key = 0; key < o.tokens_k; ++key) {
      set_element(problem.index_k, 0, key, 0, 3);
      set_element(problem.index_k, kInfinity, key, 0, 0);
    }
    const std::vector<float> none = lse_on_gpu(problem);
    EXPECT_EQ(std::count(none.begin(), none.end(), -kInfinity), static_cast<int64_t>(none.size()));
    compare_both_lse(problem, "every score -inf");
    set_element(problem.index_k, std::nanf(""), 300, 0, 3);
    compare_both_lse(problem, "every score -inf but a NaN");
    // Blocks of -inf around one of finite scores.
    for (int64_t key = 256; key < 384; ++key) set_element(problem.index_k, 60, key, 0, 0);
    set_element(problem.index_k, 0, 300, 0, 3);
    compare_both_lse(problem, "few finite scores");
  }
  Options o;
  o.dtype = OPENMSA_FLOAT8_E4M3;
  o.tokens_q = 100;
  o.tokens_k = 400;
  o.topk = 2;
  SelectProblem problem(o, normal);
  set_element(problem.index_k, std::nanf(""), 300, 0, 70);
  compare_both_lse(problem, "NaN in float8");
}

TEST(Sm90Lse, LargeAndTinyScores) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = 100;
  o.tokens_k = 700;
  o.topk = 3;
  const SelectProblem problem(o, normal);
  for (const double scale : {5e-324, 1e-200, 1e-40, 1e-20, 1e-10, 1e-3, 10.0, 1e4, 1e10, 1e20, 3e37, 1e200}) {
    compare_both_lse(problem, "scale " + std::to_string(std::log10(scale)), scale);
  }
  // Maxima far from 0 in a row's first keys, and in its last.
  SelectProblem steps = problem;
  for (int64_t query = 0; query < o.tokens_q; ++query) {
    for (int64_t head = 0; head < o.index_heads; ++head)
      set_element(steps.index_q, head < 2 ? 100 : -100, query, head, 0);
  }
  for (int64_t key = 0; key < o.tokens_k; ++key) {
    set_element(steps.index_k, static_cast<float>(key / 100) * 300 - 1000, key, 0, 0);
  }
  compare_both_lse(steps, "steps");
}

TEST(Sm90Lse, InvisibleMemoryHasNoInfluence) {
  SKIP_WITHOUT_GPU();
  // Keys: a gap, a document, a gap, a document, a gap; everything between is NaN.
  Options o;
  o.tokens_q = 200;
  o.tokens_k = 700;
  o.cu_seqlens_q = {0, 90, 200};
  o.cu_seqlens_k = {0, 190, 600};
  o.k_starts = {17, 250};
  o.topk = 3;
  SelectProblem problem(o, normal);
  const HostTensor indices = any_indices(o);
  const std::vector<float> selected = lse_on_gpu(problem, indices), prefix = lse_on_gpu(problem);
  expect_close_lse(selected, lse_on_reference(problem, indices), "before");
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 17}, {190, 250}, {600, 700}}) {
    for (int64_t j = begin; j < end; ++j) {
      for (int64_t d = 0; d < o.dim; ++d) set_element(problem.index_k, std::nanf(""), j, 0, d);
    }
  }
  expect_same_lse(lse_on_gpu(problem, indices), selected, "gaps of packed keys, selected");
  expect_same_lse(lse_on_gpu(problem), prefix, "gaps of packed keys, prefix");

  Options paged = paged_options({300, 1, 129}, {20, 1, 2}, 128);
  paged.topk = 3;
  SelectProblem pages(paged, normal);
  const HostTensor page_indices = any_indices(paged);
  const std::vector<float> expected = lse_on_gpu(pages, page_indices);
  std::vector<bool> seen(static_cast<size_t>(paged.pages * 128));
  for (size_t b = 0; b < paged.seq_lens.size(); ++b) {
    for (int32_t j = 0; j < paged.seq_lens[b]; ++j) {
      const int64_t page = paged.block_table[b * static_cast<size_t>(paged.max_pages) + static_cast<size_t>(j / 128)];
      seen[static_cast<size_t>(page * 128 + j % 128)] = true;
    }
  }
  for (int64_t row = 0; row < paged.pages * 128; ++row) {
    for (int64_t d = 0; d < paged.dim && !seen[static_cast<size_t>(row)]; ++d) {
      set_element(pages.index_k, std::nanf(""), row / 128, row % 128, 0, d);
    }
  }
  expect_same_lse(lse_on_gpu(pages, page_indices), expected, "page tails");
}

int32_t hostile(std::mt19937_64& random, int32_t usual) {
  const int32_t values[] = {std::numeric_limits<int32_t>::min(), -1, 0, 1, usual / 2, usual - 1, usual, usual + 1,
                            std::numeric_limits<int32_t>::max()};
  return random() % 2 == 0 ? values[random() % std::size(values)]
                           : static_cast<int32_t>(random() % static_cast<uint64_t>(usual + 1));
}

TEST(Sm90Lse, HostileOffsetsAndTables) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 random(3);
  for (int round = 0; round < 60; ++round) {
    Options o;
    o.dim = o.block_size = 64;
    o.index_heads = 2;
    o.topk = 3;
    const size_t batch = 1 + random() % 5;
    for (size_t b = 0; b <= batch; ++b) o.cu_seqlens_q.push_back(hostile(random, 150));
    o.tokens_q = 150;
    o.tokens_k = 500;
    if (round % 3 == 0) {
      o.pages = 9;
      o.max_pages = 7;
      for (size_t b = 0; b < batch; ++b) {
        o.seq_lens.push_back(hostile(random, 7 * 64));
        for (int64_t page = 0; page < o.max_pages; ++page) o.block_table.push_back(hostile(random, 9));
      }
    } else {
      for (size_t b = 0; b <= batch; ++b) o.cu_seqlens_k.push_back(hostile(random, 500));
      for (size_t b = 0; b < batch && round % 3 == 1; ++b) o.k_starts.push_back(hostile(random, 500));
    }
    compare_both_lse(SelectProblem(o, normal), "round " + std::to_string(round));
  }
}

TEST(Sm90Lse, RepeatsAndSplitsGiveTheSameBits) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = o.tokens_k = 3000;
  o.topk = 8;
  const SelectProblem problem(o, normal);
  const HostTensor indices = any_indices(o);
  for (const bool selected : {true, false}) {
    const HostTensor& used = selected ? indices : HostTensor{};
    const PlacedLse placed(gpu_memory(), problem, used);
    const std::vector<float> first = lse_on_gpu(placed);
    for (int repeat = 0; repeat < 20; ++repeat) expect_same_lse(lse_on_gpu(placed), first, "repeat");
    // Other tiles, other neighbours.
    for (const int64_t rows : {1, 70, 301}) {
      const SelectProblem part = last_queries(problem, rows);
      const HostTensor part_indices = selected ? index_rows(indices, o.tokens_q - rows, rows) : HostTensor{};
      expect_same_lse(lse_on_gpu(part, part_indices), lse_rows(first, o.index_heads, o.tokens_q - rows, rows), "alone");
    }
  }
}

// Several chunks of the plan, whose rows the reference checks around a border.
TEST(Sm90Lse, ManyItems) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = o.tokens_k = 4500;
  o.index_heads = 16;
  o.topk = 64;
  o.dim = o.block_size = 64;
  const SelectProblem problem(o, normal);
  const HostTensor indices = any_indices(o);
  const int64_t chunk = cuda::sm90::plan_chunk(indices.view);
  ASSERT_LT(2 * chunk, o.tokens_q);
  const std::vector<float> all = lse_on_gpu(problem, indices);
  for (const int64_t end : {int64_t{2}, chunk + 2, o.tokens_q}) {
    constexpr int64_t kRows = 4;
    const int64_t rows = std::min(end, kRows);
    Options part_options = o;
    part_options.tokens_q = rows;
    part_options.tokens_k = end;
    SelectProblem part(part_options);
    for (int64_t i = 0; i < rows; ++i) {
      std::copy_n(problem.index_q.element(end - rows + i), 2 * o.index_heads * o.dim, part.index_q.element(i));
    }
    std::copy_n(problem.index_k.element(), 2 * end * o.dim, part.index_k.element());
    expect_close_lse(lse_rows(all, o.index_heads, end - rows, rows),
                     lse_on_reference(part, index_rows(indices, end - rows, rows)),
                     "rows before " + std::to_string(end));
  }
}

TEST(Sm90Lse, ManySequences) {
  SKIP_WITHOUT_GPU();
  constexpr int32_t kSequences = 70000;
  Options paged;
  paged.tokens_q = kSequences;
  paged.index_heads = 1;
  paged.dim = paged.block_size = 64;
  paged.topk = 2;
  paged.pages = 50;
  paged.max_pages = 2;
  Options packed = paged;
  packed.pages = packed.max_pages = 0;
  packed.cu_seqlens_k = {0};
  for (int32_t b = 0; b <= kSequences; ++b) paged.cu_seqlens_q.push_back(b);
  packed.cu_seqlens_q = paged.cu_seqlens_q;
  for (int32_t b = 0; b < kSequences; ++b) {
    paged.seq_lens.push_back(b % 70);
    paged.block_table.push_back(b % 50);
    paged.block_table.push_back((b + 7) % 50);
    packed.cu_seqlens_k.push_back(packed.cu_seqlens_k.back() + b % 5);
  }
  packed.tokens_k = packed.cu_seqlens_k.back();
  compare_both_lse(SelectProblem(paged), "70,000 requests of one query");
  compare_both_lse(SelectProblem(packed), "70,000 sequences of one query");
}

// A tensor whose elements lie further apart than 2^31; only the rows that are used are written.
TEST(Sm90Lse, MoreThanTwoToTheThirtyOneElements) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = 40;
  o.tokens_k = 2200;
  o.topk = 3;
  o.dtype = OPENMSA_FLOAT8_E4M3;
  const SelectProblem problem(o, normal);
  constexpr int64_t kStride = int64_t{1} << 20;
  const int64_t bytes = o.tokens_k * kStride;
  ASSERT_GT(bytes, int64_t{1} << 31);
  void* wide = gpu_memory().allocate(bytes);
  check_cuda(cudaMemcpy2D(wide, kStride, problem.index_k.element(), 128, 128, static_cast<size_t>(o.tokens_k),
                          cudaMemcpyHostToDevice),
             "cudaMemcpy2D");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the copy of pageable memory may still be under way
  for (const bool selected : {true, false}) {
    const HostTensor indices = selected ? any_indices(o) : HostTensor{};
    const PlacedLse placed(gpu_memory(), problem, indices);
    const GuardedWorkspace workspace(gpu_memory(), placed.workspace());
    LseParams params = placed.params();
    params.workspace = workspace.data();
    params.index_k.data = wide;
    params.index_k.strides[0] = kStride;
    selected ? cuda::sm90::launch_selected_lse(params) : cuda::sm90::launch_prefix_lse(params);
    expect_close_lse(placed.result(), lse_on_reference(problem, indices), selected ? "selected" : "prefix");
  }
  gpu_memory().release(wide);
}

TEST(Sm90Lse, WorkspaceHasABound) {
  SKIP_WITHOUT_GPU();
  // Shapes alone count: no tensor is there.
  LseParams params;
  for (const auto& [tokens, heads, topk] :
       {std::tuple<int64_t, int64_t, int64_t>{1 << 20, 4, 16}, {1 << 24, 1, 1}, {1 << 20, 16, 64}, {3, 16, 64}}) {
    params.layout.tokens_q = params.layout.tokens_k = tokens;
    params.index_q = make_tensor(nullptr, OPENMSA_BFLOAT16, {tokens, heads, 128});
    params.index_k = make_tensor(nullptr, OPENMSA_BFLOAT16, {tokens, 1, 128});
    params.indices = make_tensor(nullptr, OPENMSA_INT32, {heads, tokens, topk});
    params.index_q.device_index = gpu_memory().device_index();
    EXPECT_LT(cuda::sm90::selected_lse_workspace(params), int64_t{64} << 20) << tokens << " " << heads << " " << topk;
  }
  // Places are numbered in 32 bits.
  params.layout.tokens_k = int64_t{1} << 33;
  EXPECT_THROW(static_cast<void>(cuda::sm90::selected_lse_workspace(params)), Error);
}

}  // namespace
}  // namespace openmsa::testing
