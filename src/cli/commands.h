// The commands, each with its options as plain values. They return an ExitCode, and throw InputError or openmsa::Error.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace openmsa::cli {

struct InfoOptions {
  bool json = false;
};
int run_info(const InfoOptions& options);

struct VerifyOptions {
  std::string backend;  // empty: every one that this machine can run, the reference excepted
  bool full = false;
  bool json = false;
};
int run_verify(const VerifyOptions& options);

struct BenchOptions {
  std::vector<int64_t> tokens{4096, 16384};
  std::string backend;  // empty: the first one of this machine that has the operations
  std::string dtype = "bf16";
  int64_t heads = 16, kv_heads = 1, index_heads = 1, head_dim = 128, index_dim = 128;
  int64_t topk = 16, block_size = 128;
  double seconds = 2;  // of each measurement, at least
  std::string csv;     // empty: none
};
int run_bench(const BenchOptions& options);

struct AttendOptions {
  std::string input, output;
  std::string backend = "cpu";
  int64_t topk = 16, block_size = 128, init_blocks = 0, local_blocks = 1;
  std::optional<double> scale, index_scale;
};
int run_attend(const AttendOptions& options);

}  // namespace openmsa::cli
