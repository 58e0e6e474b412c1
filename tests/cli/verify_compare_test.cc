// What `openmsa verify` takes for right: faults of every kind must be beyond their limit.
#include "cli/verify_compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>

namespace openmsa::cli {
namespace {

class VerifyCompare : public ::testing::Test {
 protected:
  VerifyCompare() {
    ::setenv("OPENMSA_BACKEND", "reference", 1);
    shape_.name = "test";
    shape_.queries = {3, 150};
    shape_.keys = {40, 300};
    shape_.block_size = 32;
  }
  ~VerifyCompare() override { ::unsetenv("OPENMSA_BACKEND"); }

  // Whether all results pass once `fault` has changed the named one.
  template <typename Fault>
  bool passes(const VerifyInputs& inputs, IndexVectors vectors, const std::string& operation, const std::string& name,
              const Fault& fault) {
    const Results before = operation == "sparse_attention" ? run_operation("select_blocks", inputs, {}) : Results();
    const Results want = run_operation(operation, inputs, before);
    Results got;
    for (const auto& [result, array] : want) got.emplace_back(result, copy_to(host_device(), array));
    fault(result_named(got, name));
    bool passed = true;
    for (const Comparison& c : compare(operation, inputs, vectors, got, want)) passed = passed && c.passed();
    return passed;
  }

  VerifyShape shape_;
};

TEST_F(VerifyCompare, OutputsAndLogSumExps) {
  const VerifyInputs inputs(shape_, OPENMSA_FLOAT32, OPENMSA_FLOAT32, IndexVectors::integers);
  const auto check = [&](const char* name, const auto& fault) {
    return passes(inputs, IndexVectors::integers, "sparse_attention", name, fault);
  };
  const auto scale = [](float factor) {
    return [=](const Array& a) {
      for (int64_t i = 0; i < a.elements(); ++i) a.data<float>()[i] *= factor;
    };
  };
  EXPECT_TRUE(check("out", [](const Array&) {}));
  EXPECT_TRUE(check("out", scale(1 + 3e-5F)));
  EXPECT_FALSE(check("out", scale(1 + 8e-5F)));
  EXPECT_FALSE(check("lse", scale(1 + 8e-5F)));
  EXPECT_FALSE(check("out", [](const Array& a) { a.data<float>()[77] += 0.01F; })) << "one element";
  EXPECT_FALSE(check("out", [](const Array& a) { a.data<float>()[77] = std::nanf(""); }));
  EXPECT_FALSE(check("lse", [](const Array& a) { a.data<float>()[0] = -std::numeric_limits<float>::infinity(); }));
}

TEST_F(VerifyCompare, Kl) {
  const VerifyInputs inputs(shape_, OPENMSA_FLOAT32, OPENMSA_FLOAT32, IndexVectors::integers);
  const auto check = [&](float factor) {
    return passes(inputs, IndexVectors::integers, "msa_attention", "kl",
                  [=](const Array& a) { *a.data<float>() *= factor; });
  };
  EXPECT_TRUE(check(1));
  EXPECT_FALSE(check(1 + 3e-4F));
  EXPECT_FALSE(check(std::nanf("")));
}

TEST_F(VerifyCompare, SelectionsOfIntegersMustBeEqual) {
  const VerifyInputs inputs(shape_, OPENMSA_BFLOAT16, OPENMSA_BFLOAT16, IndexVectors::integers);
  const auto swapped = [](const Array& a) {
    int32_t* last = a.data<int32_t>() + a.elements() - a.tensor.shape[2];
    std::swap(last[0], last[1]);
  };
  EXPECT_FALSE(passes(inputs, IndexVectors::integers, "msa_attention", "indices", swapped));
}

TEST_F(VerifyCompare, SelectionsOfRealVectors) {
  for (const char* operation : {"select_blocks", "paged_select_blocks"}) {
    const VerifyInputs inputs(shape_, OPENMSA_FLOAT32, OPENMSA_FLOAT32, IndexVectors::real);
    const auto check = [&](const auto& fault) {
      return passes(inputs, IndexVectors::real, operation, "indices", [&](const Array& a) {
        fault(a.data<int32_t>() + a.elements() - a.tensor.shape[2]);  // the last query, which sees ten blocks
      });
    };
    EXPECT_TRUE(check([](int32_t*) {})) << operation;
    EXPECT_FALSE(check([](int32_t* row) { std::swap(row[0], row[1]); })) << operation;
    EXPECT_FALSE(check([](int32_t* row) { row[0] = row[1]; })) << operation;
    EXPECT_FALSE(check([](int32_t* row) { row[3] = 0; })) << operation << ": the own block";
    EXPECT_FALSE(check([](int32_t* row) { row[0] = 10; })) << operation << ": an invisible block";
    EXPECT_FALSE(check([](int32_t* row) { row[0] = -1; })) << operation;
  }
}

TEST_F(VerifyCompare, NearlyEqualBlocksMayChangePlaces) {
  VerifyInputs inputs(shape_, OPENMSA_FLOAT32, OPENMSA_FLOAT32, IndexVectors::real);
  // Every key nearly the same, and later ones a little longer: scores of neighbouring blocks differ by 3e-6 of them.
  float* keys = inputs.index_k.data<float>();
  for (int64_t i = 0; i < inputs.index_k.elements(); ++i) {
    keys[i] = keys[i % shape_.dim] * (1 + 1e-7F * static_cast<float>(i / shape_.dim));
  }
  EXPECT_TRUE(passes(inputs, IndexVectors::real, "select_blocks", "indices", [](const Array& a) {
    int32_t* row = a.data<int32_t>() + a.elements() - a.tensor.shape[2];
    std::swap(row[0], row[1]);
  }));
}

TEST_F(VerifyCompare, AppendedBytesMustBeEqual) {
  const VerifyInputs inputs(shape_, OPENMSA_BFLOAT16, OPENMSA_FLOAT8_E4M3, IndexVectors::integers);
  for (const char* operation : {"paged_append", "paged_append fp8"}) {
    EXPECT_FALSE(passes(inputs, IndexVectors::integers, operation, "v_cache",
                        [](const Array& a) { a.data<uint8_t>()[5] ^= 1; }));
  }
}

}  // namespace
}  // namespace openmsa::cli
