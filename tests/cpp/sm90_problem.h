// Selections for the tests of the sm90 backend, run by any backend in any memory.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "api/stages.h"
#include "cpp/case_memory.h"

namespace openmsa::testing {

// True when this machine can run the backend; tests that need it call SKIP_WITHOUT_GPU().
bool gpu_present();
#define SKIP_WITHOUT_GPU() \
  if (!gpu_present()) GTEST_SKIP() << "no GPU of compute capability 9.x"

using cases::DeviceMemory;
using cases::HostTensor;
using cases::PlacedTensor;

struct Options {
  DataType dtype = OPENMSA_BFLOAT16;
  int64_t tokens_q = 300, tokens_k = 300;
  int64_t index_heads = 4, index_key_heads = 1, dim = 128, block_size = 128;
  int64_t topk = 16, init_blocks = 0, local_blocks = 1;
  DataType indices_dtype = OPENMSA_INT32;
  std::vector<int64_t> indices_strides, lse_strides;  // in elements; empty: row-major
  bool with_lse = true;
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_k, k_starts;  // empty: absent
  // Paged when pages > 0; then tokens_k is not used.
  int64_t pages = 0, max_pages = 0;
  std::vector<int32_t> block_table, seq_lens;
};

using Values = std::function<float(std::mt19937_64&)>;
float small_integer(std::mt19937_64& random);  // -2 to 2: every score is exact, and many are equal
float normal(std::mt19937_64& random);
float one(std::mt19937_64& random);

// A selection's inputs as host images.
struct SelectProblem {
  explicit SelectProblem(const Options& problem_options, const Values& values = small_integer, uint64_t seed = 1);

  Options options;
  HostTensor index_q, index_k;  // index_k [Tk, Hik, Di] or [pages, block, Hik, Di]
  HostTensor cu_seqlens_q, cu_seqlens_k, k_starts, block_table, seq_lens;
};

void set_element(HostTensor& tensor, float value, int64_t i0, int64_t i1, int64_t i2, int64_t i3 = 0);
HostTensor int32_tensor(const std::vector<int32_t>& values);  // absent when empty

// Its tensors in a device's memory, and the parameters that point to them.
class PlacedProblem {
 public:
  PlacedProblem(DeviceMemory& memory, const SelectProblem& problem);
  PlacedProblem(const PlacedProblem&) = delete;
  PlacedProblem& operator=(const PlacedProblem&) = delete;

  SelectParams params() const;  // valid while this object lives
  std::vector<int64_t> indices() const;
  std::vector<float> index_lse() const;
  void clear_outputs();  // so that a call that writes nothing shows
  PlacedTensor index_q, index_k, cu_seqlens_q, cu_seqlens_k, k_starts, block_table, seq_lens;

 private:
  Options options_;
  DeviceMemory& memory_;
  PlacedTensor indices_, index_lse_;
};

struct Selection {
  std::vector<int64_t> indices;  // [Hi, Tq, topk]
  std::vector<float> index_lse;  // [Hi, Tq], or empty
};

// Workspace on a device, the same memory for every call of the program: a call finds what earlier ones left, and
// nothing outside the bytes that it declared may change.
class GuardedWorkspace {
 public:
  GuardedWorkspace(DeviceMemory& memory, int64_t bytes);
  GuardedWorkspace(const GuardedWorkspace&) = delete;
  GuardedWorkspace& operator=(const GuardedWorkspace&) = delete;

  void* data() const { return data_; }  // null for 0 bytes
  void expect_guards_as_they_were() const;

 private:
  DeviceMemory& memory_;
  int64_t bytes_;
  unsigned char* data_ = nullptr;
};

// Checks, runs, fetches (which checks that nothing outside the outputs and the workspace was written).
Selection run_select(const Backend& backend, DeviceMemory& memory, const SelectProblem& problem);
Selection run_on_gpu(const SelectProblem& problem);
Selection run_on_reference(const SelectProblem& problem);
// Rows [begin, begin + rows) of a selection.
Selection rows_of(const Selection& all, const Options& o, int64_t begin, int64_t rows);

// Equal entries, and log-sum-exps at the same places nan and inf and else within 1e-4 of each other: the inputs are the
// same and the accumulation is float32.
void expect_equal(const Selection& got, const Selection& expected, const std::string& what);
// The same bits.
void expect_same_bits(const Selection& got, const Selection& expected, const std::string& what);
void expect_gpu_equals_reference(const SelectProblem& problem, const std::string& what);

std::string describe(const Options& o);
// Requests of these lengths over shuffled pages, with the last `queries` tokens of each as queries.
Options paged_options(const std::vector<int32_t>& lengths, const std::vector<int32_t>& queries, int64_t block_size);
// The last `rows` queries of a problem of one sequence, alone on the same keys.
SelectProblem last_queries(const SelectProblem& problem, int64_t rows);
// The keys and queries of a problem of one sequence, in shuffled pages.
SelectProblem in_pages(const SelectProblem& problem);
// Makes every block of keys a copy of one of the first `distinct` blocks: scores tie across the whole sequence.
void repeat_blocks(SelectProblem& problem, int64_t distinct);

}  // namespace openmsa::testing
