// The sm90 selection beside the reference, where the case table does not reach: sizes, repeats, splits, graphs,
// streams, hostile values. Small integers make every score exact, so that selections must be equal, ties included.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpp/sm90_problem.h"
#include "cuda/common/error.h"

namespace openmsa::testing {
namespace {

using cases::gpu_memory;
using cuda::check_cuda;

constexpr int32_t kInt32Min = std::numeric_limits<int32_t>::min();
constexpr int32_t kInt32Max = std::numeric_limits<int32_t>::max();

void compare(const SelectProblem& problem, const std::string& what) {
  expect_equal(run_on_gpu(problem), run_on_reference(problem), what);
}

std::string describe(const Options& o) {
  return "type " + std::to_string(o.dtype) + ", dim " + std::to_string(o.dim) + ", block " +
         std::to_string(o.block_size) + ", heads " + std::to_string(o.index_heads) + "/" +
         std::to_string(o.index_key_heads) + ", topk " + std::to_string(o.topk) + ", init " +
         std::to_string(o.init_blocks) + ", local " + std::to_string(o.local_blocks) + ", Tq " +
         std::to_string(o.tokens_q) + ", Tk " + std::to_string(o.tokens_k) + ", pages " + std::to_string(o.pages);
}

// Requests of these lengths over shuffled pages, with the last `queries` tokens of each as queries.
Options paged_options(const std::vector<int32_t>& lengths, const std::vector<int32_t>& queries, int64_t block_size) {
  Options o;
  o.block_size = block_size;
  o.seq_lens = lengths;
  o.cu_seqlens_q = {0};
  for (const int32_t n : queries) o.cu_seqlens_q.push_back(o.cu_seqlens_q.back() + n);
  o.tokens_q = o.cu_seqlens_q.back();
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  o.max_pages = longest / block_size + 2;
  o.pages = static_cast<int64_t>(lengths.size()) * o.max_pages + 3;
  o.tokens_k = 0;
  std::vector<int32_t> order(static_cast<size_t>(o.pages));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(7);
  std::shuffle(order.begin(), order.end(), random);
  o.block_table.assign(order.begin(), order.begin() + static_cast<int64_t>(lengths.size()) * o.max_pages);
  return o;
}

void overwrite(const PlacedTensor& tensor, const std::vector<int32_t>& values) {
  gpu_memory().upload(tensor.tensor()->data, values.data(), static_cast<int64_t>(values.size() * sizeof(int32_t)));
}

// The first test of the program, so that the capture holds the kernel's first use.
TEST(Sm90Select, GraphReplaySeesWhatChangedInPlace) {
  SKIP_WITHOUT_GPU();
  Options o = paged_options({700, 300, 0}, {2, 1, 1}, 128);
  o.topk = 3;
  SelectProblem problem(o);
  const PlacedProblem placed(gpu_memory(), problem);
  const auto stream = static_cast<cudaStream_t>(gpu_memory().stream());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  sm90_backend().check(placed.params());
  sm90_backend().select(placed.params());
  check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check_cuda(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");

  const auto expect_replay = [&](const std::string& what) {
    check_cuda(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    expect_equal({placed.indices(), placed.index_lse()}, run_on_reference(problem), what);
  };
  expect_replay("as captured");
  problem.seq_lens = int32_tensor(problem.options.seq_lens = {128, 500, 641});
  overwrite(placed.seq_lens, problem.options.seq_lens);
  expect_replay("other lengths");
  std::reverse(problem.options.block_table.begin(), problem.options.block_table.end());
  problem.block_table = int32_tensor(problem.options.block_table);
  overwrite(placed.block_table, problem.options.block_table);
  expect_replay("other tables");
  problem.cu_seqlens_q = int32_tensor(problem.options.cu_seqlens_q = {0, 1, 1, 3});
  overwrite(placed.cu_seqlens_q, problem.options.cu_seqlens_q);
  expect_replay("other query offsets, one padded row");
  check_cuda(cudaGraphExecDestroy(replay), "cudaGraphExecDestroy");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

TEST(Sm90Select, EveryTypeShapeAndLayout) {
  SKIP_WITHOUT_GPU();
  for (const DataType dtype : {OPENMSA_BFLOAT16, OPENMSA_FLOAT16, OPENMSA_FLOAT8_E4M3}) {
    for (const int64_t dim : {64, 128}) {
      for (const int64_t block : {64, 128}) {
        Options contiguous;
        contiguous.tokens_k = 1500;
        contiguous.cu_seqlens_q = {0, 130, 130, 300};
        contiguous.cu_seqlens_k = {0, 131, 200, 1500};
        Options paged = paged_options({1, 127, 900, 0, 2049}, {1, 16, 1, 3, 70}, block);
        paged.tokens_q += 5;  // padding
        for (Options o : {contiguous, paged}) {
          o.dtype = dtype;
          o.dim = dim;
          o.block_size = block;
          o.topk = 5;
          compare(SelectProblem(o), describe(o));
        }
      }
    }
  }
}

TEST(Sm90Select, EverySelection) {
  SKIP_WITHOUT_GPU();
  for (const int64_t topk : {1, 2, 15, 16, 31, 32, 33, 63, 64}) {
    for (const int64_t init : {int64_t{0}, int64_t{1}, int64_t{3}, int64_t{40}, std::numeric_limits<int64_t>::max()}) {
      for (const int64_t local :
           {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{40}, std::numeric_limits<int64_t>::max()}) {
        Options o;
        o.tokens_q = 70;
        o.tokens_k = 64 * 50 + 17;
        o.block_size = 64;
        o.dim = 64;
        o.index_heads = 2;
        o.topk = topk;
        o.init_blocks = init;
        o.local_blocks = local;
        compare(SelectProblem(o), describe(o));
      }
    }
  }
}

TEST(Sm90Select, HeadGroups) {
  SKIP_WITHOUT_GPU();
  for (const auto& [heads, key_heads] : {std::pair{1, 1}, {4, 4}, {4, 2}, {16, 1}, {16, 16}, {6, 3}}) {
    Options o;
    o.tokens_q = o.tokens_k = 700;
    o.index_heads = heads;
    o.index_key_heads = key_heads;
    o.topk = 3;
    o.indices_dtype = OPENMSA_INT64;
    compare(SelectProblem(o), describe(o));
  }
}

TEST(Sm90Select, Lengths) {
  SKIP_WITHOUT_GPU();
  for (const int64_t keys : {0, 1, 127, 128, 129, 2047, 2048, 2049}) {
    for (const int64_t queries : {0, 1, 63, 64, 65, 200}) {
      Options o;
      o.tokens_q = queries;
      o.tokens_k = keys;  // fewer keys than queries: the first see nothing
      o.topk = 4;
      o.index_heads = 2;
      compare(SelectProblem(o), describe(o));
    }
  }
}

TEST(Sm90Select, EmptyBatches) {
  SKIP_WITHOUT_GPU();
  Options contiguous;
  contiguous.tokens_q = contiguous.tokens_k = 0;
  contiguous.cu_seqlens_q = contiguous.cu_seqlens_k = {0};
  compare(SelectProblem(contiguous), "B = 0");
  Options paged;
  paged.pages = 2;
  paged.max_pages = 1;
  paged.cu_seqlens_q = {0};
  paged.tokens_q = 9;  // padding alone
  compare(SelectProblem(paged), "B = 0, paged, padded");
  paged.seq_lens = {0, 0};
  paged.block_table = {0, 1};
  paged.cu_seqlens_q = {0, 4, 9};
  compare(SelectProblem(paged), "requests of length 0");
}

TEST(Sm90Select, SpecialScores) {
  SKIP_WITHOUT_GPU();
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const DataType dtype : {OPENMSA_BFLOAT16, OPENMSA_FLOAT16, OPENMSA_FLOAT8_E4M3}) {
    Options o;
    o.dtype = dtype;
    o.tokens_q = 40;
    o.tokens_k = 900;
    o.dim = o.block_size = 64;
    o.index_heads = 2;
    o.topk = 6;
    for (const int64_t local : {0, 1}) {
      o.local_blocks = local;
      SelectProblem problem(o, [](std::mt19937_64& random) { return random() % 3 == 0 ? -1.0F : 0.0F; });
      const auto set_keys = [&](int64_t begin, int64_t end, float value) {
        for (int64_t j = begin; j < end; ++j) {
          for (int64_t d = 0; d < o.dim; ++d) set_element(problem.index_k, value, j, 0, d);
        }
      };
      for (int64_t i = 0; i < o.tokens_q; ++i) {  // one head sees +0, -0 and NaN apart
        for (int64_t d = 0; d < o.dim; ++d) set_element(problem.index_q, d == 0 ? 1.0F : 0.0F, i, 0, d);
      }
      set_keys(0, 64, nan);      // a block of NaN alone
      set_keys(64, 70, nan);     // NaN among others
      set_keys(192, 256, 0.0F);  // +0 and -0 blocks are equal
      set_keys(256, 320, -0.0F);
      if (dtype != OPENMSA_FLOAT8_E4M3) {
        for (int64_t j = 320; j < 384; ++j) set_element(problem.index_k, -inf, j, 0, 0);
        set_element(problem.index_k, inf, 400, 0, 0);
        set_element(problem.index_k, -inf, 500, 0, 0);
      }
      compare(problem, describe(o));
    }
  }
}

TEST(Sm90Select, LargeScoresKeepAnExactLogSumExp) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = 20;
  o.tokens_k = 600;
  o.topk = 2;
  const SelectProblem problem(o, [](std::mt19937_64& random) { return 16.0F * small_integer(random); });
  compare(problem, "scores up to 6e3");
}

TEST(Sm90Select, RandomScoresAgreeWithFloat64) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = 200;
  o.tokens_k = 4000;
  o.topk = 8;
  const SelectProblem problem(o, normal);
  const Selection gpu = run_on_gpu(problem), reference = run_on_reference(problem);
  int64_t different = 0;
  for (size_t i = 0; i < gpu.indices.size(); ++i) different += gpu.indices[i] != reference.indices[i] ? 1 : 0;
  // Block maxima of random scores closer than float32's error are rare: about one in 1e5.
  EXPECT_LE(different, 4);
}

TEST(Sm90Select, RepeatsAreBitwiseEqual) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = o.tokens_k = 2500;
  o.topk = 8;
  const SelectProblem problem(o, normal);
  const PlacedProblem placed(gpu_memory(), problem);
  const Selection first = run_on_gpu(problem);
  for (int i = 0; i < 20; ++i) {
    sm90_backend().select(placed.params());
    expect_same_bits({placed.indices(), placed.index_lse()}, first, "repeat " + std::to_string(i));
  }
}

// Rows [begin, begin + rows) of a selection.
Selection rows_of(const Selection& all, const Options& o, int64_t begin, int64_t rows) {
  Selection part;
  for (int64_t h = 0; h < o.index_heads; ++h) {
    const int64_t row = h * o.tokens_q + begin;
    part.indices.insert(part.indices.end(), all.indices.begin() + row * o.topk,
                        all.indices.begin() + (row + rows) * o.topk);
    part.index_lse.insert(part.index_lse.end(), all.index_lse.begin() + row, all.index_lse.begin() + row + rows);
  }
  return part;
}

TEST(Sm90Select, BatchAndSplitDoNotChangeBits) {
  SKIP_WITHOUT_GPU();
  Options whole;
  whole.tokens_q = whole.tokens_k = 1000;
  whole.topk = 4;
  const SelectProblem problem(whole, normal);
  const Selection expected = run_on_gpu(problem);

  // The last queries alone, on the same keys.
  for (const int64_t rows : {1, 5, 17, 100}) {
    Options last = whole;
    last.tokens_q = rows;
    SelectProblem part(last, normal);
    part.index_k = problem.index_k;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t bytes = whole.index_heads * whole.dim * 2;
      std::copy_n(problem.index_q.element(whole.tokens_q - rows + i, 0, 0), bytes, part.index_q.element(i, 0, 0));
    }
    expect_same_bits(run_on_gpu(part), rows_of(expected, whole, whole.tokens_q - rows, rows),
                     "the last " + std::to_string(rows) + " queries");
  }

  // Chunks that share the prefix, in one call.
  SelectProblem chunks = problem;
  chunks.cu_seqlens_q = int32_tensor(chunks.options.cu_seqlens_q = {0, 3, 400, 1000});
  chunks.cu_seqlens_k = int32_tensor(chunks.options.cu_seqlens_k = {0, 3, 400, 1000});
  chunks.k_starts = int32_tensor(chunks.options.k_starts = {0, 0, 0});
  expect_same_bits(run_on_gpu(chunks), expected, "chunks");

  // The same keys in shuffled pages.
  Options paged = paged_options({1000}, {1000}, 128);
  paged.topk = whole.topk;
  SelectProblem pages(paged, normal);
  pages.index_q = problem.index_q;
  for (int64_t j = 0; j < whole.tokens_k; ++j) {
    std::copy_n(problem.index_k.element(j, 0, 0), whole.dim * 2,
                pages.index_k.element(paged.block_table[static_cast<size_t>(j / 128)], j % 128, 0));
  }
  expect_same_bits(run_on_gpu(pages), expected, "pages");
}

TEST(Sm90Select, StridedViews) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = o.tokens_k = 400;
  o.index_key_heads = 2;
  o.topk = 3;
  const SelectProblem dense(o);
  const Selection expected = run_on_reference(dense);
  const auto restride = [](const HostTensor& from, const std::vector<int64_t>& strides) {
    const int64_t* shape = from.view.shape;
    HostTensor to = cases::make_host_tensor(OPENMSA_BFLOAT16, {shape[0], shape[1], shape[2]}, strides, 0xff);
    for (int64_t i = 0; i < shape[0]; ++i) {
      for (int64_t h = 0; h < shape[1]; ++h) std::copy_n(from.element(i, h), 2 * shape[2], to.element(i, h));
    }
    return to;
  };
  for (const bool reversed : {false, true}) {
    SelectProblem strided = dense;
    strided.index_q = restride(dense.index_q, {128 + 8, (reversed ? -1 : 1) * 401 * 136, 1});  // head-major, with gaps
    strided.index_k = restride(dense.index_k, {(reversed ? -1 : 1) * 1024, 256, 1});
    expect_equal(run_on_gpu(strided), expected, reversed ? "negative strides" : "gaps");
  }
}

TEST(Sm90Select, InvisibleMemoryHasNoInfluence) {
  SKIP_WITHOUT_GPU();
  // Keys: a gap, a document, a gap, a document, a gap; everything between is NaN.
  Options o;
  o.tokens_q = 200;
  o.tokens_k = 700;
  o.cu_seqlens_q = {0, 90, 200};
  o.cu_seqlens_k = {0, 190, 600};
  o.k_starts = {17, 250};
  o.topk = 3;
  SelectProblem problem(o);
  const Selection expected = run_on_reference(problem);
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 17}, {190, 250}, {600, 700}}) {
    for (int64_t j = begin; j < end; ++j) {
      for (int64_t d = 0; d < o.dim; ++d) set_element(problem.index_k, std::nanf(""), j, 0, d);
    }
  }
  expect_equal(run_on_gpu(problem), expected, "gaps of packed keys");

  Options paged = paged_options({300, 1, 129}, {20, 1, 2}, 128);
  paged.topk = 3;
  SelectProblem pages(paged);
  const Selection paged_expected = run_on_reference(pages);
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
  expect_equal(run_on_gpu(pages), paged_expected, "page tails");
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
    o.tokens_k = 500;
    o.dim = o.block_size = 64;
    o.index_heads = 2;
    o.topk = 3;
    const size_t batch = 1 + random() % 5;
    for (size_t b = 0; b <= batch; ++b) {
      o.cu_seqlens_q.push_back(hostile(random, 150));
      o.cu_seqlens_k.push_back(hostile(random, 500));
    }
    if (round % 2 == 1) {
      for (size_t b = 0; b < batch; ++b) o.k_starts.push_back(hostile(random, 500));
    }
    compare(SelectProblem(o), "contiguous, round " + std::to_string(round));
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
    o.topk = 3;
    o.local_blocks = round % 4;
    o.init_blocks = round % 3;
    o.pages = 9;
    o.max_pages = 7;
    const size_t batch = 1 + random() % 5;
    o.cu_seqlens_q.push_back(hostile(random, 60));
    for (size_t b = 0; b < batch; ++b) {
      o.cu_seqlens_q.push_back(hostile(random, 60));
      o.seq_lens.push_back(hostile(random, 7 * 64));
      for (int64_t page = 0; page < o.max_pages; ++page) o.block_table.push_back(hostile(random, 9));
    }
    compare(SelectProblem(o), "paged, round " + std::to_string(round));
  }
}

TEST(Sm90Select, ManyQueries) {
  SKIP_WITHOUT_GPU();
  // More rows than a grid's y or z axis holds, in one sequence; the reference checks the last ones.
  Options o;
  o.tokens_q = o.tokens_k = 70000;
  o.index_heads = 1;
  o.dim = 64;
  o.topk = 4;
  o.dtype = OPENMSA_FLOAT8_E4M3;
  const SelectProblem problem(o);
  const Selection gpu = run_on_gpu(problem);
  Options last = o;
  last.tokens_q = 3;
  SelectProblem part(last);
  part.index_k = problem.index_k;
  for (int64_t i = 0; i < last.tokens_q; ++i) {
    std::copy_n(problem.index_q.element(o.tokens_q - last.tokens_q + i), o.dim, part.index_q.element(i));
  }
  expect_equal(rows_of(gpu, o, o.tokens_q - last.tokens_q, last.tokens_q), run_on_reference(part), "the last queries");
}

TEST(Sm90Select, ManyRequests) {
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
  compare(SelectProblem(o), "70,000 requests of one query");
}

// A tensor whose elements lie further apart than 2^31; only the rows that are used are written.
TEST(Sm90Select, MoreThanTwoToTheThirtyOneElements) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = 40;
  o.tokens_k = 2200;
  o.topk = 3;
  o.dtype = OPENMSA_FLOAT8_E4M3;
  const SelectProblem problem(o);
  PlacedProblem placed(gpu_memory(), problem);
  const Selection expected = run_on_reference(problem);
  constexpr int64_t kStride = int64_t{1} << 20;
  const int64_t bytes = o.tokens_k * kStride;
  ASSERT_GT(bytes, int64_t{1} << 31);
  void* wide = gpu_memory().allocate(bytes);
  check_cuda(cudaMemcpy2D(wide, kStride, problem.index_k.element(), 128, 128, static_cast<size_t>(o.tokens_k),
                          cudaMemcpyHostToDevice),
             "cudaMemcpy2D");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the copy of pageable memory may still be under way
  SelectParams params = placed.params();
  params.index_k.data = wide;
  params.index_k.strides[0] = kStride;
  sm90_backend().check(params);
  sm90_backend().select(params);
  expect_equal({placed.indices(), placed.index_lse()}, expected, "token stride 2^20");

  // Backwards, and as pages of the same pool: page number x stride exceeds 2^31.
  Options paged = paged_options({2200}, {40}, 128);
  paged.dtype = o.dtype;
  paged.topk = o.topk;
  paged.pages = 2200 / 128 + 1;
  paged.block_table.clear();
  for (int32_t page = 0; page < 20; ++page) paged.block_table.push_back(std::min<int32_t>(page, 17));
  paged.max_pages = 20;
  SelectProblem page_problem(paged);
  page_problem.index_q = problem.index_q;
  const PlacedProblem page_placed(gpu_memory(), page_problem);
  SelectParams page_params = page_placed.params();
  page_params.index_k.data = wide;
  page_params.index_k.strides[0] = 128 * kStride;
  page_params.index_k.strides[1] = kStride;
  sm90_backend().select(page_params);
  expect_equal({page_placed.indices(), page_placed.index_lse()}, expected, "page stride 2^27");
  gpu_memory().release(wide);
}

TEST(Sm90Select, TwoStreams) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = o.tokens_k = 3000;
  o.topk = 4;
  const SelectProblem a(o, normal, 1), b(o, normal, 2);
  const Selection expected_a = run_on_gpu(a), expected_b = run_on_gpu(b);
  const PlacedProblem placed_a(gpu_memory(), a), placed_b(gpu_memory(), b);
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) {
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  for (int round = 0; round < 5; ++round) {
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
  compare(SelectProblem(o), "with the last device current");
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  EXPECT_EQ(device, count - 1);
  check_cuda(cudaSetDevice(0), "cudaSetDevice");
}

}  // namespace
}  // namespace openmsa::testing
