// sm90 attention beside the reference, where the case table does not reach: types, shapes, groups, selections, lengths,
// views, special values.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "cpp/sm90_attend_problem.h"

namespace openmsa::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

AttendOptions packed_options() {
  AttendOptions o;
  o.tokens_q = 300;
  o.tokens_k = 1500;
  o.cu_seqlens_q = {0, 130, 130, 300};
  o.cu_seqlens_k = {0, 131, 200, 1500};
  return o;
}

TEST(Sm90Attend, EveryTypeShapeAndLayout) {
  SKIP_WITHOUT_GPU();
  for (const DataType dtype : {OPENMSA_BFLOAT16, OPENMSA_FLOAT16}) {
    for (const int64_t dim : {64, 128}) {
      for (const int64_t block : {64, 128}) {
        AttendOptions contiguous = packed_options();
        contiguous.dtype = dtype;
        contiguous.dim = dim;
        contiguous.block_size = block;
        AttendOptions paged = in_pages(contiguous, {1, 127, 900, 0, 2049}, {1, 16, 1, 3, 70});
        paged.tokens_q += 5;  // padding

        for (const AttendOptions& o : {contiguous, paged}) {
          expect_gpu_attends_as_reference(AttendProblem(o), describe(o));
        }
      }
    }
  }
}

TEST(Sm90Attend, HeadGroups) {
  SKIP_WITHOUT_GPU();
  constexpr struct {
    int64_t kv_heads, index_heads;
  } kHeads[] = {{1, 1}, {1, 2}, {2, 4}, {3, 3}, {1, 16}, {4, 16}, {16, 16}};
  for (const int64_t group : {1, 2, 4, 8, 16}) {
    for (const auto& [kv_heads, index_heads] : kHeads) {
      AttendOptions o;
      o.tokens_q = 200;
      o.tokens_k = 64 * 9 + 11;
      o.dim = o.block_size = 64;
      o.group = group;
      o.kv_heads = kv_heads;
      o.index_heads = index_heads;
      expect_gpu_attends_as_reference(AttendProblem(o), describe(o));
    }
  }
}

// Few and many blocks of a tile: lists of one half of its tokens alone, longer than the ring between the two halves.
TEST(Sm90Attend, ListLengths) {
  SKIP_WITHOUT_GPU();
  for (const int64_t group : {1, 4, 16}) {
    for (const int64_t topk : {1, 2, 7, 16, 33, 64}) {
      AttendOptions o;
      o.tokens_q = 150;
      o.tokens_k = 64 * 80 + 3;
      o.dim = o.block_size = 64;
      o.group = group;
      o.index_heads = 1;
      o.topk = topk;
      expect_gpu_attends_as_reference(AttendProblem(o), describe(o));
    }
  }
}

// Only some tokens of a tile have blocks, and never the same.
TEST(Sm90Attend, HalvesOfATileThatShareNothing) {
  SKIP_WITHOUT_GPU();
  for (const int64_t lonely : {0, 1, 2, 3}) {
    AttendOptions o;
    o.tokens_q = 64;
    o.tokens_k = 64 * 70;
    o.dim = o.block_size = 64;
    o.index_heads = 1;
    o.topk = 16;
    int64_t row = 0;
    const Blocks blocks = [&](std::mt19937_64& random, int64_t count, int64_t topk) {
      const int64_t in_tile = row++ % 8;
      const bool has = lonely == 0 ? in_tile == 7 : lonely == 1 ? in_tile == 0 : lonely == 2 || in_tile < 4;
      std::vector<int64_t> chosen = has ? distinct_blocks(random, count - 1, topk) : std::vector<int64_t>();
      for (int64_t& block : chosen) block = block / 2 * 2 + in_tile / 4;  // even blocks, or odd ones
      return chosen;
    };
    expect_gpu_attends_as_reference(AttendProblem(o, blocks), "case " + std::to_string(lonely));
  }
}

TEST(Sm90Attend, HostileIndices) {
  SKIP_WITHOUT_GPU();
  for (const DataType type : {OPENMSA_INT32, OPENMSA_INT64}) {
    for (const int64_t group : {1, 2, 8, 16}) {
      for (const int64_t topk : {5, 20}) {
        AttendOptions contiguous = packed_options();
        contiguous.indices_dtype = type;
        contiguous.dim = 64;
        contiguous.group = group;
        contiguous.topk = topk;
        AttendOptions paged = in_pages(contiguous, {1, 127, 900, 0, 2049}, {1, 16, 1, 3, 70});
        for (const AttendOptions& o : {contiguous, paged}) {
          expect_gpu_attends_as_reference(AttendProblem(o, hostile_blocks), describe(o));
        }
      }
    }
  }
}

TEST(Sm90Attend, AllEntriesInvalid) {
  SKIP_WITHOUT_GPU();
  AttendOptions o;
  const AttendProblem problem(o, [](std::mt19937_64&, int64_t, int64_t) { return std::vector<int64_t>(); });
  const Attention got = attend_on_gpu(problem);
  EXPECT_TRUE(std::all_of(got.out.begin(), got.out.end(), [](double x) { return x == 0; }));
  EXPECT_TRUE(std::all_of(got.lse.begin(), got.lse.end(), [](double x) { return x == -kInf; }));
}

TEST(Sm90Attend, Lengths) {
  SKIP_WITHOUT_GPU();
  for (const int64_t keys : {0, 1, 63, 127, 128, 129, 1000}) {
    for (const int64_t queries : {0, 1, 7, 8, 9, 200}) {
      AttendOptions o;
      o.tokens_q = queries;
      o.tokens_k = keys;  // fewer keys than queries: the first see nothing
      o.index_heads = 1;
      expect_gpu_attends_as_reference(AttendProblem(o), describe(o));
    }
  }
}

TEST(Sm90Attend, EmptyBatches) {
  SKIP_WITHOUT_GPU();
  AttendOptions contiguous;
  contiguous.tokens_q = contiguous.tokens_k = 0;
  contiguous.cu_seqlens_q = contiguous.cu_seqlens_k = {0};
  expect_gpu_attends_as_reference(AttendProblem(contiguous), "B = 0");
  AttendOptions paged;
  paged.pages = 2;
  paged.max_pages = 1;
  paged.cu_seqlens_q = {0};
  paged.tokens_q = 9;  // padding alone
  expect_gpu_attends_as_reference(AttendProblem(paged), "B = 0, paged, padded");
  paged.seq_lens = {0, 0};
  paged.block_table = {0, 1};
  paged.cu_seqlens_q = {0, 4, 9};
  expect_gpu_attends_as_reference(AttendProblem(paged), "requests of length 0");
}

// Many sequences in one tile, whose blocks begin anywhere, shared prefixes among them.
TEST(Sm90Attend, ShortSequences) {
  SKIP_WITHOUT_GPU();
  for (const int64_t group : {2, 16}) {
    AttendOptions o;
    o.dim = o.block_size = 64;
    o.group = group;
    o.topk = 3;
    o.cu_seqlens_q = o.cu_seqlens_k = {0};
    for (int32_t b = 0; b < 60; ++b) {
      o.cu_seqlens_q.push_back(o.cu_seqlens_q.back() + b % 4);
      o.cu_seqlens_k.push_back(o.cu_seqlens_k.back() + b * 37 % 150);
    }
    o.tokens_q = o.cu_seqlens_q.back();
    o.tokens_k = o.cu_seqlens_k.back();
    expect_gpu_attends_as_reference(AttendProblem(o, hostile_blocks), describe(o));
    for (int32_t b = 0; b < 60; ++b) o.k_starts.push_back(o.cu_seqlens_k[static_cast<size_t>(b) / 8 * 8]);
    expect_gpu_attends_as_reference(AttendProblem(o, hostile_blocks), describe(o) + ", shared prefixes");
  }
}

// Requests of one query, some on the same pages at the same and at other places; one names a page twice.
TEST(Sm90Attend, SharedPages) {
  SKIP_WITHOUT_GPU();
  AttendOptions o;
  o.block_size = o.dim = 64;
  o.topk = 5;
  o.pages = 9;
  o.max_pages = 6;
  o.cu_seqlens_q = {0, 1, 3, 4, 7, 8};
  o.tokens_q = 8;
  o.seq_lens = {320, 321, 200, 384, 65};
  o.block_table = {0, 1, 2, 3, 4, 8, 0, 1, 2, 3, 5, 8, 3, 2, 1, 0, 6, 7, 4, 4, 2, 4, 2, 0, 1, 1, 1, 1, 1, 1};
  expect_gpu_attends_as_reference(AttendProblem(o, hostile_blocks), describe(o));
}

// The same elements at other strides, between them NaN.
HostTensor restride(const HostTensor& from, const std::vector<int64_t>& strides) {
  const int64_t* const shape = from.view.shape;
  const int32_t rank = from.view.rank;
  HostTensor to = cases::make_host_tensor(static_cast<DataType>(from.view.dtype), {shape, shape + rank}, strides, 0xff);
  const int64_t bytes = shape[rank - 1] * (from.view.dtype == OPENMSA_INT32 ? 4 : 2);
  for (int64_t a = 0; a < shape[0]; ++a) {
    for (int64_t b = 0; b < shape[1]; ++b) {
      if (rank == 3 && strides[2] != 1) {
        for (int64_t c = 0; c < shape[2]; ++c) std::copy_n(from.element(a, b, c), 4, to.element(a, b, c));
        continue;
      }
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

TEST(Sm90Attend, StridedViews) {
  SKIP_WITHOUT_GPU();
  AttendOptions o;
  o.tokens_q = 130;
  o.tokens_k = 1000;
  o.kv_heads = 2;
  o.index_heads = 4;
  o.group = 4;
  const AttendProblem dense(o, hostile_blocks);
  const Attention expected = attend_on_gpu(dense);
  expect_close(expected, attend_on_reference(dense), o, "dense");
  const struct {
    const char* name;
    std::vector<int64_t> q, kv, indices, out, lse;
  } views[] = {
      {"head-major with gaps", {136, 131 * 136, 1}, {136, 1001 * 136, 1}, {4, 16, 1}, {136, 131 * 136, 1}, {1, 16}},
      {"slices of one row", {24 * 128, 128, 1}, {24 * 128, 128, 1}, {8, 40, 2}, {24 * 128, 128, 1}, {140, 1}},
      {"K beside V", {16 * 128, 128, 1}, {4 * 128, 256, 1}, {1, 16, 4}, {-16 * 128, -128, 1}, {-130, -1}},
  };
  for (const auto& view : views) {
    AttendProblem strided = dense;
    strided.q = shift(restride(dense.q, view.q));
    strided.k = shift(restride(dense.k, view.kv));
    strided.v = shift(restride(dense.v, view.kv));
    strided.indices = restride(dense.indices, view.indices);
    strided.out_strides = view.out;
    strided.lse_strides = view.lse;
    expect_same_bits(attend_on_gpu(strided), expected, view.name);
  }
}

TEST(Sm90Attend, BroadcastViews) {
  SKIP_WITHOUT_GPU();
  AttendOptions o;
  o.tokens_q = o.tokens_k = 300;
  o.kv_heads = o.index_heads = 2;
  const AttendProblem dense(o);
  AttendProblem heads = dense, tokens = dense;
  heads.q = restride(dense.q, {128, 0, 1});
  heads.k = restride(dense.k, {128, 0, 1});
  tokens.k = restride(dense.k, {0, 128, 1});
  tokens.v = restride(dense.v, {0, 128, 1});
  expect_gpu_attends_as_reference(heads, "heads share their rows");
  expect_gpu_attends_as_reference(tokens, "tokens share their rows");
}

TEST(Sm90Attend, CacheViews) {
  SKIP_WITHOUT_GPU();
  for (const int64_t block : {64, 128}) {
    AttendOptions o;
    o.kv_heads = 2;
    o.block_size = block;
    o = in_pages(o, {700, 300, 2500}, {30, 1, 4});
    const AttendProblem dense(o);
    const Attention expected = attend_on_gpu(dense);
    const int64_t page = block * 2 * 128;
    const struct {
      const char* name;
      std::vector<int64_t> strides;
    } views[] = {
        {"half of a row with the other half's cache", {2 * page, 4 * 128, 2 * 128, 1}},
        {"head-major", {page, 128, block * 128, 1}},
        {"pages with gaps", {3 * page + 64, 2 * 128, 128, 1}},
        {"pages innermost", {128, o.pages * 2 * 128, o.pages * 128, 1}},
    };
    for (const auto& view : views) {
      AttendProblem strided = dense;
      strided.k = shift(restride(dense.k, view.strides));
      strided.v = shift(restride(dense.v, view.strides));
      expect_same_bits(attend_on_gpu(strided), expected, std::string(view.name) + ", block " + std::to_string(block));
    }
  }
}

// What a row selects decides what it sees: NaN and infinities of other rows' blocks, and scores that overflow for
// others, change nothing.
TEST(Sm90Attend, SpecialValues) {
  SKIP_WITHOUT_GPU();
  for (const DataType dtype : {OPENMSA_BFLOAT16, OPENMSA_FLOAT16}) {
    AttendOptions o;
    o.dtype = dtype;
    o.tokens_q = 64;
    o.tokens_k = 64 * 12;
    o.block_size = o.dim = 64;
    o.group = 8;
    o.index_heads = 1;
    o.topk = 2;
    int64_t row = 0;
    // Every fourth row selects the first block, with special keys, every fourth the second.
    AttendProblem problem(o, [&](std::mt19937_64&, int64_t blocks, int64_t) {
      const int64_t kind = row++ % 4;
      return std::vector<int64_t>{kind < 2 ? kind : 3 + row % 5, blocks - 1};
    });
    set_element(problem.k, kNan, 3, 0, 0);
    for (int64_t d = 0; d < o.dim; ++d) {
      set_element(problem.k, -kInf, 9, 0, d);
      set_element(problem.k, d % 2 == 0 ? kInf : 0.0F, 64 + 5, 0, d);
    }
    expect_gpu_attends_as_reference(problem, describe(o));
  }
}

// Weights count from a maximum: scores of thousands, a scale that makes them so, and blocks of -inf alone.
TEST(Sm90Attend, HugeScores) {
  SKIP_WITHOUT_GPU();
  for (const double scale : {1e-6, 1.0, 64.0, 4e4}) {
    AttendOptions o;
    o.tokens_q = 100;
    o.tokens_k = 700;
    o.index_heads = 1;
    o.topk = 3;
    o.scale = scale;
    expect_gpu_attends_as_reference(AttendProblem(o, distinct_blocks, small_integer), std::to_string(scale));
  }
  AttendOptions o;
  o.tokens_q = 40;
  o.tokens_k = 600;
  o.index_heads = 1;
  o.topk = 3;
  AttendProblem hidden(o, distinct_blocks, [](std::mt19937_64& random) { return 1.0F + small_integer(random) / 8; });
  for (int64_t j = 0; j < 256; ++j) set_element(hidden.k, -kInf, j, 0, 7);
  expect_gpu_attends_as_reference(hidden, "blocks of -inf alone");
}

// Every hidden block between first and last key holds NaN; the queries of a chunk attend to a long prefix.
TEST(Sm90Attend, ChunkOnAPrefix) {
  SKIP_WITHOUT_GPU();
  AttendOptions o;
  o.tokens_q = 70;
  o.tokens_k = 5000;
  o.topk = 16;
  expect_gpu_attends_as_reference(AttendProblem(o), describe(o));
  o = in_pages(o, {5000, 4100}, {70, 33});
  expect_gpu_attends_as_reference(AttendProblem(o), describe(o));
}

}  // namespace
}  // namespace openmsa::testing
