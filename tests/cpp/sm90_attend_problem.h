// Attention over a caller's blocks for the tests of the sm90 backend, run by any backend in any memory.
#pragma once

#include "cpp/sm90_problem.h"

namespace openmsa::testing {

// Entries of a row that sees `blocks` blocks: any values, any number up to topk.
using Blocks = std::function<std::vector<int64_t>(std::mt19937_64&, int64_t blocks, int64_t topk)>;
// Distinct visible blocks, the own one among them.
std::vector<int64_t> distinct_blocks(std::mt19937_64& random, int64_t blocks, int64_t topk);
// The same, in any order among -1, repetitions, negative numbers and blocks beyond the visible ones.
std::vector<int64_t> hostile_blocks(std::mt19937_64& random, int64_t blocks, int64_t topk);

struct AttendOptions {
  DataType dtype = OPENMSA_BFLOAT16, indices_dtype = OPENMSA_INT32;
  DataType cache_dtype = OPENMSA_BFLOAT16;  // paged
  int64_t tokens_q = 300, tokens_k = 300;
  int64_t kv_heads = 1, index_heads = 2, group = 16, dim = 128, block_size = 128, topk = 4;
  double scale = 0;  // 0: 1 / sqrt(dim)
  double k_scale = 1, v_scale = 1;
  bool with_lse = true;
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_k, k_starts;  // empty: absent
  // Paged when pages > 0; then tokens_k is not used.
  int64_t pages = 0, max_pages = 0;
  std::vector<int32_t> block_table, seq_lens;
};

std::string describe(const AttendOptions& o);
// Requests of these lengths over shuffled pages, with the last `queries` tokens of each as queries.
AttendOptions in_pages(AttendOptions o, const std::vector<int32_t>& lengths, const std::vector<int32_t>& queries);

// Its inputs as host images; memory that no query sees holds NaN.
struct AttendProblem {
  explicit AttendProblem(const AttendOptions& attend_options, const Blocks& blocks = distinct_blocks,
                         const Values& values = normal, uint64_t seed = 1);

  AttendOptions options;
  HostTensor q, k, v, indices;
  HostTensor cu_seqlens_q, cu_seqlens_k, k_starts, block_table, seq_lens;
  std::vector<int64_t> out_strides, lse_strides;  // empty: row-major

  // Keys that a query sees; 0 for rows of no sequence.
  int64_t visible(int64_t query) const;
};

class PlacedAttend {
 public:
  PlacedAttend(DeviceMemory& memory, const AttendProblem& problem);
  PlacedAttend(const PlacedAttend&) = delete;
  PlacedAttend& operator=(const PlacedAttend&) = delete;

  AttendParams params() const;  // valid while this object lives
  std::vector<double> out() const;
  std::vector<double> lse() const;
  void clear_outputs();
  PlacedTensor q, k, v, indices, cu_seqlens_q, cu_seqlens_k, k_starts, block_table, seq_lens;

 private:
  AttendOptions options_;
  DeviceMemory& memory_;
  PlacedTensor out_, lse_;
};

struct Attention {
  std::vector<double> out, lse;  // [Tq, Hq, D], [Hq, Tq]
};

Attention run_attend(const Backend& backend, DeviceMemory& memory, const AttendProblem& problem);
Attention attend_on_gpu(const AttendProblem& problem);
Attention attend_on_reference(const AttendProblem& problem);
// Rows [begin, begin + rows) of every head.
Attention rows_of(const Attention& all, const AttendOptions& o, int64_t begin, int64_t rows);

// NaN and infinities in the same places; every row within the contract's tolerance of its own norm, twice over.
void expect_close(const Attention& got, const Attention& want, const AttendOptions& o, const std::string& what);
void expect_same_bits(const Attention& got, const Attention& want, const std::string& what);
void expect_gpu_attends_as_reference(const AttendProblem& problem, const std::string& what);

}  // namespace openmsa::testing
