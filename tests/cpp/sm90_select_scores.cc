// The sm90 selection's scores: special values, ties, memory that nobody sees, and the same bits for a row whatever the
// batch, split, tile or layout.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpp/sm90_problem.h"

namespace openmsa::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Elements of rows [begin, end) of a tensor's head, all dimensions of them.
void set_rows(HostTensor& tensor, int64_t begin, int64_t end, int64_t head, float value) {
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t d = 0; d < tensor.view.shape[2]; ++d) set_element(tensor, value, i, head, d);
  }
}

TEST(Sm90Select, SpecialScores) {
  SKIP_WITHOUT_GPU();
  for (const DataType dtype : {OPENMSA_BFLOAT16, OPENMSA_FLOAT16, OPENMSA_FLOAT8_E4M3}) {
    for (const auto& [keys, topk] : {std::pair{900, 6}, {900, 20}, {3000, 16}, {3000, 60}}) {
      for (const int64_t local : {0, 1}) {
        Options o;
        o.dtype = dtype;
        o.tokens_q = 40;
        o.tokens_k = keys;
        o.dim = o.block_size = 64;
        o.index_heads = 2;
        o.topk = topk;
        o.local_blocks = local;
        SelectProblem problem(o, [](std::mt19937_64& random) { return random() % 3 == 0 ? -1.0F : 0.0F; });
        for (int64_t i = 0; i < o.tokens_q; ++i) {  // one head sees +0, -0 and NaN apart
          for (int64_t d = 0; d < o.dim; ++d) set_element(problem.index_q, d == 0 ? 1.0F : 0.0F, i, 0, d);
        }
        set_rows(problem.index_k, 0, 64, 0, kNan);     // a block of NaN alone
        set_rows(problem.index_k, 64, 70, 0, kNan);    // NaN among others
        set_rows(problem.index_k, 192, 256, 0, 0.0F);  // +0 and -0 blocks are equal
        set_rows(problem.index_k, 256, 320, 0, -0.0F);
        set_rows(problem.index_k, keys - 90, keys - 88, 0, kNan);  // in the blocks where rows differ in what they see
        if (dtype != OPENMSA_FLOAT8_E4M3) {
          for (int64_t j = 320; j < 384; ++j) set_element(problem.index_k, -kInf, j, 0, 0);
          set_element(problem.index_k, kInf, 400, 0, 0);
          set_element(problem.index_k, -kInf, 500, 0, 0);
        }
        expect_gpu_equals_reference(problem, describe(o));
      }
    }
  }
}

// Rows share a tile with rows whose every score is NaN or infinite.
TEST(Sm90Select, SpecialQueries) {
  SKIP_WITHOUT_GPU();
  for (const int64_t keys : {600, 5000}) {
    Options o;
    o.tokens_q = 100;
    o.tokens_k = keys;
    o.topk = 4;
    SelectProblem problem(o, [](std::mt19937_64& random) { return static_cast<float>(random() % 3 + 1); });
    set_rows(problem.index_q, 10, 12, 1, kNan);
    set_rows(problem.index_q, 63, 65, 2, kInf);
    set_rows(problem.index_q, 99, 100, 0, -kInf);
    set_rows(problem.index_q, 40, 41, 3, 0.0F);
    expect_gpu_equals_reference(problem, describe(o));
  }
}

TEST(Sm90Select, HighScoresKeepAnExactLogSumExp) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = 20;
  o.tokens_k = 600;
  o.topk = 2;
  const SelectProblem problem(o, [](std::mt19937_64& random) { return 16.0F * small_integer(random); });
  expect_gpu_equals_reference(problem, "scores up to 6e3");
}

TEST(Sm90Select, EqualScoresKeepTheLowerBlocks) {
  SKIP_WITHOUT_GPU();
  Options square, wide, paged = paged_options({9000, 300, 1}, {3, 2, 1}, 128);
  square.tokens_q = square.tokens_k = 700;
  wide.tokens_q = 20;
  wide.tokens_k = 9000;
  for (Options o : {square, wide, paged}) {
    for (const int64_t topk : {5, 16, 33}) {
      for (const int64_t init : {0, 2}) {
        for (const int64_t local : {0, 1}) {
          o.topk = topk;
          o.init_blocks = init;
          o.local_blocks = local;
          expect_gpu_equals_reference(SelectProblem(o, one), describe(o));
        }
      }
    }
  }
}

// Every block's keys stand in every third block: scores that depended on where a block is would break the ties. fp8
// products have fewer bits than other products' sums; small integers keep them exact.
TEST(Sm90Select, RepeatedBlocksTie) {
  SKIP_WITHOUT_GPU();
  for (const DataType dtype : {OPENMSA_BFLOAT16, OPENMSA_FLOAT16, OPENMSA_FLOAT8_E4M3}) {
    for (const auto& [queries, keys] : {std::pair{900, 900}, {40, 9000}, {1, 9000}}) {
      for (const int64_t topk : {16, 40}) {
        Options o;
        o.dtype = dtype;
        o.tokens_q = queries;
        o.tokens_k = keys;
        o.topk = topk;
        SelectProblem problem(o, dtype == OPENMSA_FLOAT8_E4M3 ? Values(small_integer) : Values(normal));
        repeat_blocks(problem, 3);
        const Selection expected = run_on_reference(problem);
        expect_equal(run_on_gpu(problem), expected, describe(o));
        expect_equal(run_on_gpu(in_pages(problem)), expected, describe(o) + ", in pages");
      }
    }
  }
}

TEST(Sm90SelectLarge, RandomScoresAgreeWithFloat64) {
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

TEST(Sm90SelectLarge, RepeatsAreBitwiseEqual) {
  SKIP_WITHOUT_GPU();
  Options square, wide, many, paged = paged_options({20000, 3000, 64, 9000}, {1, 400, 2, 1}, 64);
  square.tokens_q = square.tokens_k = 8000;
  wide.tokens_q = 3;
  wide.tokens_k = 60000;
  many.tokens_q = many.tokens_k = 3000;
  many.topk = 40;
  many.index_heads = 16;
  paged.dtype = OPENMSA_FLOAT8_E4M3;
  for (const Options& o : {square, wide, many, paged}) {
    const SelectProblem problem(o, normal);
    PlacedProblem placed(cases::gpu_memory(), problem);
    const Selection first = run_on_gpu(problem);
    for (int i = 0; i < 20; ++i) {
      placed.clear_outputs();
      sm90_backend().select(placed.params());
      expect_same_bits({placed.indices(), placed.index_lse()}, first, describe(o) + ", repeat " + std::to_string(i));
    }
  }
}

TEST(Sm90Select, BatchAndSplitDoNotChangeBits) {
  SKIP_WITHOUT_GPU();
  Options whole;
  whole.tokens_q = whole.tokens_k = 1000;
  whole.topk = 4;
  const SelectProblem problem(whole, normal);
  const Selection expected = run_on_gpu(problem);

  for (const int64_t rows : {1, 5, 17, 100}) {
    expect_same_bits(run_on_gpu(last_queries(problem, rows)), rows_of(expected, whole, whole.tokens_q - rows, rows),
                     "the last " + std::to_string(rows) + " queries");
  }

  // Chunks that share the prefix, in one call.
  SelectProblem chunks = problem;
  chunks.cu_seqlens_q = int32_tensor(chunks.options.cu_seqlens_q = {0, 3, 400, 1000});
  chunks.cu_seqlens_k = int32_tensor(chunks.options.cu_seqlens_k = {0, 3, 400, 1000});
  chunks.k_starts = int32_tensor(chunks.options.k_starts = {0, 0, 0});
  expect_same_bits(run_on_gpu(chunks), expected, "chunks");

  expect_same_bits(run_on_gpu(in_pages(problem)), expected, "pages");
}

// Queries [begin, begin + rows) of a problem of one sequence, on the keys that they see.
SelectProblem middle_queries(const SelectProblem& problem, int64_t begin, int64_t rows) {
  const Options& o = problem.options;
  SelectProblem part = problem;
  part.options.tokens_q = begin + rows;
  part.options.tokens_k = o.tokens_k - (o.tokens_q - begin - rows);
  part.index_q = problem.index_q;
  part.index_q.view.shape[0] = part.options.tokens_q;
  part.index_k.view.shape[0] = part.options.tokens_k;
  return last_queries(part, rows);
}

// Twenty thousand queries fill the GPU with whole tiles; a few of them, alone, are worth sharing out over the keys.
TEST(Sm90SelectLarge, SharedOutKeysSelectWhatWholeTilesDo) {
  SKIP_WITHOUT_GPU();
  for (const DataType dtype : {OPENMSA_BFLOAT16, OPENMSA_FLOAT8_E4M3}) {
    Options o;
    o.dtype = dtype;
    o.tokens_q = 20000;
    o.tokens_k = 40000;
    o.with_lse = false;
    SelectProblem problem(o, normal);
    for (const int64_t topk : {16, 33}) {
      problem.options.topk = o.topk = topk;
      const Selection expected = run_on_gpu(problem);
      for (const int64_t rows : {1, 2, 9, 100, 700}) {
        expect_same_bits(run_on_gpu(last_queries(problem, rows)), rows_of(expected, o, o.tokens_q - rows, rows),
                         describe(o) + ", the last " + std::to_string(rows));
      }
      for (const auto& [begin, rows] : {std::pair{10001, 1}, {12345, 70}, {1, 300}}) {
        expect_same_bits(run_on_gpu(middle_queries(problem, begin, rows)), rows_of(expected, o, begin, rows),
                         describe(o) + ", " + std::to_string(rows) + " from " + std::to_string(begin));
      }
      expect_same_bits(run_on_gpu(in_pages(last_queries(problem, 5))), rows_of(expected, o, o.tokens_q - 5, 5),
                       describe(o) + ", the last 5 in pages");
    }
  }
}

TEST(Sm90SelectLarge, FewQueriesOnLongKeys) {
  SKIP_WITHOUT_GPU();
  Options o;
  o.tokens_q = 17;
  o.tokens_k = 131072 + 5;
  const SelectProblem problem(o);
  for (const int64_t rows : {1, 4, 17}) {
    for (const int64_t topk : {16, 64}) {
      SelectProblem part = last_queries(problem, rows);
      part.options.topk = topk;
      const Selection expected = run_on_reference(part);
      expect_equal(run_on_gpu(part), expected, describe(part.options));
      expect_equal(run_on_gpu(in_pages(part)), expected, describe(part.options) + ", in pages");
    }
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
    set_rows(problem.index_k, begin, end, 0, kNan);
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
      set_element(pages.index_k, kNan, row / 128, row % 128, 0, d);
    }
  }
  expect_equal(run_on_gpu(pages), paged_expected, "page tails");
}

// Documents lie side by side in the same 128 rows of keys and of queries.
TEST(Sm90Select, OtherDocumentsHaveNoInfluence) {
  SKIP_WITHOUT_GPU();
  for (const float value : {kNan, kInf, -kInf}) {
    Options o;
    o.tokens_q = o.tokens_k = 2000;
    o.cu_seqlens_q = o.cu_seqlens_k = {0, 70, 133, 1000, 1001, 2000};
    o.topk = 3;
    SelectProblem problem(o);
    for (int64_t h = 0; h < o.index_heads; ++h) {
      set_rows(problem.index_q, 70, 133, h, value);
      set_rows(problem.index_q, 1000, 1001, h, value);
    }
    set_rows(problem.index_k, 0, 70, 0, value);
    set_rows(problem.index_k, 1000, 1001, 0, value);
    const Selection gpu = run_on_gpu(problem), reference = run_on_reference(problem);
    for (const auto& [begin, end] : {std::pair{133, 1000}, {1001, 2000}}) {
      expect_equal(rows_of(gpu, o, begin, end - begin), rows_of(reference, o, begin, end - begin),
                   "document beside " + std::to_string(value));
    }
  }
  // Padded rows at the end hold anything.
  Options paged = paged_options({700, 129}, {20, 2}, 128);
  paged.tokens_q += 40;
  SelectProblem padded(paged);
  for (int64_t h = 0; h < paged.index_heads; ++h) set_rows(padded.index_q, 22, 62, h, kNan);
  expect_gpu_equals_reference(padded, "padded rows");
}

}  // namespace
}  // namespace openmsa::testing
