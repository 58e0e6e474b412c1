// The sm90 selection beside the reference, where the case table does not reach: types, shapes, selections, lengths,
// views. Small integers make every score exact, so that selections must be equal, ties included.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "cpp/sm90_problem.h"

namespace openmsa::testing {
namespace {

constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();

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
          expect_gpu_equals_reference(SelectProblem(o), describe(o));
        }
      }
    }
  }
}

void expect_every_selection(Options o) {
  for (const int64_t topk : {1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 63, 64}) {
    for (const int64_t init : {int64_t{0}, int64_t{1}, int64_t{3}, int64_t{40}, kInt64Max}) {
      for (const int64_t local : {int64_t{0}, int64_t{1}, int64_t{3}, int64_t{40}, kInt64Max}) {
        o.topk = topk;
        o.init_blocks = init;
        o.local_blocks = local;
        expect_gpu_equals_reference(SelectProblem(o), describe(o));
      }
    }
  }
}

// Few rows on many blocks: tiles whose blocks are worth sharing out.
TEST(Sm90SelectLarge, EverySelectionOfOneTile) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = 70;
  o.tokens_k = 64 * 50 + 17;
  o.block_size = 64;
  o.dim = 64;
  o.index_heads = 2;
  expect_every_selection(o);
}

// More tiles than multiprocessors, each too short to be shared out: 300 sequences on the same keys.
TEST(Sm90SelectLarge, EverySelectionOfManyTiles) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = 300;
  o.tokens_k = 64 * 40 + 17;
  o.block_size = 64;
  o.dim = 64;
  o.index_heads = 1;
  o.cu_seqlens_q = o.cu_seqlens_k = {0};
  for (int32_t b = 1; b <= 300; ++b) {
    o.cu_seqlens_q.push_back(b);
    o.cu_seqlens_k.push_back(static_cast<int32_t>(o.tokens_k) - (300 - b) % 7 * 100);
  }
  std::sort(o.cu_seqlens_k.begin(), o.cu_seqlens_k.end());
  o.k_starts.assign(300, 0);
  expect_every_selection(o);
}

TEST(Sm90Select, HeadGroups) {
  SKIP_WITHOUT_GPU();
  constexpr std::pair<int64_t, int64_t> kHeads[] = {
      {1, 1}, {2, 1}, {2, 2}, {3, 1}, {3, 3},  {4, 1},  {4, 2},  {4, 4},  {5, 1},  {5, 5},  {6, 3},  {7, 1},
      {8, 1}, {8, 2}, {8, 4}, {9, 3}, {11, 1}, {12, 4}, {13, 1}, {15, 5}, {16, 1}, {16, 2}, {16, 4}, {16, 16}};
  for (const auto& [heads, key_heads] : kHeads) {
    for (const int64_t topk : {3, 20}) {
      Options o;
      o.tokens_q = 500;
      o.tokens_k = 64 * 30;
      o.dim = o.block_size = 64;
      o.index_heads = heads;
      o.index_key_heads = key_heads;
      o.topk = topk;
      expect_gpu_equals_reference(SelectProblem(o), describe(o));
    }
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
      expect_gpu_equals_reference(SelectProblem(o), describe(o));
    }
  }
}

TEST(Sm90Select, EmptyBatches) {
  SKIP_WITHOUT_GPU();
  Options contiguous;
  contiguous.tokens_q = contiguous.tokens_k = 0;
  contiguous.cu_seqlens_q = contiguous.cu_seqlens_k = {0};
  expect_gpu_equals_reference(SelectProblem(contiguous), "B = 0");
  Options paged;
  paged.pages = 2;
  paged.max_pages = 1;
  paged.cu_seqlens_q = {0};
  paged.tokens_q = 9;  // padding alone
  expect_gpu_equals_reference(SelectProblem(paged), "B = 0, paged, padded");
  paged.seq_lens = {0, 0};
  paged.block_table = {0, 1};
  paged.cu_seqlens_q = {0, 4, 9};
  expect_gpu_equals_reference(SelectProblem(paged), "requests of length 0");
}

// The same elements at other strides, between them NaN.
HostTensor restride(const HostTensor& from, const std::vector<int64_t>& strides) {
  const int64_t* const shape = from.view.shape;
  const int32_t rank = from.view.rank;
  HostTensor to = cases::make_host_tensor(OPENMSA_BFLOAT16, {shape, shape + rank}, strides, 0xff);
  const int64_t bytes = shape[rank - 1] * 2;
  for (int64_t a = 0; a < shape[0]; ++a) {
    for (int64_t b = 0; b < shape[1]; ++b) {
      for (int64_t c = 0; c < (rank > 3 ? shape[2] : 1); ++c)
        std::copy_n(from.element(a, b, c), bytes, to.element(a, b, c));
    }
  }
  return to;
}

// A base that is aligned to 16 bytes and no more.
HostTensor shift(HostTensor tensor) {
  tensor.storage.insert(tensor.storage.begin(), 16, static_cast<unsigned char>(0xff));
  tensor.offset += 16;
  return tensor;
}

TEST(Sm90Select, StridedViews) {
  SKIP_WITHOUT_GPU();
  for (const int64_t queries : {400, 7}) {
    Options o;
    o.tokens_q = queries;
    o.tokens_k = 2000;
    o.index_key_heads = 2;
    o.topk = 3;
    const SelectProblem dense(o);
    const Selection expected = run_on_reference(dense);
    const struct {
      const char* name;
      std::vector<int64_t> q, k;
    } views[] = {
        {"head-major with gaps", {128 + 8, 401 * 136, 1}, {1024, 256, 1}},
        {"negative heads of q and tokens of k", {128 + 8, -401 * 136, 1}, {-1024, 256, 1}},
        {"everything backwards", {-4 * 128, -128, 1}, {-2 * 128, -128, 1}},
        {"slices of one row with q and k", {6 * 128, 128, 1}, {6 * 128, 128, 1}},
        {"head-major keys", {4 * 128, 128, 1}, {128, 2000 * 128, 1}},
    };
    for (const auto& view : views) {
      SelectProblem strided = dense;
      strided.index_q = shift(restride(dense.index_q, view.q));
      strided.index_k = shift(restride(dense.index_k, view.k));
      expect_equal(run_on_gpu(strided), expected, view.name);
    }
  }
}

TEST(Sm90Select, BroadcastViews) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = o.tokens_k = 500;
  o.index_key_heads = 2;
  o.topk = 3;
  const SelectProblem dense(o);
  SelectProblem heads = dense, tokens = dense;
  heads.index_q = restride(dense.index_q, {128, 0, 1});
  heads.index_k = restride(dense.index_k, {128, 0, 1});
  tokens.index_q = restride(dense.index_q, {0, 128, 1});
  tokens.index_k = restride(dense.index_k, {0, 128, 1});
  expect_gpu_equals_reference(heads, "heads share their rows");
  expect_gpu_equals_reference(tokens, "tokens share their rows");
}

TEST(Sm90Select, CacheViews) {
  SKIP_WITHOUT_GPU();
  for (const int64_t block : {64, 128}) {
    Options o = paged_options({700, 300, 2500}, {30, 1, 4}, block);
    o.index_key_heads = 2;
    o.topk = 3;
    const SelectProblem dense(o);
    const Selection expected = run_on_reference(dense);
    const int64_t page = block * 2 * 128;
    const struct {
      const char* name;
      std::vector<int64_t> strides;
    } views[] = {
        {"half of a row with the other half's cache", {2 * page, 4 * 128, 2 * 128, 1}},
        {"head-major", {page, 128, block * 128, 1}},
        {"pages with gaps", {3 * page + 64, 2 * 128, 128, 1}},
        {"pages backwards", {-page, 2 * 128, 128, 1}},
        {"rows and heads backwards", {page, -2 * 128, -128, 1}},
        {"pages innermost", {128, o.pages * 2 * 128, o.pages * 128, 1}},
    };
    for (const auto& view : views) {
      SelectProblem strided = dense;
      strided.index_k = shift(restride(dense.index_k, view.strides));
      expect_equal(run_on_gpu(strided), expected, std::string(view.name) + ", block " + std::to_string(block));
    }
  }
}

TEST(Sm90Select, OutputViews) {
  SKIP_WITHOUT_GPU();
  for (const int64_t queries : {300, 9}) {
    Options o;
    o.tokens_q = queries;
    o.tokens_k = 3000;
    o.topk = 5;
    const Selection expected = run_on_reference(SelectProblem(o));
    const int64_t rows = 4 * queries;
    const std::vector<int64_t> layouts[] = {
        {5, 4 * 5, 1}, {queries, 1, rows}, {queries * 5, 5, -1}, {-queries * 8, 8, 1}, {2, 5 * 20, 20}};
    for (const DataType dtype : {OPENMSA_INT32, OPENMSA_INT64}) {
      for (const std::vector<int64_t>& strides : layouts) {
        o.indices_dtype = dtype;
        o.indices_strides = strides;
        o.lse_strides = strides[0] < strides[1] ? std::vector<int64_t>{1, 4} : std::vector<int64_t>{-queries - 3, 1};
        expect_equal(run_on_gpu(SelectProblem(o)), expected, "indices at " + ::testing::PrintToString(strides));
      }
    }
  }
}

}  // namespace
}  // namespace openmsa::testing
