// sm90 attention that reads blocks with few members of a tile one by one, on problems of every size: the library
// divides large calls alone.
#include <gtest/gtest.h>

#include <limits>

#include "cpp/sm90_attend_problem.h"
#include "cuda/sm90/attend/launch.h"

namespace openmsa::testing {
namespace {

using cuda::sm90::attend_tuning;
using cuda::sm90::AttendTuning;

// Every call is divided, into chunks of 128 queries, until this object goes.
class Divided {
 public:
  explicit Divided(int32_t least_members) : before_(attend_tuning()) { attend_tuning() = {least_members, 0, 1, 0}; }
  Divided(const Divided&) = delete;
  Divided& operator=(const Divided&) = delete;
  ~Divided() { attend_tuning() = before_; }

 private:
  AttendTuning before_;
};

TEST(Sm90AttendRest, EveryTypeShapeAndLayout) {
  SKIP_WITHOUT_GPU();
  for (const DataType dtype : {OPENMSA_BFLOAT16, OPENMSA_FLOAT16}) {
    for (const int64_t dim : {64, 128}) {
      for (const int64_t block : {64, 128}) {
        AttendOptions contiguous;
        contiguous.dtype = dtype;
        contiguous.tokens_q = 300;
        contiguous.tokens_k = 2500;
        contiguous.cu_seqlens_q = {0, 130, 130, 300};
        contiguous.cu_seqlens_k = {0, 1131, 1200, 2500};
        contiguous.dim = dim;
        contiguous.block_size = block;
        contiguous.topk = 7;
        for (const AttendOptions& o : {contiguous, in_pages(contiguous, {1, 127, 900, 0, 2049}, {1, 16, 1, 3, 70})}) {
          const Divided divided(3);
          expect_gpu_attends_as_reference(AttendProblem(o), describe(o));
        }
      }
    }
  }
}

// Nothing is rest, some is, everything that is seen whole is; entries may be anything.
TEST(Sm90AttendRest, Thresholds) {
  SKIP_WITHOUT_GPU();
  for (const int32_t least_members : {2, 3, 17}) {
    for (const int64_t group : {8, 16}) {
      AttendOptions o;
      o.tokens_q = 150;
      o.tokens_k = 64 * 40 + 3;
      o.dim = o.block_size = 64;
      o.group = group;
      o.kv_heads = 2;
      o.index_heads = 4;
      o.topk = 20;
      const Divided divided(least_members);
      expect_gpu_attends_as_reference(AttendProblem(o), describe(o));
      expect_gpu_attends_as_reference(AttendProblem(o, hostile_blocks), describe(o) + ", hostile");
    }
  }
}

// One block has many members that share no tile with each other: its rows pass through every slot of the ring.
TEST(Sm90AttendRest, OneBlockOfManyTiles) {
  SKIP_WITHOUT_GPU();
  AttendOptions o;
  o.tokens_q = 600;
  o.tokens_k = 64 * 30;
  o.dim = o.block_size = 64;
  o.index_heads = 1;
  o.topk = 2;
  int64_t row = 0;
  const AttendProblem problem(o, [&](std::mt19937_64& random, int64_t blocks, int64_t) {
    const bool takes_first = row++ % 4 == 0;
    return std::vector<int64_t>{takes_first ? 0 : static_cast<int64_t>(random() % static_cast<uint64_t>(blocks))};
  });
  const Divided divided(3);
  expect_gpu_attends_as_reference(problem, describe(o));
}

TEST(Sm90AttendRest, WithoutLse) {
  SKIP_WITHOUT_GPU();
  AttendOptions o;
  o.tokens_q = 200;
  o.tokens_k = 3000;
  o.topk = 5;
  const AttendProblem problem(o);
  const Divided divided(3);
  const Attention with = attend_on_gpu(problem);
  AttendProblem without = problem;
  without.options.with_lse = false;
  expect_same_bits({attend_on_gpu(without).out, with.lse}, with, "without lse");
}

TEST(Sm90AttendRestLarge, RepeatsAreBitwiseEqual) {
  SKIP_WITHOUT_GPU();
  AttendOptions o;
  o.tokens_q = o.tokens_k = 6000;
  o.topk = 16;
  const AttendProblem problem(o);
  const Attention first = attend_on_gpu(problem);
  for (int repeat = 0; repeat < 20; ++repeat) expect_same_bits(attend_on_gpu(problem), first, describe(o));
  const Divided divided(3);
  const Attention chunks = attend_on_gpu(problem);
  for (int repeat = 0; repeat < 5; ++repeat) expect_same_bits(attend_on_gpu(problem), chunks, "chunks of 128 queries");
  expect_close(rows_of(chunks, o, 5000, 1000), rows_of(first, o, 5000, 1000), o, "in chunks of 128 queries");
}

// A value that is not finite stays with the rows that select its block, whatever way they read it.
TEST(Sm90AttendRest, ValuesThatAreNotFinite) {
  SKIP_WITHOUT_GPU();
  for (const int32_t least_members : {0, 3}) {
    AttendOptions o;
    o.tokens_q = 100;
    o.tokens_k = 64 * 20 + 50;
    o.dim = o.block_size = 64;
    o.index_heads = 1;
    o.topk = 4;
    AttendProblem problem(o);
    for (const int64_t key : {int64_t{70}, int64_t{500}, o.tokens_k - 40}) {
      set_element(problem.v, std::numeric_limits<float>::infinity(), key, 0, 3);
      set_element(problem.v, std::numeric_limits<float>::quiet_NaN(), key, 0, 9);
    }
    const Divided divided(least_members);
    expect_gpu_attends_as_reference(problem, "from " + std::to_string(least_members) + " members");
  }
}

}  // namespace
}  // namespace openmsa::testing
