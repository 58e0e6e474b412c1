// openmsa verify: every operation of this machine's backends beside the float64 reference.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "api/dtype.h"
#include "cli/backends.h"
#include "cli/commands.h"
#include "cli/errors.h"
#include "cli/progress.h"
#include "cli/type_names.h"
#include "cli/verify_compare.h"

namespace openmsa::cli {
namespace {

struct Types {
  int32_t main, index;
};
constexpr Types kFp32{OPENMSA_FLOAT32, OPENMSA_FLOAT32}, kBf16{OPENMSA_BFLOAT16, OPENMSA_BFLOAT16},
    kFp16{OPENMSA_FLOAT16, OPENMSA_FLOAT16}, kBf16Fp8{OPENMSA_BFLOAT16, OPENMSA_FLOAT8_E4M3};

struct Group {
  VerifyShape shape;
  std::vector<Types> types;
  bool paged = false;
};

// Lengths around a block of 128, packed sequences, and one long enough for selection to matter.
std::vector<Group> groups(bool full) {
  const std::vector<Types> all{kFp32, kBf16, kFp16, kBf16Fp8};
  std::vector<Group> result{
      {{.name = "1", .queries = {1, 1}, .keys = {1, 300}, .topk = 2}, full ? all : std::vector{kFp32, kBf16}},
      {{.name = "127", .queries = {127}, .keys = {127}}, full ? all : std::vector{kBf16}},
      {{.name = "128", .queries = {128}, .keys = {128}}, full ? all : std::vector{kBf16}},
      {{.name = "129", .queries = {129}, .keys = {129}}, all},
      {{.name = "packed",
        .queries = {5, 0, 64, 200},
        .keys = {133, 70, 64, 200},
        .block_size = 64,
        .topk = 2,
        .init_blocks = 1},
       all},
      {{.name = "2049", .queries = {2049}, .keys = {2049}, .heads_q = 2, .heads_kv = 1, .heads_index = 1},
       full ? all : std::vector{kFp32, kBf16}},
      {{.name = "decode", .queries = {1, 4, 17, 0}, .keys = {129, 2049, 300, 60}}, all, true},
      {{.name = "129", .queries = {129}, .keys = {129}}, full ? all : std::vector{kBf16, kBf16Fp8}, true},
  };
  if (!full) return result;
  const std::vector<Types> some{kFp32, kBf16};
  result.insert(
      result.end(),
      {
          {{.name = "M3 heads",
            .queries = {1025},
            .keys = {1025},
            .heads_q = 16,
            .heads_kv = 1,
            .heads_index = 1,
            .dim = 128},
           all},
          {{.name = "block 32", .queries = {700}, .keys = {700}, .block_size = 32, .topk = 16, .local_blocks = 2},
           some},
          {{.name = "long queries", .queries = {300, 40}, .keys = {100, 2049}, .topk = 8, .local_blocks = 0}, some},
          {{.name = "M3 heads",
            .queries = {1, 40},
            .keys = {4097, 1025},
            .heads_q = 64,
            .heads_kv = 4,
            .heads_index = 4,
            .dim = 128,
            .topk = 16},
           all,
           true},
      });
  return result;
}

// Names of a table's row; what stands before a space is the operation of openmsa.h.
constexpr std::array kContiguous{"select_blocks",
                                 "sparse_attention",
                                 "sparse_attention_backward",
                                 "msa_attention",
                                 "msa_attention_backward",
                                 "msa_attention warm-up",
                                 "msa_attention_backward warm-up",
                                 "captured_mass",
                                 "combine"};
constexpr std::array kPaged{"paged_select_blocks", "paged_sparse_attention",  "paged_sparse_attention fp8",
                            "paged_msa_attention", "paged_msa_attention fp8", "paged_append",
                            "paged_append fp8"};

std::string api_name(const std::string& operation) { return operation.substr(0, operation.find(' ')); }

bool uses_main(const std::string& operation) { return operation.find("select") == std::string::npos; }
bool uses_index(const std::string& operation) {
  return operation.find("select") != std::string::npos || operation.find("msa") != std::string::npos ||
         operation.starts_with("paged_append");
}

bool can_run(const BackendInfo& backend, const std::string& operation, const VerifyShape& shape, Types types) {
  const std::string sizes = ", " + backend.block_sizes + ",";
  return backend.has(api_name(operation)) && (!uses_main(operation) || backend.takes(types.main)) &&
         (!uses_index(operation) || backend.takes(types.index)) &&
         (!operation.ends_with("fp8") || backend.takes(OPENMSA_FLOAT8_E4M3)) &&
         sizes.find(fmt::format(", {},", shape.block_size)) != std::string::npos;
}

// The reference's results of one problem, computed as they are asked for.
class Expected {
 public:
  Expected(const BackendInfo& reference, const VerifyInputs& inputs) : reference_(reference), inputs_(inputs) {}

  const Results& results(const std::string& operation) {
    const auto found = results_.find(operation);
    if (found != results_.end()) return found->second;
    const Results before = earlier(operation);
    use_backend(reference_);
    return results_[operation] = run_operation(operation, inputs_, before);
  }

  // What an operation takes from others: a selection, and of its forward pass all.
  Results earlier(const std::string& operation) {
    const std::string paged = operation.starts_with("paged") ? "paged_" : "";
    Results before;
    const bool sparse = operation.find("sparse_attention") != std::string::npos;
    if (sparse || operation == "captured_mass") before = results(paged + "select_blocks");
    if (const size_t at = operation.find("_backward"); at != std::string::npos) {
      std::string forward = operation;
      const Results& more = results(forward.erase(at, std::string("_backward").size()));
      before.insert(before.end(), more.begin(), more.end());
    }
    return before;
  }

 private:
  const BackendInfo& reference_;
  const VerifyInputs& inputs_;
  std::map<std::string, Results> results_;
};

class Report {
 public:
  explicit Report(bool json) : json_(json) {
    print(fmt::format("{:<9} {:<31} {:<9} {:<12} {:<10} {:>9} {:>9}", "backend", "operation", "types", "tokens",
                      "worst", "error", "limit"));
  }

  void working_on(const std::string& text) { progress_.say(text); }

  void add(const BackendInfo& backend, const std::string& operation, const VerifyShape& shape, Types types,
           const std::vector<Comparison>& comparisons, const std::string& message) {
    const bool passed = message.empty() && std::all_of(comparisons.begin(), comparisons.end(),
                                                       [](const Comparison& c) { return c.passed(); });
    (passed ? passed_ : failed_) += 1;
    nlohmann::ordered_json row{{"backend", backend.name},
                               {"operation", operation},
                               {"tokens", shape.name},
                               {"dtype", dtype_name(types.main)},
                               {"index_dtype", dtype_name(types.index)},
                               {"passed", passed}};
    if (!message.empty()) row["message"] = message;
    for (const Comparison& c : comparisons) {
      row["results"].push_back({{"name", c.result},
                                {"error", std::isfinite(c.error) ? nlohmann::ordered_json(c.error) : nullptr},
                                {"limit", c.limit},
                                {"passed", c.passed()}});
    }
    rows_.push_back(std::move(row));

    std::string line =
        fmt::format("{:<9} {:<31} {:<9} {:<12} ", backend.name, operation,
                    fmt::format("{}{}", short_type_name(types.main),
                                types.index == types.main ? "" : fmt::format("/{}", short_type_name(types.index))),
                    shape.name);
    if (!message.empty()) {
      line += "FAILED: " + message;
    } else {
      const Comparison& worst =
          *std::max_element(comparisons.begin(), comparisons.end(),
                            [](const Comparison& a, const Comparison& b) { return share(a) < share(b); });
      line +=
          fmt::format("{:<10} {:>9.1e} {:>9.1e}{}", worst.result, worst.error, worst.limit, passed ? "" : "  FAILED");
    }
    print(line);
  }

  int finish() {
    const bool passed = failed_ == 0 && passed_ > 0;
    if (json_) {
      const nlohmann::ordered_json all{{"passed", passed}, {"cases", std::move(rows_)}};
      progress_.print(all.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
    } else {
      progress_.print(fmt::format("{} cases within the limits, {} beyond", passed_, failed_));
    }
    return passed ? kSuccess : kCheckFailed;
  }

 private:
  static double share(const Comparison& c) { return c.error == 0 ? 0 : c.limit == 0 ? HUGE_VAL : c.error / c.limit; }
  void print(const std::string& line) {
    if (!json_) progress_.print(line);
  }

  Progress progress_;
  bool json_;
  int64_t passed_ = 0, failed_ = 0;
  nlohmann::ordered_json rows_ = nlohmann::ordered_json::array();
};

void verify_operation(const BackendInfo& backend, const std::string& operation, const VerifyInputs& inputs,
                      IndexVectors vectors, Expected& expected, Report& report) {
  const Types types{inputs.dtype, inputs.index_dtype};
  report.working_on(
      fmt::format("{} of {} tokens, {} on {}", operation, inputs.shape.name, dtype_name(types.main), backend.name));
  const Results& want = expected.results(operation);
  const Results earlier = expected.earlier(operation);
  std::vector<Comparison> comparisons;
  std::string message;
  try {
    use_backend(backend);
    comparisons =
        compare(operation, inputs, vectors, run_operation(operation, inputs.on(device_of(backend)), earlier), want);
  } catch (const Error& error) {
    message = error.what();
  }
  report.add(backend, operation, inputs.shape, types, comparisons, message);
}

}  // namespace

int run_verify(const VerifyOptions& options) {
  std::vector<BackendInfo> chosen;
  if (!options.backend.empty()) {
    chosen.push_back(choose_backend(options.backend, {}));
  } else {
    for (const BackendInfo& backend : backend_infos()) {
      if (backend.available && backend.name != "reference") chosen.push_back(backend);
    }
  }
  const BackendInfo reference = choose_backend("reference", {});
  if (chosen.empty()) fail_input("this machine can run no backend but the reference itself");

  Report report(options.json);
  for (const Group& group : groups(options.full)) {
    for (const Types types : group.types) {
      const VerifyInputs integers(group.shape, types.main, types.index, IndexVectors::integers);
      const VerifyInputs real(group.shape, types.main, types.index, IndexVectors::real);
      Expected exact(reference, integers), with_margin(reference, real);
      const auto operations = group.paged ? std::vector<std::string>(kPaged.begin(), kPaged.end())
                                          : std::vector<std::string>(kContiguous.begin(), kContiguous.end());
      for (const std::string& operation : operations) {
        // A float8 index branch changes nothing of what does not read it.
        if (types.index != types.main && !uses_index(operation)) continue;
        for (const BackendInfo& backend : chosen) {
          if (!can_run(backend, operation, group.shape, types)) continue;
          const bool select = operation.ends_with("select_blocks");
          verify_operation(backend, operation, select ? real : integers,
                           select ? IndexVectors::real : IndexVectors::integers, select ? with_margin : exact, report);
        }
      }
    }
  }
  return report.finish();
}

}  // namespace openmsa::cli
