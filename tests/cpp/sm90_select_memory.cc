// The sm90 selection where offsets pass 2^31: elements of index_q, of index_k, of pages and of indices.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cpp/sm90_problem.h"
#include "cuda/common/error.h"

namespace openmsa::testing {
namespace {

using cases::gpu_memory;
using cuda::check_cuda;

constexpr int64_t kTwoTo31 = int64_t{1} << 31;

// Memory of the GPU that goes when it does.
struct Memory {
  explicit Memory(int64_t bytes) : data(static_cast<unsigned char*>(gpu_memory().allocate(bytes))) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { gpu_memory().release(data); }

  unsigned char* data;
};

void wait() { check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

// Copies of a host image, one after the other.
void fill_with_copies(unsigned char* to, const unsigned char* image, int64_t bytes, int64_t copies) {
  gpu_memory().upload(to, image, bytes);
  for (int64_t done = 1; done < copies; done *= 2) {
    const int64_t next = std::min(done, copies - done);
    check_cuda(cudaMemcpy(to + done * bytes, to, static_cast<size_t>(next * bytes), cudaMemcpyDeviceToDevice),
               "cudaMemcpy");
  }
  wait();
}

// Tokens, and then pages, lie 2^20 elements and more apart; only the rows that are used are written.
TEST(Sm90SelectLarge, StridesBeyondInt32) {
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
  const int64_t pages = o.tokens_k / 128 + 1;
  const int64_t bytes = pages * 128 * kStride;  // whole pages: a pool's rows all exist, whoever sees them
  ASSERT_GT(bytes, kTwoTo31);
  const Memory wide(bytes);
  check_cuda(cudaMemcpy2D(wide.data, kStride, problem.index_k.element(), 128, 128, static_cast<size_t>(o.tokens_k),
                          cudaMemcpyHostToDevice),
             "cudaMemcpy2D");
  wait();  // the copy of pageable memory may still be under way
  SelectParams params = placed.params();
  params.index_k.data = wide.data;
  params.index_k.strides[0] = kStride;
  sm90_backend().check(params);
  sm90_backend().select(params);
  expect_equal({placed.indices(), placed.index_lse()}, expected, "token stride 2^20");

  // As pages of the same pool: page number x stride exceeds 2^31.
  Options paged = paged_options({2200}, {40}, 128);
  paged.dtype = o.dtype;
  paged.topk = o.topk;
  paged.pages = pages;
  paged.block_table.clear();
  for (int32_t page = 0; page < 20; ++page) paged.block_table.push_back(std::min<int32_t>(page, 17));
  paged.max_pages = 20;
  SelectProblem page_problem(paged);
  page_problem.index_q = problem.index_q;
  const PlacedProblem page_placed(gpu_memory(), page_problem);
  SelectParams page_params = page_placed.params();
  page_params.index_k.data = wide.data;
  page_params.index_k.strides[0] = 128 * kStride;
  page_params.index_k.strides[1] = kStride;
  sm90_backend().select(page_params);
  expect_equal({page_placed.indices(), page_placed.index_lse()}, expected, "page stride 2^27");
}

TEST(Sm90SelectLarge, QueriesBeyondInt32) {
  SKIP_WITHOUT_GPU();
  constexpr int64_t kDocuments = 1200;
  Options o;
  o.tokens_q = o.tokens_k = 1000;
  o.index_heads = 16;
  o.topk = 4;
  const SelectProblem document(o);
  const Selection expected = run_on_reference(document);
  const int64_t q_row = o.index_heads * o.dim * 2, k_row = o.dim * 2, tokens = kDocuments * o.tokens_q;
  ASSERT_GT(tokens * o.index_heads * o.dim, kTwoTo31);
  const Memory index_q(tokens * q_row), index_k(tokens * k_row), indices(o.index_heads * tokens * o.topk * 4),
      index_lse(o.index_heads * tokens * 4);
  fill_with_copies(index_q.data, document.index_q.element(), o.tokens_q * q_row, kDocuments);
  fill_with_copies(index_k.data, document.index_k.element(), o.tokens_k * k_row, kDocuments);
  std::vector<int32_t> ends;
  for (int64_t b = 0; b <= kDocuments; ++b) ends.push_back(static_cast<int32_t>(b * o.tokens_q));
  const PlacedTensor cu_seqlens(gpu_memory(), int32_tensor(ends));

  const PlacedProblem placed(gpu_memory(), document);
  SelectParams params = placed.params();
  params.layout.batch = kDocuments;
  params.layout.tokens_q = params.layout.tokens_k = tokens;
  params.layout.cu_seqlens_q = params.layout.cu_seqlens_k = static_cast<const int32_t*>(cu_seqlens.tensor()->data);
  params.index_q.data = index_q.data;
  params.index_k.data = index_k.data;
  params.index_q.shape[0] = params.index_k.shape[0] = tokens;
  params.indices.data = indices.data;
  params.indices.shape[1] = tokens;
  params.indices.strides[0] = tokens * o.topk;
  Tensor lse = *params.index_lse;
  lse.data = index_lse.data;
  lse.shape[1] = tokens;
  lse.strides[0] = tokens;
  params.index_lse = &lse;
  sm90_backend().check(params);
  sm90_backend().select(params);

  std::vector<int32_t> blocks(static_cast<size_t>(o.index_heads * tokens * o.topk));
  gpu_memory().download(blocks.data(), indices.data, static_cast<int64_t>(blocks.size() * sizeof(int32_t)));
  std::vector<float> sums(static_cast<size_t>(o.index_heads * tokens));
  gpu_memory().download(sums.data(), index_lse.data, static_cast<int64_t>(sums.size() * sizeof(float)));
  for (int64_t b = 0; b < kDocuments; ++b) {
    Selection got;
    for (int64_t h = 0; h < o.index_heads; ++h) {
      const int64_t row = h * tokens + b * o.tokens_q;
      got.indices.insert(got.indices.end(), blocks.begin() + row * o.topk,
                         blocks.begin() + (row + o.tokens_q) * o.topk);
      got.index_lse.insert(got.index_lse.end(), sums.begin() + row, sums.begin() + row + o.tokens_q);
    }
    expect_equal(got, expected, "document " + std::to_string(b));
    if (::testing::Test::HasFailure()) break;
  }
}

// One query on 35 million keys: copies of 1000 blocks, among which one is the best of each head.
TEST(Sm90SelectLarge, KeysBeyondInt32) {
  SKIP_WITHOUT_GPU();
  constexpr int64_t kCopies = 547, kBlocks = 1000;
  Options o;
  o.dtype = OPENMSA_FLOAT8_E4M3;
  o.tokens_q = 1;
  o.dim = o.block_size = 64;
  o.tokens_k = kBlocks * o.block_size;
  o.index_heads = 2;
  o.local_blocks = 0;
  SelectProblem problem(o);
  const int64_t best[] = {123, 777};
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t d = 0; d < o.dim; ++d) {
      const float sign = d % 3 == 0 ? 1.0F : -1.0F;
      set_element(problem.index_q, h == 0 ? sign : -sign, 0, h, d);
      set_element(problem.index_k, h == 0 ? 4 * sign : -4 * sign, best[h] * o.block_size + 7, 0, d);
    }
  }
  const int64_t bytes = o.tokens_k * o.dim;
  ASSERT_GT(kCopies * bytes, kTwoTo31);
  const Memory keys(kCopies * bytes);
  fill_with_copies(keys.data, problem.index_k.element(), bytes, kCopies);
  const PlacedProblem placed(gpu_memory(), problem);
  SelectParams params = placed.params();
  params.layout.tokens_k = kCopies * o.tokens_k;
  params.index_k.data = keys.data;
  params.index_k.shape[0] = params.layout.tokens_k;
  sm90_backend().check(params);
  sm90_backend().select(params);
  std::vector<int64_t> expected;
  for (const int64_t block : best) {
    for (int64_t copy = 0; copy < o.topk; ++copy) expected.push_back(block + copy * kBlocks);
  }
  EXPECT_EQ(placed.indices(), expected);
}

// Heads of the output lie more than 2^31 elements apart.
TEST(Sm90SelectLarge, IndicesBeyondInt32) {
  SKIP_WITHOUT_GPU();
  for (const int64_t queries : {300, 7}) {
    Options o;
    o.tokens_q = queries;
    o.tokens_k = 5000;
    o.index_heads = 2;
    o.topk = 5;
    o.with_lse = false;
    const SelectProblem problem(o);
    const Memory wide((kTwoTo31 + 64 + queries * o.topk) * 4);
    const PlacedProblem placed(gpu_memory(), problem);
    SelectParams params = placed.params();
    params.indices.data = wide.data;
    params.indices.strides[0] = kTwoTo31 + 64;
    sm90_backend().check(params);
    sm90_backend().select(params);
    Selection got;
    for (int64_t h = 0; h < 2; ++h) {
      std::vector<int32_t> blocks(static_cast<size_t>(queries * o.topk));
      gpu_memory().download(blocks.data(), wide.data + h * params.indices.strides[0] * 4,
                            static_cast<int64_t>(blocks.size() * sizeof(int32_t)));
      got.indices.insert(got.indices.end(), blocks.begin(), blocks.end());
    }
    expect_equal(got, run_on_reference(problem), describe(o));
  }
}

}  // namespace
}  // namespace openmsa::testing
