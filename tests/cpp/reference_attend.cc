// Attention of the reference at its edges; combine and captured_mass. The formulas themselves are checked with the
// gradients, in reference_backward.cc.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <functional>
#include <limits>

#include "api/numeric.h"
#include "reference_problem.h"

namespace openmsa::testing {
namespace {

Shape long_shape() {
  Shape shape;
  shape.tokens_q = 12;
  shape.tokens_k = 300;
  shape.topk = 5;
  return shape;
}

TEST(ReferenceAttend, IgnoresOrderRepetitionAndInvalidEntries) {
  Problem plain(long_shape());
  plain.shape.topk = 3;
  plain = Problem(plain.shape);
  plain.run_forward();

  Problem mixed(long_shape());
  for (size_t row = 0; row < 2 * 12; ++row) {
    const int32_t* from = plain.indices.data() + row * 3;
    const int32_t entries[] = {from[2], -1, from[0], std::numeric_limits<int32_t>::max(), from[1]};
    std::copy(std::begin(entries), std::end(entries), mixed.indices.begin() + static_cast<int64_t>(row) * 5);
    if (row % 2 == 1) mixed.indices[row * 5 + 3] = from[0];
    if (row % 3 == 1) mixed.indices[row * 5 + 3] = std::numeric_limits<int32_t>::min();
    if (row % 3 == 2) mixed.indices[row * 5 + 3] = 10;  // one past the last block
  }
  reference_backend().attend(mixed.attend_params());
  EXPECT_EQ(mixed.out, plain.out);
  EXPECT_EQ(mixed.lse, plain.lse);
  EXPECT_EQ(mixed.index_lse, plain.index_lse);
  EXPECT_EQ(mixed.kl, plain.kl);

  std::vector<int64_t> wide(mixed.indices.begin(), mixed.indices.end());
  wide[3] = std::numeric_limits<int64_t>::max();
  wide[8] = std::numeric_limits<int64_t>::min();
  Problem other(long_shape());
  AttendParams params = other.attend_params();
  const Tensor indices = make_tensor(wide.data(), OPENMSA_INT64, {2, 12, 5});
  params.indices = &indices;
  reference_backend().attend(params);
  EXPECT_EQ(other.out, plain.out);
}

TEST(ReferenceAttend, NothingSelectedGivesZero) {
  Problem problem(long_shape());
  std::fill(problem.indices.begin(), problem.indices.end(), -1);
  reference_backend().attend(problem.attend_params());
  for (const float x : problem.out) EXPECT_EQ(x, 0);
  for (const float x : problem.lse) EXPECT_EQ(x, -INFINITY);
  EXPECT_EQ(problem.kl, 0);
  problem.run_backward();
  for (const float x : problem.d_q) EXPECT_EQ(x, 0);
  for (const float x : problem.d_v) EXPECT_EQ(x, 0);
}

TEST(ReferenceAttend, MemoryThatNobodySeesHasNoInfluence) {
  Shape shape;
  shape.tokens_q = 20;
  shape.tokens_k = 160;
  shape.cu_seqlens_q = {0, 10, 20};
  shape.cu_seqlens_k = {0, 70, 160};
  shape.k_starts = {0, 90};  // rows 70 .. 89 are nobody's
  Problem clean(shape), dirty(shape);
  for (int64_t row = 70; row < 90; ++row) {
    for (int64_t d = 0; d < 16; ++d) {
      dirty.k[static_cast<size_t>(row * 16 + d)] = NAN;
      dirty.v[static_cast<size_t>(row * 16 + d)] = INFINITY;
    }
    for (int64_t d = 0; d < 8; ++d) dirty.index_k[static_cast<size_t>(row * 8 + d)] = NAN;
  }
  for (Problem* problem : {&clean, &dirty}) {
    problem->run_forward();
    problem->run_backward();
  }
  EXPECT_EQ(dirty.indices, clean.indices);
  EXPECT_EQ(dirty.out, clean.out);
  EXPECT_EQ(dirty.kl, clean.kl);
  EXPECT_EQ(dirty.d_k, clean.d_k);
  EXPECT_EQ(dirty.d_v, clean.d_v);
  EXPECT_EQ(dirty.d_index_k, clean.d_index_k);
}

TEST(ReferenceAttend, InfiniteScoresStayInTheirRows) {
  Problem clean(long_shape()), dirty(long_shape());
  for (int64_t d = 0; d < 8; ++d)
    dirty.q[static_cast<size_t>((3 * 4 + 1) * 8 + d)] = d == 0 ? INFINITY : 0.0F;  // query 3, head 1
  clean.run_forward();
  dirty.run_forward();
  for (int64_t i = 0; i < 12; ++i) {
    for (int64_t h = 0; h < 4; ++h) {
      for (int64_t d = 0; d < 8; ++d) {
        const auto at = static_cast<size_t>((i * 4 + h) * 8 + d);
        if (i == 3 && h == 1) {
          EXPECT_TRUE(std::isnan(dirty.out[at]));
        } else {
          EXPECT_EQ(dirty.out[at], clean.out[at]);
        }
      }
    }
  }
  EXPECT_TRUE(std::isnan(dirty.kl));
}

TEST(ReferenceAttend, NanIndexScoreShowsInItsRow) {
  Problem problem(long_shape());
  problem.index_q[(5 * 2 + 1) * 8] = NAN;  // query 5, index head 1
  problem.run_forward();
  for (int64_t r = 0; r < 2; ++r) {
    for (int64_t i = 0; i < 12; ++i) {
      EXPECT_EQ(std::isnan(problem.index_lse[static_cast<size_t>(r * 12 + i)]), r == 1 && i == 5);
    }
  }
  EXPECT_TRUE(std::isnan(problem.kl));
  for (const float x : problem.out) EXPECT_TRUE(std::isfinite(x));
}

TEST(ReferenceAttend, VeryUnlikeScoresDoNotOverflow) {
  Problem problem(long_shape());
  for (float& x : problem.q) x *= 1e4F;
  for (float& x : problem.index_q) x *= 1e4F;  // teacher and student put all mass on one key each
  problem.run_forward();
  problem.run_backward();
  const Oracle oracle = oracle_forward(problem, Inputs(problem));
  EXPECT_LT(relative_error(problem.out, oracle.out), 1e-6);
  EXPECT_TRUE(std::isfinite(problem.kl));
  for (const auto* gradient : {&problem.d_q, &problem.d_k, &problem.d_v, &problem.d_index_q, &problem.d_index_k}) {
    for (const float x : *gradient) EXPECT_TRUE(std::isfinite(x));
  }
}

// The same numbers in 16 bits and in strided memory: [token][head][2 D] with rows reversed.
TEST(ReferenceAttend, ReadsEveryStorageTypeAndStride) {
  for (const DataType type : {OPENMSA_FLOAT16, OPENMSA_BFLOAT16}) {
    Problem problem(long_shape());
    std::vector<uint16_t> stored(static_cast<size_t>(300 * 2 * 16));
    for (int64_t j = 0; j < 300; ++j) {
      for (int64_t at = 0; at < 16; ++at) {
        const auto head = at / 8, d = at % 8;
        float& value = problem.k[static_cast<size_t>(j * 16 + at)];
        const uint16_t bits = type == OPENMSA_FLOAT16 ? float_to_float16(value) : float_to_bfloat16(value);
        value = type == OPENMSA_FLOAT16 ? float16_to_float(bits) : bfloat16_to_float(bits);
        stored[static_cast<size_t>(((299 - j) * 2 + head) * 16 + d)] = bits;
      }
    }
    problem.run_forward();
    Problem other(long_shape());
    other.indices = problem.indices;
    AttendParams params = other.attend_params();
    params.k = make_tensor(stored.data() + 299 * 32, type, {300, 2, 8});
    params.k.strides[0] = -32;
    params.k.strides[1] = 16;
    reference_backend().attend(params);
    EXPECT_EQ(other.out, problem.out);
    EXPECT_EQ(other.lse, problem.lse);

    std::vector<uint16_t> out(problem.out.size());
    params.out = make_tensor(out.data(), type, {12, 4, 8});
    reference_backend().attend(params);
    for (size_t at = 0; at < out.size(); ++at) {
      EXPECT_EQ(out[at],
                type == OPENMSA_FLOAT16 ? float_to_float16(problem.out[at]) : float_to_bfloat16(problem.out[at]));
    }
  }
}

// Scores of -inf alone have no mass to share out: the row is as one that sees no key.
TEST(ReferenceAttend, RowsWithoutMassGiveZero) {
  Shape shape;
  shape.tokens_q = 3;
  shape.dim = 1;
  Problem problem(shape);
  std::fill(problem.q.begin(), problem.q.end(), 1.0F);
  std::fill(problem.k.begin(), problem.k.end(), -INFINITY);
  problem.run_forward();
  problem.run_backward();
  for (const float x : problem.lse) EXPECT_EQ(x, -INFINITY);
  for (const auto* zeros : {&problem.out, &problem.d_q, &problem.d_k, &problem.d_v}) {
    for (const float x : *zeros) EXPECT_EQ(x, 0);
  }
}

TEST(ReferenceAttend, FaultsInsideParallelLoopsReachTheCaller) {
  Problem problem(long_shape());
  reference_backend().select(problem.select_params());
  AttendParams params = problem.attend_params();
  params.v.dtype = OPENMSA_INT32;
  EXPECT_THROW(reference_backend().attend(params), Error);
}

TEST(ReferenceAttend, StrideZeroSharesARow) {
  Problem problem(long_shape()), expanded(long_shape());
  for (size_t at = 16; at < problem.v.size(); ++at) problem.v[at] = problem.v[at % 16];
  problem.run_forward();
  expanded.indices = problem.indices;
  AttendParams params = expanded.attend_params();
  params.v.strides[0] = 0;
  reference_backend().attend(params);
  EXPECT_EQ(expanded.out, problem.out);
}

// ---- combine ------------------------------------------------------------------------------------------------------

// Attention over the blocks of even and of odd number, merged.
TEST(ReferenceCombine, PartsOverDisjointKeysGiveTheWhole) {
  Problem whole(long_shape());
  whole.run_forward();
  std::vector<float> outs, lses;
  for (const int parity : {0, 1, 2}) {  // the last part has no block at all
    Problem part(long_shape());
    part.indices = whole.indices;
    for (int32_t& block : part.indices) {
      if (block % 2 != parity) block = -1;
    }
    reference_backend().attend(part.attend_params());
    if (parity == 2) std::fill(part.out.begin(), part.out.end(), NAN);  // without mass it has no say
    outs.insert(outs.end(), part.out.begin(), part.out.end());
    lses.insert(lses.end(), part.lse.begin(), part.lse.end());
  }
  std::vector<float> out(whole.out.size()), lse(whole.lse.size());
  CombineParams params;
  params.outs = make_tensor(outs.data(), OPENMSA_FLOAT32, {3, 12, 4, 8});
  params.lses = make_tensor(lses.data(), OPENMSA_FLOAT32, {3, 4, 12});
  params.out = make_tensor(out.data(), OPENMSA_FLOAT32, {12, 4, 8});
  params.lse = make_tensor(lse.data(), OPENMSA_FLOAT32, {4, 12});
  reference_backend().combine(params);
  EXPECT_LT(relative_error(out, whole.out), 1e-6);
  EXPECT_LT(relative_error(lse, whole.lse), 1e-6);
}

TEST(ReferenceCombine, NoPartsAndEmptyParts) {
  std::vector<float> outs(2 * 3, 7), lses(2, -INFINITY), out(3, NAN), lse(1, NAN);
  for (const int64_t splits : {0, 2}) {
    CombineParams params;
    params.outs = make_tensor(outs.data(), OPENMSA_FLOAT32, {splits, 1, 1, 3});
    params.lses = make_tensor(lses.data(), OPENMSA_FLOAT32, {splits, 1, 1});
    params.out = make_tensor(out.data(), OPENMSA_FLOAT32, {1, 1, 3});
    params.lse = make_tensor(lse.data(), OPENMSA_FLOAT32, {1, 1});
    reference_backend().combine(params);
    EXPECT_EQ(out, (std::vector<float>{0, 0, 0}));
    EXPECT_EQ(lse[0], -INFINITY);
  }
}

// ---- memory -------------------------------------------------------------------------------------------------------

// The most memory that the process has held, in bytes.
int64_t peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} << 10;
}

// Views of stride 0 and selections of far more entries than blocks cost no memory of their size.
TEST(ReferenceMemory, DoesNotGrowWithEntriesOrParts) {
  constexpr int64_t kMany = int64_t{1} << 24;
  const std::vector<int32_t> entries(kMany, 1);
  std::vector<float> rows(64, 1.0F), out(1, NAN), lse(1, NAN);
  const int64_t before = peak_memory();

  AttendParams attend;
  attend.layout.tokens_q = 1;
  attend.layout.tokens_k = 64;
  attend.q = make_tensor(rows.data(), OPENMSA_FLOAT32, {1, 1, 1});
  attend.k = attend.v = make_tensor(rows.data(), OPENMSA_FLOAT32, {64, 1, 1});
  const Tensor indices = make_tensor(entries.data(), OPENMSA_INT32, {1, 1, kMany});
  attend.indices = &indices;
  attend.block_size = 32;
  attend.out = make_tensor(out.data(), OPENMSA_FLOAT32, {1, 1, 1});
  const Tensor attend_lse = make_tensor(lse.data(), OPENMSA_FLOAT32, {1, 1});
  attend.lse = &attend_lse;
  reference_backend().attend(attend);
  EXPECT_FLOAT_EQ(out[0], 1);
  EXPECT_FLOAT_EQ(lse[0], 1 + std::log(32.0F));

  CombineParams combine;
  combine.outs = make_tensor(rows.data(), OPENMSA_FLOAT32, {kMany, 1, 1, 1});
  combine.lses = make_tensor(rows.data(), OPENMSA_FLOAT32, {kMany, 1, 1});
  combine.outs.strides[0] = combine.lses.strides[0] = 0;
  combine.out = attend.out;
  combine.lse = attend_lse;
  reference_backend().combine(combine);
  EXPECT_FLOAT_EQ(out[0], 1);
  EXPECT_FLOAT_EQ(lse[0], 1 + std::log(static_cast<float>(kMany)));

  EXPECT_LT(peak_memory() - before, kMany);
}

// ---- captured_mass ------------------------------------------------------------------------------------------------

struct Mass {
  std::vector<float> share, best;
};

Mass captured(Problem& problem) {
  const Shape& s = problem.shape;
  Mass mass{std::vector<float>(static_cast<size_t>(s.index_heads * s.tokens_q), NAN), {}};
  mass.best = mass.share;
  const AttendParams attend = problem.attend_params();
  CapturedMassParams params;
  params.layout = attend.layout;
  params.q = attend.q;
  params.k = attend.k;
  params.indices = *attend.indices;
  params.block_size = attend.block_size;
  params.scale = attend.scale;
  params.share = make_tensor(mass.share.data(), OPENMSA_FLOAT32, {s.index_heads, s.tokens_q});
  params.best = make_tensor(mass.best.data(), OPENMSA_FLOAT32, {s.index_heads, s.tokens_q});
  reference_backend().captured_mass(params);
  return mass;
}

TEST(ReferenceCapturedMass, MatchesBruteForce) {
  Shape shape = long_shape();
  shape.topk = 3;
  Problem problem(shape);
  reference_backend().select(problem.select_params());
  problem.indices[0] = problem.indices[1];  // a repeated block counts once
  problem.indices[4] = -1;
  problem.indices[8] = 1000;
  const Mass mass = captured(problem);
  const Inputs inputs(problem);
  for (int64_t i = 0; i < 12; ++i) {
    const std::vector<int64_t> visible = oracle_visible(problem, i);
    for (int64_t r = 0; r < 2; ++r) {
      std::vector<double> blocks(10, 0.0);
      for (int64_t h = 2 * r; h < 2 * r + 2; ++h) {
        std::vector<double> scores;
        double lse = 0;
        for (const int64_t j : visible) scores.push_back(oracle_score(inputs.q, i * 4 + h, inputs.k, j * 2 + h / 2, 8));
        const auto p = oracle_softmax(scores, &lse);
        for (size_t j = 0; j < p.size(); ++j) blocks[j / 32] += p[j] / 2;
      }
      double share = 0, best = 0;
      int64_t count = 0;
      for (int32_t block = 0; block < 10; ++block) {
        const auto row = problem.indices.begin() + (r * 12 + i) * 3;
        if (std::find(row, row + 3, block) == row + 3) continue;
        share += blocks[static_cast<size_t>(block)];
        ++count;
      }
      std::sort(blocks.begin(), blocks.end(), std::greater<>());
      for (int64_t at = 0; at < count; ++at) best += blocks[static_cast<size_t>(at)];
      EXPECT_NEAR(mass.share[static_cast<size_t>(r * 12 + i)], share, 1e-6);
      EXPECT_NEAR(mass.best[static_cast<size_t>(r * 12 + i)], best, 1e-6);
    }
  }
}

TEST(ReferenceCapturedMass, Edges) {
  Shape shape;
  shape.tokens_q = 10;
  shape.tokens_k = 4;
  Problem few(shape);
  reference_backend().select(few.select_params());
  Mass mass = captured(few);
  for (size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(mass.share[i], i < 6 ? 0 : 1);  // the first 6 see no key
    EXPECT_EQ(mass.best[i], i < 6 ? 0 : 1);
  }
  Problem broken(long_shape());
  reference_backend().select(broken.select_params());
  broken.q[0] = NAN;
  mass = captured(broken);
  EXPECT_TRUE(std::isnan(mass.share[0]));
  EXPECT_TRUE(std::isnan(mass.best[0]));
  EXPECT_TRUE(std::isfinite(mass.share[1]));
}

}  // namespace
}  // namespace openmsa::testing
