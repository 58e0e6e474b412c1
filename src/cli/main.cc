// The openmsa command: arguments, help, and the one place where failures become a line and an exit code.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <new>

#include "cli/commands.h"
#include "cli/errors.h"
#include "cli/interrupt.h"
#include "openmsa/openmsa.hpp"

namespace openmsa::cli {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// Checks of arguments, with messages that say what came and what is supported.
CLI::Validator integer(int64_t least, int64_t most = kMost) {
  const std::string expected =
      most == kMost ? fmt::format("an integer >= {}", least) : fmt::format("an integer from {} to {}", least, most);
  const auto check = [=](const std::string& text) {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool valid = error == std::errc() && end == text.data() + text.size() && value >= least && value <= most;
    return valid ? "" : fmt::format("got {}, expected {}", printable(text), expected);
  };
  return CLI::Validator(check, "");
}

CLI::Validator positive_number() {
  const auto check = [](const std::string& text) {
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool valid = error == std::errc() && end == text.data() + text.size() && std::isfinite(value) && value > 0;
    return valid ? "" : fmt::format("got {}, expected a finite number > 0", printable(text));
  };
  return CLI::Validator(check, "");
}

CLI::Validator one_of(std::vector<std::string> names) {
  const auto check = [names = std::move(names)](const std::string& text) {
    const bool valid = std::find(names.begin(), names.end(), text) != names.end();
    return valid ? "" : fmt::format("got {}, expected one of {}", printable(text), fmt::join(names, ", "));
  };
  return CLI::Validator(check, "");
}

struct Options {
  InfoOptions info;
  VerifyOptions verify;
  BenchOptions bench;
  AttendOptions attend;
};

constexpr const char* kBackendHelp = "Backend that runs it: see 'openmsa info'";

// Of the commands that select blocks.
template <typename SelectionOptions>
void add_blocks(CLI::App& command, SelectionOptions& options) {
  command.add_option("--topk", options.topk, "Blocks that each query selects")
      ->check(integer(1))
      ->capture_default_str();
  command.add_option("--block-size", options.block_size, "Tokens of a block: 128, 64, or 32 on the CPU")
      ->check(one_of({"32", "64", "128"}))
      ->capture_default_str();
}

void add_info(CLI::App& app, InfoOptions& options) {
  CLI::App* command = app.add_subcommand("info", "What this build holds and this machine offers");
  command->add_flag("--json", options.json, "Print JSON");
}

void add_verify(CLI::App& app, VerifyOptions& options) {
  CLI::App* command = app.add_subcommand("verify", "Compare this machine's backends with the float64 reference");
  command->footer(
      "Runs every operation on problems of 1 to 2049 keys, in each type that a backend takes, and prints the errors\n"
      "beside the limits of docs/definition.md. Exit code 1 when one is beyond its limit.");
  command->add_option("--backend", options.backend, "The backend to verify; without it all that can run here");
  command->add_flag("--full,!--quick", options.full, "More types, shapes and lengths: minutes instead of seconds");
  command->add_flag("--json", options.json, "Print JSON, with every result of every case");
}

void add_bench(CLI::App& app, BenchOptions& options) {
  CLI::App* command = app.add_subcommand("bench", "Time MSA attention beside dense attention");
  command->footer(
      "One causal sequence of random tensors, forward. 'sparse' is the whole of msa_attention without the KL, "
      "'select'\n"
      "and 'attend' are its two parts by themselves. 'dense' sends every visible block through the same attend "
      "kernels.\n"
      "Example: openmsa bench --tokens 8192,32768 --csv times.csv");
  command->add_option("--tokens", options.tokens, "Context lengths, separated by commas")
      ->delimiter(',')
      ->check(integer(1, int64_t{1} << 40))
      ->capture_default_str();
  command->add_option("--backend", options.backend, kBackendHelp);
  command->add_option("--dtype", options.dtype, "Type of all tensors: fp32, bf16 or fp16")
      ->check(one_of({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command->add_option("--heads", options.heads, "Query heads")->check(integer(1, 65536))->capture_default_str();
  command->add_option("--kv-heads", options.kv_heads, "Key/value heads; divides the index heads")
      ->check(integer(1, 65536))
      ->capture_default_str();
  command->add_option("--index-heads", options.index_heads, "Index heads; divides the query heads")
      ->check(integer(1, 65536))
      ->capture_default_str();
  command->add_option("--head-dim", options.head_dim, "Head dimension of q, k and v")
      ->check(integer(1, 65536))
      ->capture_default_str();
  command->add_option("--index-dim", options.index_dim, "Head dimension of the index branch")
      ->check(integer(1, 65536))
      ->capture_default_str();
  add_blocks(*command, options);
  command->add_option("--seconds", options.seconds, "Shortest time to spend on each measurement")
      ->check(positive_number())
      ->capture_default_str();
  command->add_option("--csv", options.csv, "Also write the rows to this file");
}

void add_attend(CLI::App& app, AttendOptions& options) {
  CLI::App* command = app.add_subcommand("attend", "MSA attention over the tensors of a safetensors file");
  command->footer(
      "Reads q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], index_q [Tq, Hi, Di], index_k [Tk, Hik, Di] and, for "
      "packed\n"
      "sequences, cu_seqlens_q and cu_seqlens_k [B + 1] (k_starts [B] too). Types: F32, F16, BF16; index tensors also\n"
      "F8_E4M3; offsets I32. Writes out [Tq, Hq, Dv], lse [Hq, Tq], indices [Hi, Tq, topk], index_lse [Hi, Tq], and "
      "what\n"
      "was used as the file's metadata. The output appears whole or not at all.");
  command->add_option("--input", options.input, "The file to read")->required();
  command->add_option("--output", options.output, "The file to write; one that is there is replaced")->required();
  add_blocks(*command, options);
  command->add_option("--init-blocks", options.init_blocks, "First blocks that are always selected")
      ->check(integer(0))
      ->capture_default_str();
  command->add_option("--local-blocks", options.local_blocks, "Blocks up to the query's own that are always selected")
      ->check(integer(0))
      ->capture_default_str();
  command->add_option("--scale", options.scale, "Scale of the attention scores; 1/sqrt(D) without it")
      ->check(positive_number());
  command->add_option("--index-scale", options.index_scale, "Scale of the index scores; 1/sqrt(Di) without it")
      ->check(positive_number());
  command->add_option("--backend", options.backend, kBackendHelp)->capture_default_str();
}

int report(const std::string& where, const char* what) {
  // One line, whatever a message holds.
  std::string line = what;
  std::replace(line.begin(), line.end(), '\n', ' ');
  (void)std::fputs(fmt::format("{}: {}\n", where, line).c_str(), stderr);
  return kBadInput;
}

int run(int argc, const char* const* argv) {
  Options options;
  int32_t threads = 0;
  CLI::App app("MiniMax Sparse Attention: what this build can do, whether it does it right here, and how fast.",
               "openmsa");
  app.set_version_flag("--version", fmt::format("openmsa {}", ::openmsa_version()));
  app.footer("'openmsa COMMAND --help' tells more. Exit codes: 0 done, 1 a check failed, 2 wrong usage or input.");
  app.require_subcommand(0, 1);
  app.fallthrough();
  app.add_option("--threads", threads,
                 "Most threads of CPU calls; without it as OMP_NUM_THREADS says, or all processors")
      ->check(integer(1, 1024));
  add_info(app, options.info);
  add_verify(app, options.verify);
  add_bench(app, options.bench);
  add_attend(app, options.attend);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& request) {  // --help, --version
    return app.exit(request);
  } catch (const CLI::ParseError& error) {
    const auto used = app.get_subcommands();
    return report(used.empty() ? "openmsa" : "openmsa " + used.front()->get_name(), error.what());
  }
  const auto used = app.get_subcommands();
  if (used.empty()) return report("openmsa", "expected one of info, verify, bench, attend; --help tells more");
  const std::string name = used.front()->get_name();
  try {
    set_num_threads(threads);
    if (name == "info") return run_info(options.info);
    if (name == "verify") return run_verify(options.verify);
    if (name == "bench") return run_bench(options.bench);
    return run_attend(options.attend);
  } catch (const std::bad_alloc&) {
    return report("openmsa " + name, "memory ran out");
  } catch (const std::exception& error) {
    return report("openmsa " + name, error.what());
  }
}

}  // namespace
}  // namespace openmsa::cli

int main(int argc, char** argv) {
  using openmsa::cli::report;
  try {
    openmsa::cli::handle_interrupts();
    const int code = openmsa::cli::run(argc, argv);
    // A table that did not get out is no success.
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      return report("openmsa", fmt::format("the output cannot be written: {}", std::strerror(errno)).c_str());
    }
    return code;
  } catch (const std::exception& error) {
    return report("openmsa", error.what());
  }
}
