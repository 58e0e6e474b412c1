// Every operation of every case on every backend of this build, against the reference.
// OPENMSA_TEST_BACKENDS=reference,sm90 narrows the backends; OPENMSA_CASES_REDUCED=1 runs the subset that sanitizers
// can afford.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "api/backend.h"
#include "cpp/case_compare.h"
#include "cpp/case_invariants.h"

namespace openmsa::cases {
namespace {

using Names = std::set<std::string>;

// What a backend must refuse by the argument's name, and what it may refuse so, among the needs of cases.
struct Limits {
  const char* backend;
  Names must_refuse, may_refuse;
};
const Limits kLimits[] = {
    {"reference", {}, {}},
    {"cpu", {}, {}},
    {"sm90",
     {"fp32", "block32", "dim", "topk", "unaligned", "kl"},
     {"dv", "fp8", "heads", "negative_stride", "zero_stride"}},
};

const Limits& limits_of(const Backend& backend) {
  for (const Limits& limits : kLimits) {
    if (std::string(limits.backend) == backend.name()) return limits;
  }
  throw std::runtime_error(std::string("kLimits does not know backend ") + backend.name());
}

struct TestId {
  const Backend* backend;
  const Case* c;
  std::string op;
};

// For messages of GoogleTest, which would print bytes.
void PrintTo(const TestId& id, std::ostream* stream) { *stream << id.c->name; }

std::string test_name(const ::testing::TestParamInfo<TestId>& info) {
  return std::string(info.param.backend->name()) + "_" + info.param.op + "_" + info.param.c->name;
}

bool enabled(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' && std::string(value) != "0";
}

std::vector<const Backend*> backends_to_test() {
  const char* chosen = std::getenv("OPENMSA_TEST_BACKENDS");
  std::vector<const Backend*> result;
  for (const Backend* backend : backends()) {
    const bool by_default = chosen == nullptr || *chosen == '\0';
    bool named = false;
    for (std::string_view name : comma_separated(by_default ? "" : chosen)) named |= name == backend->name();
    // The tests of a backend that is named but cannot run here are skipped one by one.
    if (named || (by_default && backend->available())) result.push_back(backend);
  }
  return result;
}

std::vector<TestId> all_tests() {
  std::vector<TestId> tests;
  for (const Backend* backend : backends_to_test()) {
    for (const Case& c : case_table()) {
      if (enabled("OPENMSA_CASES_REDUCED") && !c.has_tag("reduced")) continue;
      for (const std::string& op : c.ops) tests.push_back({backend, &c, op});
    }
  }
  return tests;
}

DeviceMemory& memory_of(const Backend& backend) {
#ifdef OPENMSA_WITH_SM90
  if (backend.device() == OPENMSA_GPU) return gpu_memory();
#else
  (void)backend;
#endif
  return cpu_memory();
}

// What the reference makes of a case, computed once for all operations of the case.
struct Expected {
  std::string owner;
  HostTensor selection;  // the caller's or the reference's own
  Results attention;     // out, lse on it

  static const Expected& of(const Inputs& host) {
    static Expected expected;
    if (expected.owner != host.c.name) {
      expected.owner = host.c.name;
      const Call call{.in = host, .direct = &reference_backend()};
      expected.selection = host.indices.present() ? host.images.at(TensorId::indices) : select(call).at("indices");
      expected.attention = attend(call, PlacedTensor(host.memory, expected.selection));
    }
    return expected;
  }
};

class CaseTest : public ::testing::TestWithParam<TestId> {
 protected:
  const Backend& backend() const { return *GetParam().backend; }
  const Case& c() const { return *GetParam().c; }
  const std::string& op() const { return GetParam().op; }

  void SetUp() override {
    if (!backend().available()) GTEST_SKIP() << "backend " << backend().name() << " cannot run on this machine";
    setenv("OPENMSA_BACKEND", backend().name(), 1);
  }
  void TearDown() override { unsetenv("OPENMSA_BACKEND"); }

  // The operation's needs beyond what every backend can do.
  Names needs() const {
    Names result;
    if (op() == "combine") {
      if (c().dim_v != 64 && c().dim_v != 128) result.insert("dim");
      if (c().dtype == OPENMSA_FLOAT32) result.insert("fp32");
      return result;
    }
    const bool index = op().find("select") != std::string::npos || op().find("msa") != std::string::npos ||
                       op() == "warmup" || op() == "append";
    const bool main = op().find("select") == std::string::npos;
    if (index) result.insert(c().needs_index.begin(), c().needs_index.end());
    if (main) result.insert(c().needs_main.begin(), c().needs_main.end());
    if (op() == "msa" || op() == "warmup") result.insert("kl");
    if (op() == "mass") {  // no values
      result.erase("dv");
      if (c().dim == 64 || c().dim == 128) result.erase("dim");
    }
    return result;
  }

  Results run(const Call& how, const Inputs& host) const {
    const Expected& expected = Expected::of(host);
    const auto place = [&](const HostTensor& tensor) { return PlacedTensor(how.in.memory, tensor); };
    if (op() == "select" || op() == "paged_select") return select(how);
    if (op() == "attend" || op() == "paged_attend") return attend(how, place(expected.selection));
    if (op() == "mass") return mass(how, place(expected.selection));
    if (op() == "paged_msa") return paged_msa(how);
    if (op() == "combine") return combine(how);
    if (op() == "append") return append(how);
    if (op() == "backward") {
      return backward(how, place(expected.selection), place(expected.attention.at("out")),
                      place(expected.attention.at("lse")));
    }
    // Forward and backward. The backward pass gets the reference's forward results, whatever the backend.
    const bool warmup = op() == "warmup";
    Results results = msa(how, warmup);
    const Results reference = how.direct == &reference_backend() ? results : reference_msa(host, warmup);
    for (auto& [name, tensor] : msa_backward(how, warmup, reference)) {
      results[name == "kl" ? "backward_kl" : name] = std::move(tensor);
    }
    return results;
  }

  static const Results& reference_msa(const Inputs& host, bool warmup) {
    static std::string owner;
    static Results results;
    const std::string key = host.c.name + (warmup ? "/warmup" : "/msa");
    if (owner != key) {
      owner = key;
      results = msa({.in = host, .direct = &reference_backend()}, warmup);
    }
    return results;
  }

  void check_refusal(const Inputs& in, const Inputs& host, Status status, const std::vector<std::string>& mentions) {
    try {
      run({.in = in}, host);
      ADD_FAILURE() << "expected an error that names " << ::testing::PrintToString(mentions);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), status) << error.what();
      const std::string message = error.what();
      const bool named = std::any_of(mentions.begin(), mentions.end(), [&](const std::string& mention) {
        return message.find(mention) != std::string::npos;
      });
      EXPECT_TRUE(named) << message << "\nexpected one of " << ::testing::PrintToString(mentions);
      refusal_ = message;
    }
  }

  void check_results(const Inputs& in, const Inputs& host);
  void check_invariants(const Inputs& in, const Inputs& host, const Results& results);

  std::string refusal_;
};

std::vector<std::string> arguments_of(const Names& needs) {
  std::vector<std::string> names;
  const auto add = [&](std::initializer_list<const char*> more) {
    names.insert(names.end(), more.begin(), more.end());
  };
  if (needs.contains("block32")) add({"block_size"});
  if (needs.contains("topk")) add({"topk", "indices:"});
  if (needs.contains("kl")) add({"kl:", "warmup:"});
  for (const char* need : {"fp32", "dim", "dv", "fp8", "heads", "unaligned", "negative_stride", "zero_stride"}) {
    if (needs.contains(need))
      add({"q:", "k:", "v:", "index_q:", "index_k:", "k_cache:", "v_cache:", "index_k_cache:", "out:", "outs:",
           "d_out:"});
  }
  return names;
}

Names both(const Names& a, const Names& b) {
  Names result;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::inserter(result, result.begin()));
  return result;
}

void CaseTest::check_results(const Inputs& in, const Inputs& host) {
  const Results got = run({.in = in}, host);  // invisible memory holds NaN and inf
  // From here on: clean invisible memory, outputs that held other bytes before.
  constexpr unsigned char kOtherFill = 0x5A;
  const Results want = run({.in = host, .direct = &reference_backend(), .fill = kOtherFill}, host);
  if (&backend() == &reference_backend()) {
    EXPECT_TRUE(same_bits(got, want)) << "through the API with poisoned memory, and directly with clean memory";
  } else {
    const Inputs clean(c(), in.memory, input_images(c(), false));
    EXPECT_TRUE(same_bits(got, run({.in = clean, .fill = kOtherFill}, host))) << "repeated, with clean memory";
    EXPECT_TRUE(close(c(), got, want));
    if (got.contains("indices")) {
      HostTensor copy = want.at("indices");
      const Tensor view = copy.tensor();
      EXPECT_TRUE(valid_selection(got.at("indices"), want.at("indices"), select_params(host, &view, nullptr),
                                  selection_margin(host)));
    }
  }
  if (!c().has_tag("large") && c().raises.empty()) check_invariants(in, host, got);
}

void CaseTest::check_invariants(const Inputs& in, const Inputs& host, const Results& results) {
  const HostTensor& selection = Expected::of(host).selection;
  if (op() == "select") check_sequences_select_alone(in, results);
  if (op() == "paged_select") check_paged_select_is_contiguous(in, results);
  if (op() == "paged_attend") check_paged_attend_is_contiguous(in, selection, results);
  if (op() == "attend" || op() == "paged_attend") {
    constexpr int64_t kMostTopk = 64;  // of a backend that refuses more
    if (!limits_of(backend()).must_refuse.contains("topk") || c().topk + kExtraEntries <= kMostTopk) {
      check_selection_order(in, selection, results);
    }
    check_unselected_keys(in, selection, results);
  }
  if (op() == "attend" && c().layout == "contiguous" && !c().has_tag("nan") && !c().has_tag("inf")) {
    check_halves_combine(in, selection, results);
  }
  if (op() == "backward") check_zero_gradients(in, &selection, results);
  if (op() == "warmup") {
    Results gradients = results;
    std::erase_if(gradients, [](const auto& item) { return item.first.rfind("d_", 0) != 0; });
    check_zero_gradients(in, nullptr, gradients);
  }
  if (op() == "msa") {
    Results forward = results, gradients = results;
    std::erase_if(gradients, [](const auto& item) { return item.first.rfind("d_", 0) != 0; });
    check_zero_gradients(in, &results.at("indices"), gradients);
    if (!c().has_tag("nan")) check_sequences_train_alone(in, forward, gradients);
  }
}

TEST_P(CaseTest, MatchesTheReference) {
  DeviceMemory& memory = memory_of(backend());
  const Inputs in(c(), memory, input_images(c(), true));
  const Inputs host(c(), cpu_memory(), input_images(c(), false));
  const std::vector<std::string_view> supported = comma_separated(backend().operations());
  const std::string operation = operation_name(c(), op());
  if (std::find(supported.begin(), supported.end(), operation) == supported.end()) {
    std::vector<std::string> mentions = {operation + ": not supported by backend " + backend().name()};
    // No GPU backend takes blocks of 32, which is checked before a backend is chosen.
    if (backend().device() == OPENMSA_GPU && c().block_size == 32)
      mentions.insert(mentions.end(), {"block_size: got 32", "got block_size = 32"});
    check_refusal(in, host, OPENMSA_UNSUPPORTED, mentions);
    GTEST_SKIP() << refusal_;
  }
  if (!c().raises.empty() && backend().device() == OPENMSA_CPU) {
    check_refusal(in, host, OPENMSA_INVALID_ARGUMENT, {c().raises + ": got"});
    // Run on its stages, the backend clamps and writes everything.
    const Results once = run({.in = host, .direct = &backend()}, host);
    const Results again = run({.in = host, .direct = &backend(), .fill = 0x5A}, host);
    EXPECT_TRUE(same_bits(once, again));
    return;
  }
  const Limits& limits = limits_of(backend());
  if (const Names refused = both(needs(), limits.must_refuse); !refused.empty()) {
    check_refusal(in, host, OPENMSA_UNSUPPORTED, arguments_of(refused));
    GTEST_SKIP() << refusal_;
  }
  if (!both(needs(), limits.may_refuse).empty()) {
    try {
      run({.in = in}, host);
    } catch (const Error& error) {
      ASSERT_EQ(error.status(), OPENMSA_UNSUPPORTED) << error.what();
      check_refusal(in, host, OPENMSA_UNSUPPORTED, arguments_of(both(needs(), limits.may_refuse)));
      GTEST_SKIP() << refusal_;
    }
  }
  check_results(in, host);
}

INSTANTIATE_TEST_SUITE_P(Table, CaseTest, ::testing::ValuesIn(all_tests()), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CaseTest);

TEST(CaseTable, ChosenBackendsAreInThisBuild) {
  const char* chosen = std::getenv("OPENMSA_TEST_BACKENDS");
  for (std::string_view name : comma_separated(chosen == nullptr ? "" : chosen)) {
    const bool known = std::any_of(backends().begin(), backends().end(),
                                   [&](const Backend* backend) { return name == backend->name(); });
    EXPECT_TRUE(known) << "OPENMSA_TEST_BACKENDS names " << name;
  }
}

// Python computed the checksums: both languages make the same inputs.
TEST(CaseTable, InputsHaveTheSameBitsAsInPython) {
  for (const Case& c : case_table()) {
    for (const auto& [name, want] : expected_checksums(c.name)) {
      EXPECT_EQ(checksum(make_input(c, tensor_named(name), true)), want) << c.name << " " << name;
    }
  }
}

const Case& case_named(const std::string& name) {
  for (const Case& c : case_table()) {
    if (c.name == name) return c;
  }
  throw std::runtime_error("no case is named " + name);
}

// The margin rule takes nothing but near ties: each of these changes of a right selection is wrong.
TEST(CaseCompare, WrongSelectionsAreSeen) {
  for (const char* name : {"ties_bf16", "forced_topk8_init3_local2", "topk_16"}) {
    const Case& c = case_named(name);
    const Inputs host(c, cpu_memory(), input_images(c, false));
    HostTensor want = select({.in = host, .direct = &reference_backend()}).at("indices");
    const Tensor view = want.tensor();
    const SelectParams params = select_params(host, &view, nullptr);
    const auto is_valid = [&](const std::vector<std::pair<int64_t, int64_t>>& changes) {
      HostTensor got = want;
      for (const auto& [slot, block] : changes)
        std::memcpy(got.element(0, 2, slot), std::array{static_cast<int32_t>(block)}.data(), 4);
      return static_cast<bool>(valid_selection(got, want, params, selection_margin(host)));
    };
    const std::vector<int64_t> blocks = decode_blocks(want);
    const int64_t* row = blocks.data() + 2 * c.topk;
    int64_t left_out = 0;
    while (std::find(row, row + c.topk, left_out) != row + c.topk) ++left_out;
    EXPECT_TRUE(is_valid({}));
    EXPECT_FALSE(is_valid({{0, row[1]}, {1, row[0]}})) << "two blocks change places in " << name;
    EXPECT_FALSE(is_valid({{0, row[1]}})) << "a block repeats in " << name;
    EXPECT_FALSE(is_valid({{0, -1}})) << "a slot is empty in " << name;
    EXPECT_FALSE(is_valid({{c.topk - 1, left_out}})) << "the own block is missing in " << name;
    EXPECT_FALSE(is_valid({{0, left_out}})) << "a better block is left out in " << name;
    EXPECT_FALSE(is_valid({{0, 1000000}})) << "a block is beyond the visible ones in " << name;
  }
}

// What cancels may leave noise of the floor's size times the tolerance, and no more.
TEST(CaseCompare, FloorCoversNoiseAlone) {
  const auto filled = [](float value) {
    HostTensor tensor = make_host_tensor(OPENMSA_FLOAT32, {2, 2}, {}, kFill);
    const float values[] = {value, -value, value, -value};
    std::memcpy(tensor.element(0, 0), values, sizeof(values));
    return tensor;
  };
  const HostTensor zero = filled(0);
  EXPECT_FALSE(close(filled(1e-9F), zero, 1e-3));
  EXPECT_TRUE(close(filled(0.9e-6F), zero, 1e-3, 1e-3));
  EXPECT_FALSE(close(filled(1.1e-6F), zero, 1e-3, 1e-3));
  EXPECT_FALSE(close(filled(1.002F), filled(1), 1e-3, 1e-3)) << "numbers above the floor keep their tolerance";
}

TEST(CaseCompare, WrongNumbersAreSeen) {
  HostTensor want = make_host_tensor(OPENMSA_FLOAT32, {2, 2}, {}, kFill);
  const float values[] = {1.0F, -2.0F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()};
  std::memcpy(want.element(0, 0), values, sizeof(values));
  const auto is_close = [&](int64_t row, int64_t column, float value) {
    HostTensor got = want;
    std::memcpy(got.element(row, column), &value, sizeof(value));
    return static_cast<bool>(close(got, want, 1e-3));
  };
  EXPECT_TRUE(is_close(0, 0, 1.001F));
  EXPECT_FALSE(is_close(0, 0, 1.01F));
  EXPECT_FALSE(is_close(0, 0, values[3]));
  EXPECT_FALSE(is_close(1, 0, 1e30F));
  EXPECT_FALSE(is_close(1, 0, -values[2]));
  EXPECT_FALSE(is_close(1, 1, 0.0F));
}

// A guard that sees nothing would make every test above weaker.
TEST(CaseMemory, WritesOutsideATensorAreSeen) {
  HostTensor image = make_host_tensor(OPENMSA_FLOAT16, {2, 3}, {5, 1}, kFill);
  for (int64_t column : {-1, 3, 4, 8}) {
    const PlacedTensor placed(cpu_memory(), image);
    EXPECT_NO_THROW(placed.fetch());
    static_cast<uint16_t*>(placed.tensor()->data)[column] = 0;
    EXPECT_THROW(placed.fetch(), std::runtime_error) << column;
  }
  const PlacedTensor placed(cpu_memory(), image);
  static_cast<uint16_t*>(placed.tensor()->data)[5] = 0;
  EXPECT_EQ(decode(placed.fetch())[3], 0.0);
}

}  // namespace
}  // namespace openmsa::cases
