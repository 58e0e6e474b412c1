// openmsa bench: dense attention beside MSA, and MSA's two parts, in one table.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <limits>

#include "cli/backends.h"
#include "cli/build_info.h"
#include "cli/commands.h"
#include "cli/errors.h"
#include "cli/output_file.h"
#include "cli/progress.h"
#include "cli/random.h"
#include "cli/type_names.h"
#include "host/threads.h"

namespace openmsa::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Shapes of one context length.
struct Shapes {
  Shapes(const BenchOptions& options, int64_t tokens)
      : q{tokens, options.heads, options.head_dim},
        k{tokens, options.kv_heads, options.head_dim},
        index_q{tokens, options.index_heads, options.index_dim},
        index_k{tokens, 1, options.index_dim},
        lse{options.heads, tokens},
        indices{options.index_heads, tokens, options.topk} {}

  // Of everything that a run holds at once.
  int64_t bytes(int32_t dtype) const {
    int64_t sum = 0;
    const auto add = [&](const char* name, int32_t type, const Shape& shape) {
      if (__builtin_add_overflow(sum, bytes_of(name, type, shape), &sum)) {
        fail_input("--tokens: 64 bits cannot count the bytes of all tensors");
      }
    };
    for (const char* name : {"q", "out"}) add(name, dtype, q);
    for (const char* name : {"k", "v"}) add(name, dtype, k);
    add("index_q", dtype, index_q);
    add("index_k", dtype, index_k);
    for (int i = 0; i < 2; ++i) {
      add("lse", OPENMSA_FLOAT32, lse);
      add("indices", OPENMSA_INT32, indices);
    }
    return sum;
  }

  Shape q, k, index_q, index_k, lse, indices;
};

struct Times {
  double median_ms = 0;
  int64_t repeats = 0;
};

// The median of samples, after one run that warms up. A run that takes very long is its own sample.
template <typename Call>
Times measure(Device& device, double seconds, const Call& call) {
  constexpr double kLong = 10, kShortestSample = 0.005, kManySamples = 200;
  const auto sample = [&](int64_t calls) {
    const auto start = Clock::now();
    for (int64_t i = 0; i < calls; ++i) call();
    device.synchronize();
    return seconds_since(start) / static_cast<double>(calls);
  };
  std::vector<double> samples;
  const double first = sample(1);
  if (first > kLong) samples.push_back(first);
  // Short calls are timed together, so that the clock and the wait for the device weigh little.
  const auto calls = static_cast<int64_t>(std::clamp(kShortestSample / std::max(first, 1e-9), 1.0, 1000.0));
  const auto start = Clock::now();
  const auto done = [&] {
    const double spent = seconds_since(start);
    return samples.size() >= kManySamples || (samples.size() >= 3 && spent >= seconds) ||
           (!samples.empty() && spent >= std::max(kLong, seconds));
  };
  while (samples.empty() || (first <= kLong && !done())) samples.push_back(sample(calls));
  std::sort(samples.begin(), samples.end());
  const size_t middle = samples.size() / 2;
  const double median = samples.size() % 2 == 1 ? samples[middle] : (samples[middle - 1] + samples[middle]) / 2;
  return {median * 1e3, static_cast<int64_t>(samples.size())};
}

struct Row {
  int64_t tokens = 0;
  Times dense, sparse, select, attend;
};

// The calls of one context length over the same tensors.
class Run {
 public:
  Run(const BenchOptions& options, Device& device, int32_t dtype, int64_t tokens) : device_(device) {
    const Shapes shapes(options, tokens);
    const auto input = [&](const Shape& shape, uint64_t seed) {
      const Array host = random_array(dtype, shape, seed);
      return &device == &host_device() ? host : copy_to(device, host);
    };
    q_ = input(shapes.q, 1), k_ = input(shapes.k, 2), v_ = input(shapes.k, 3);
    index_q_ = input(shapes.index_q, 4), index_k_ = input(shapes.index_k, 5);
    out_ = make_array(device, dtype, shapes.q);
    lse_ = make_array(device, OPENMSA_FLOAT32, shapes.lse),
    attend_lse_ = make_array(device, OPENMSA_FLOAT32, shapes.lse);
    indices_ = make_array(device, OPENMSA_INT32, shapes.indices);
    selected_ = make_array(device, OPENMSA_INT32, shapes.indices);

    for (MsaAttentionArgs* args : {&dense_, &sparse_}) {
      args->q = q_.pointer(), args->k = k_.pointer(), args->v = v_.pointer();
      args->index_q = index_q_.pointer(), args->index_k = index_k_.pointer();
      args->selection.topk = options.topk;
      args->block_size = options.block_size;
      args->execution.stream = device.stream();
      args->out = out_.pointer(), args->lse = lse_.pointer();
    }
    dense_.warmup = 1;
    sparse_.indices = indices_.pointer();
    select_.index_q = index_q_.pointer(), select_.index_k = index_k_.pointer();
    select_.selection.topk = options.topk;
    select_.indices = selected_.pointer();
    attend_.q = q_.pointer(), attend_.k = k_.pointer(), attend_.v = v_.pointer();
    attend_.indices = selected_.pointer();
    attend_.out = out_.pointer(), attend_.lse = attend_lse_.pointer();
    select_.block_size = attend_.block_size = options.block_size;
    select_.execution.stream = attend_.execution.stream = device.stream();
  }
  Run(const Run&) = delete;  // the arguments point at the members
  Run& operator=(const Run&) = delete;

  int64_t workspace_bytes() const {
    return std::max(
        {workspace_size(dense_), workspace_size(sparse_), workspace_size(select_), workspace_size(attend_)});
  }

  void dense() { msa_attention(dense_); }
  void sparse() { msa_attention(sparse_); }
  void select() { select_blocks(select_); }
  void attend() { sparse_attention(attend_); }

  // The parts did what the whole did: the same selection, and the same log-sum-exps, none of them NaN.
  bool consistent() const {
    const Array whole = copy_to(host_device(), indices_), parts = copy_to(host_device(), selected_);
    const Array lse = copy_to(host_device(), lse_), attend_lse = copy_to(host_device(), attend_lse_);
    const bool finite =
        std::all_of(lse.data<float>(), lse.data<float>() + lse.elements(), [](float x) { return std::isfinite(x); });
    return finite && std::memcmp(whole.tensor.data, parts.tensor.data, static_cast<size_t>(whole.bytes())) == 0 &&
           std::memcmp(lse.tensor.data, attend_lse.tensor.data, static_cast<size_t>(lse.bytes())) == 0;
  }

 private:
  Device& device_;
  Array q_, k_, v_, index_q_, index_k_, out_, lse_, attend_lse_, indices_, selected_;
  MsaAttentionArgs dense_, sparse_;
  SelectBlocksArgs select_;
  SparseAttentionArgs attend_;
};

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02}", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday);
}

constexpr const char* kCsvHeader =
    "tokens,dense_ms,sparse_ms,select_ms,attend_ms,dense_over_sparse,dense_repeats,sparse_repeats,backend,target,"
    "threads,"
    "dtype,heads,kv_heads,index_heads,head_dim,index_dim,block_size,topk,version,commit,date\n";

std::string csv_line(const Row& row, const BenchOptions& options, const BackendInfo& backend) {
  return fmt::format("{},{:.5g},{:.5g},{:.5g},{:.5g},{:.4g},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}{},{}\n",
                     row.tokens, row.dense.median_ms, row.sparse.median_ms, row.select.median_ms, row.attend.median_ms,
                     row.dense.median_ms / row.sparse.median_ms, row.dense.repeats, row.sparse.repeats, backend.name,
                     backend.target, host::usable_threads(), options.dtype, options.heads, options.kv_heads,
                     options.index_heads, options.head_dim, options.index_dim, options.block_size, options.topk,
                     ::openmsa_version(), build_info().commit, build_info().modified ? "+" : "", today());
}

std::string describe(const BenchOptions& options, const BackendInfo& backend) {
  const std::string where = backend.device == "cpu" ? fmt::format("{}{}, {} threads", backend.name,
                                                                  backend.target.empty() ? "" : " on " + backend.target,
                                                                  host::usable_threads())
                                                    : backend.name;
  return fmt::format(
      "{}; {}; heads {} query, {} KV, {} index; head dim {}, index dim {}; blocks of {}, topk {}\n"
      "One causal sequence, forward, random tensors; medians.\n"
      "dense   every visible block, through the same attend kernels\n"
      "sparse  msa_attention without the KL; select and attend are its parts, each by itself\n\n"
      "{:>9} {:>11} {:>11} {:>11} {:>11} {:>13} {:>16}",
      where, options.dtype, options.heads, options.kv_heads, options.index_heads, options.head_dim, options.index_dim,
      options.block_size, options.topk, "tokens", "dense ms", "sparse ms", "select ms", "attend ms", "dense/sparse",
      "sparse tokens/s");
}

void check_divides(const char* divisor, int64_t small, const char* multiple, int64_t large) {
  if (large % small != 0) fail_input("{}: got {}, expected a divisor of {} {}", divisor, small, multiple, large);
}

void check_memory(const BenchOptions& options, Device& device, int32_t dtype) {
  const int64_t longest = *std::max_element(options.tokens.begin(), options.tokens.end());
  const int64_t bytes = Shapes(options, longest).bytes(dtype);
  const std::string purpose = fmt::format("--tokens {}", longest);
  require_memory(device, bytes, purpose);
  // Tensors for a GPU are made on the host, one by one.
  if (&device != &host_device()) require_memory(host_device(), bytes, purpose);
}

}  // namespace

int run_bench(const BenchOptions& options) {
  const BackendInfo backend = choose_backend(options.backend, {"select_blocks", "sparse_attention", "msa_attention"});
  const int32_t dtype = dtype_of_short_name(options.dtype);
  check_divides("--index-heads", options.index_heads, "--heads", options.heads);
  check_divides("--kv-heads", options.kv_heads, "--index-heads", options.index_heads);
  Device& device = device_of(backend);
  use_backend(backend);
  check_memory(options, device, dtype);
  std::optional<OutputFile> csv;
  if (!options.csv.empty()) {
    csv.emplace(options.csv);
    csv->write(kCsvHeader);
  }

  Progress progress;
  bool consistent = true, header_printed = false;
  for (const int64_t tokens : options.tokens) {
    progress.say(fmt::format("{} tokens: making tensors", tokens));
    Run run(options, device, dtype, tokens);
    require_memory(device, run.workspace_bytes(), fmt::format("--tokens {}: the workspace", tokens));
    // After the arguments have been found right.
    if (!std::exchange(header_printed, true)) progress.print(describe(options, backend));
    const auto timed = [&](const char* what, const auto& call) {
      progress.say(fmt::format("{} tokens: {}", tokens, what));
      return measure(device, options.seconds, call);
    };
    Row row;
    row.tokens = tokens;
    row.sparse = timed("sparse", [&] { run.sparse(); });
    row.select = timed("select", [&] { run.select(); });
    row.attend = timed("attend", [&] { run.attend(); });
    const bool same = run.consistent();
    row.dense = timed("dense", [&] { run.dense(); });
    progress.print(fmt::format("{:>9} {:>11.2f} {:>11.2f} {:>11.2f} {:>11.2f} {:>12.2f}x {:>16.0f}{}", tokens,
                               row.dense.median_ms, row.sparse.median_ms, row.select.median_ms, row.attend.median_ms,
                               row.dense.median_ms / row.sparse.median_ms,
                               static_cast<double>(tokens) / row.sparse.median_ms * 1e3,
                               same ? "" : "  WRONG: select and attend differ from msa_attention"));
    consistent = consistent && same;
    if (csv) csv->write(csv_line(row, options, backend));
  }
  if (csv) csv->commit();
  return consistent ? kSuccess : kCheckFailed;
}

}  // namespace openmsa::cli
