// The choice of the backend, settings, openmsa_info, the C functions around the operations and the public headers.
#include <gtest/gtest.h>

#include <array>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "api/backend.h"
#include "api/checks.h"
#include "api/operation.h"
#include "cpp/api_calls.h"

namespace openmsa::tests {
namespace {

template <typename Function>
std::string message_of(Status status, const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return {};
}

class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  ~Environment() { unsetenv(name_); }

 private:
  const char* name_;
};

// A backend with no stage, on a device whose memory is the host's.
class Bare : public Backend {
 public:
  explicit Bare(openmsa_device_type device) : device_(device) {}
  const char* name() const override { return "bare"; }
  openmsa_device_type device() const override { return device_; }
  bool available() const override { return true; }
  const char* operations() const override { return " select_blocks ,,combine"; }

 private:
  openmsa_device_type device_;
};

class Copying final : public Bare {
 public:
  Copying() : Bare(OPENMSA_GPU) {}
  void copy_to_host(void* destination, const void* source, int64_t bytes, void* stream) const override {
    EXPECT_EQ(stream, this);
    std::memcpy(destination, source, static_cast<size_t>(bytes));
    ++copies;
  }
  mutable int copies = 0;
};

struct CheckInputs {
  CheckInputs() { set_check_inputs(true); }
  CheckInputs(const CheckInputs&) = delete;
  CheckInputs& operator=(const CheckInputs&) = delete;
  ~CheckInputs() { set_check_inputs(false); }
};

TEST(Backends, ForcedByTheEnvironment) {
  {
    const Environment forced("OPENMSA_BACKEND", "reference");
    EXPECT_STREQ(choose_backend(OPENMSA_CPU).name(), "reference");
  }
  {
    const Environment forced("OPENMSA_BACKEND", "abacus");
    const std::string message = message_of(OPENMSA_INVALID_ARGUMENT, [] { choose_backend(OPENMSA_CPU); });
    EXPECT_EQ(message.rfind("OPENMSA_BACKEND: got \"abacus\"", 0), 0U) << message;
    EXPECT_NE(message.find("reference"), std::string::npos) << message;
  }
#ifndef OPENMSA_WITH_SM90
  {
    const Environment forced("OPENMSA_BACKEND", "sm90");
    const std::string message = message_of(OPENMSA_INVALID_ARGUMENT, [] { choose_backend(OPENMSA_GPU); });
    EXPECT_NE(message.find("this build: cpu, reference"), std::string::npos) << message;
  }
#endif
  const Environment empty("OPENMSA_BACKEND", "");
  EXPECT_EQ(choose_backend(OPENMSA_CPU).device(), OPENMSA_CPU);
}

TEST(Backends, AStageThatIsLeftOutFailsByName) {
  const Bare bare(OPENMSA_CPU);
  const auto expect = [&](const char* stage, auto call) {
    EXPECT_EQ(message_of(OPENMSA_UNSUPPORTED, call), std::string(stage) + ": not supported by backend bare");
  };
  expect("select", [&] { bare.select({}); });
  expect("attend", [&] { bare.attend({}); });
  expect("backward", [&] { bare.backward({}); });
  expect("combine", [&] { bare.combine({}); });
  expect("captured_mass", [&] { bare.captured_mass({}); });
  expect("append", [&] { bare.append({}); });
  expect("check_inputs", [&] { bare.copy_to_host(nullptr, nullptr, 0, nullptr); });
  EXPECT_EQ(bare.workspace(SelectParams{}), 0);
  EXPECT_NO_THROW(bare.check(SelectParams{}));
  EXPECT_EQ(comma_separated(bare.operations()), (std::vector<std::string_view>{"select_blocks", "combine"}));
  EXPECT_TRUE(has_operation(bare, "combine"));
  EXPECT_FALSE(has_operation(bare, "select"));
  EXPECT_FALSE(has_operation(bare, ""));
}

TEST(Backends, TheCpuOnesHaveEveryOperation) {
  for (const char* operation : kOperationNames) {
    EXPECT_TRUE(has_operation(reference_backend(), operation)) << operation;
    EXPECT_TRUE(has_operation(cpu_backend(), operation)) << operation;
  }
}

TEST(Backends, CpuTensorsGoToVectorUnitsWhereThereAreSome) {
  const Backend& chosen = choose_backend(OPENMSA_CPU);
  EXPECT_STREQ(chosen.name(), cpu_backend().available() ? "cpu" : "reference");
}

TEST(CheckInputs, ReadsOffsetsOfAGpuOnlyWhenAsked) {
  const int32_t offsets_q[] = {0, 4, 3}, offsets_k[] = {0, 5, 9}, starts[] = {0, 10};
  SequenceLayout layout;
  layout.batch = 2;
  layout.tokens_q = 3;
  layout.tokens_k = 9;
  layout.cu_seqlens_q = offsets_q;
  layout.cu_seqlens_k = offsets_k;
  layout.k_starts = starts;
  Copying backend;
  EXPECT_NO_THROW(check_layout_values(backend, layout, 128, &backend));
  EXPECT_EQ(backend.copies, 0);

  const CheckInputs on;
  const auto check = [&] { check_layout_values(backend, layout, 128, &backend); };
  EXPECT_EQ(message_of(OPENMSA_INVALID_ARGUMENT, check).rfind("cu_seqlens_q: got 4 at [1]", 0), 0U);
  EXPECT_GT(backend.copies, 0);
  layout.tokens_q = 4;
  EXPECT_EQ(message_of(OPENMSA_INVALID_ARGUMENT, check).rfind("cu_seqlens_q: got 3 at [2] after 4", 0), 0U);
  const int32_t rising[] = {0, 2, 4};
  layout.cu_seqlens_q = rising;
  EXPECT_EQ(message_of(OPENMSA_INVALID_ARGUMENT, check).rfind("k_starts: got 10 at [1]", 0), 0U);
}

TEST(CheckInputs, ReadsTablesAndFactorsOfAGpu) {
  const int32_t offsets[] = {0, 1, 2}, lengths[] = {100, 65}, table[] = {3, 2, -9, 0, 4, -9};
  SequenceLayout layout;
  layout.paged = true;
  layout.batch = 2;
  layout.tokens_q = 2;
  layout.cu_seqlens_q = offsets;
  layout.seq_lens = lengths;
  layout.block_table = table;
  layout.block_table_stride = 3;
  layout.max_pages = 2;
  layout.pages = 4;
  const CheckInputs on;
  Copying backend;
  const std::string message =
      message_of(OPENMSA_INVALID_ARGUMENT, [&] { check_layout_values(backend, layout, 64, &backend); });
  EXPECT_EQ(message.rfind("block_table: got page 4 at [1, 1]", 0), 0U) << message;
  layout.pages = 5;
  EXPECT_NO_THROW(check_layout_values(backend, layout, 64, &backend));

  const float factor = -1;
  const CacheScale scale{1.0, &factor};
  const auto check = [&] { check_cache_scale_values(backend, "v_scale", scale, &backend); };
  EXPECT_EQ(message_of(OPENMSA_INVALID_ARGUMENT, check).rfind("v_scale: got -1", 0), 0U);
}

TEST(Settings, WorkspaceLimit) {
  EXPECT_EQ(workspace_limit(), int64_t{1} << 30);
  set_workspace_limit(5);
  EXPECT_EQ(openmsa_workspace_limit(), 5);
  for (int64_t wrong : {int64_t{0}, int64_t{-1}}) {
    EXPECT_EQ(message_of(OPENMSA_INVALID_ARGUMENT, [&] { set_workspace_limit(wrong); }).rfind("workspace_limit:", 0),
              0U);
    EXPECT_EQ(openmsa_set_workspace_limit(wrong), OPENMSA_INVALID_ARGUMENT);
  }
  EXPECT_EQ(workspace_limit(), 5);
  set_workspace_limit(int64_t{1} << 30);
}

TEST(Settings, CheckInputsIsOffAtFirst) {
  EXPECT_FALSE(check_inputs());
  openmsa_set_check_inputs(7);
  EXPECT_EQ(openmsa_check_inputs(), 1);
  openmsa_set_check_inputs(0);
  EXPECT_FALSE(check_inputs());
}

TEST(Info, IsJsonThatNamesWhatThereIs) {
  const nlohmann::json info = nlohmann::json::parse(openmsa::info());
  EXPECT_EQ(info["version"], openmsa_version());
  bool found = false;
  for (const nlohmann::json& backend : info["backends"]) {
    EXPECT_TRUE(backend["available"].is_boolean());
    const bool has_target = backend["name"] == "cpu" && backend["available"] == true;
    EXPECT_EQ(backend.contains("target"), has_target);
    if (has_target) {
      const std::set<std::string> targets = {"avx2", "avx512", "neon"};
      EXPECT_TRUE(targets.contains(backend["target"])) << backend["target"];
    }
    if (backend["name"] != "reference") continue;
    found = true;
    EXPECT_EQ(backend["device"], "cpu");
    EXPECT_EQ(backend["available"], true);
    EXPECT_EQ(backend["operations"], nlohmann::json(kOperationNames));
    EXPECT_EQ(backend["block_sizes"], "32, 64, 128");
    EXPECT_EQ(backend["types"].size(), 4U);
  }
  EXPECT_TRUE(found);
  EXPECT_EQ(info["devices"][0]["type"], "cpu");
  EXPECT_TRUE(info["build"]["compiler"].is_string());
  EXPECT_EQ(nlohmann::json::parse(openmsa_info()), info);
}

TEST(CInterface, ReturnsTheStatusAndKeepsTheMessagePerThread) {
  for (const char* operation : kOperationNames) {
    SCOPED_TRACE(operation);
    EXPECT_EQ(make_call(operation)->run_c(), OPENMSA_OK) << openmsa_last_error();
    const auto call = make_call(operation);
    call->tensors.front().view.rank = 1;
    EXPECT_EQ(call->run_c(), OPENMSA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(openmsa_last_error()).rfind(call->tensors.front().name + ": got rank 1", 0), 0U);
  }
  std::thread([] { EXPECT_STREQ(openmsa_last_error(), ""); }).join();
}

TEST(CInterface, MissingArguments) {
  EXPECT_EQ(openmsa_combine(nullptr), OPENMSA_INVALID_ARGUMENT);
  EXPECT_STREQ(openmsa_last_error(), "args: missing (null)");
  int64_t bytes = 7;
  EXPECT_EQ(openmsa_workspace_size(OPENMSA_COMBINE, nullptr, &bytes), OPENMSA_INVALID_ARGUMENT);
  const openmsa_combine_args args{};
  EXPECT_EQ(openmsa_workspace_size(OPENMSA_COMBINE, &args, nullptr), OPENMSA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(openmsa_last_error()).rfind("bytes:", 0), 0U);
  EXPECT_EQ(openmsa_workspace_size(static_cast<openmsa_operation>(15), &args, &bytes), OPENMSA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(openmsa_last_error()).rfind("operation: got 15", 0), 0U);
  EXPECT_EQ(bytes, 7);
}

TEST(Version, IsThatOfTheHeader) {
  const std::string expected = std::to_string(OPENMSA_VERSION_MAJOR) + "." + std::to_string(OPENMSA_VERSION_MINOR) +
                               "." + std::to_string(OPENMSA_VERSION_PATCH);
  EXPECT_EQ(openmsa_version(), expected);
  EXPECT_EQ(expected, OPENMSA_PROJECT_VERSION);
}

// The public headers know neither frameworks nor GPU toolkits, comments included.
TEST(PublicHeaders, NameNoFramework) {
  const std::array<std::string, 11> forbidden = {"cuda",       "nvidia", "hopper", "torch", "numpy",  "python",
                                                 "tensorflow", "jax",    "dlpack", "tvm",   "cutlass"};
  const std::set<std::string> allowed_includes = {"<stdint.h>",  "<cstdint>", "<initializer_list>",
                                                  "<stdexcept>", "<string>",  "\"openmsa/openmsa.h\""};
  int headers = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(OPENMSA_INCLUDE_DIR)) {
    if (!entry.is_regular_file()) continue;
    ++headers;
    std::ifstream file(entry.path());
    for (std::string line; std::getline(file, line);) {
      std::string lower = line;
      for (char& character : lower) character = static_cast<char>(std::tolower(static_cast<unsigned char>(character)));
      for (const std::string& word : forbidden) {
        EXPECT_EQ(lower.find(word), std::string::npos) << entry.path() << ": " << line;
      }
      if (line.rfind("#include ", 0) != 0) continue;
      EXPECT_TRUE(allowed_includes.count(line.substr(9)) != 0) << line;
    }
  }
  EXPECT_GE(headers, 2);
}

}  // namespace
}  // namespace openmsa::tests
