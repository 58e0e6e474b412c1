// What a backend receives: one plain structure per stage, its arguments already checked (src/api/checks.h). Shapes use
// the letters of openmsa.h. A backend trusts ranks, shapes, types and strides, but not the values behind GPU pointers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "openmsa/openmsa.hpp"

namespace openmsa {

// Which keys each query sees. Contiguous operations: cu_seqlens_* and k_starts, null when absent. Paged operations:
// block_table, seq_lens and cu_seqlens_q, never null (batch 0 excepted).
struct SequenceLayout {
  int64_t batch = 1;                      // sequences or requests
  int64_t tokens_q = 0;                   // Tq
  int64_t tokens_k = 0;                   // Tk; pages * block_size for paged operations
  const int32_t* cu_seqlens_q = nullptr;  // [batch + 1]
  const int32_t* cu_seqlens_k = nullptr;  // [batch + 1]
  const int32_t* k_starts = nullptr;      // [batch]
  bool paged = false;
  const int32_t* block_table = nullptr;  // [batch, max_pages]
  int64_t block_table_stride = 0;        // elements between rows
  int64_t max_pages = 0;
  int64_t pages = 0;                  // in the pool; entries outside [0, pages) are invisible
  const int32_t* seq_lens = nullptr;  // [batch]
};

// A factor of a float8 cache: `device_value` (one float32 on the call's device) when not null, else `value`.
struct CacheScale {
  double value = 1.0;
  const float* device_value = nullptr;
};

struct Execution {
  void* stream = nullptr;
  void* workspace = nullptr;  // null: allocate
  int64_t workspace_bytes = 0;
};

struct SelectParams {
  SequenceLayout layout;
  Tensor index_q{};  // [Tq, Hi, Di]
  Tensor index_k{};  // [Tk, Hik, Di], or paged [pages, block, Hik, Di]
  int64_t topk = 16, init_blocks = 0, local_blocks = 1, block_size = 128;
  double scale = 1.0;
  Execution execution;
  Tensor indices{};                   // out [Hi, Tq, topk] int32 or int64
  const Tensor* index_lse = nullptr;  // optional out [Hi, Tq]
};

// The index branch beside attention: what the training signal needs. Present in msa_attention only.
struct IndexBranch {
  Tensor index_q{}, index_k{};
  double scale = 1.0;
};

struct AttendParams {
  SequenceLayout layout;
  Tensor q{}, k{}, v{};             // [Tq, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv], or paged [pages, block, Hkv, D or Dv]
  CacheScale k_scale, v_scale;      // 1 unless the caches are float8
  const Tensor* indices = nullptr;  // [Hi, Tq, topk]; null = every visible key (warm-up)
  int64_t index_heads = 1;          // Hi
  int64_t block_size = 128;
  double scale = 1.0;
  const IndexBranch* index = nullptr;  // with index_lse or kl
  Execution execution;
  Tensor out{};                       // out [Tq, Hq, Dv]
  const Tensor* lse = nullptr;        // optional out [Hq, Tq]
  const Tensor* index_lse = nullptr;  // optional out [Hi, Tq]
  const Tensor* kl = nullptr;         // optional out []; then lse and index_lse are there too
};

struct BackwardParams {
  SequenceLayout layout;
  Tensor q{}, k{}, v{}, out{}, lse{};
  const Tensor* d_out = nullptr;    // null: no gradient through out, and d_q, d_k, d_v are null
  const Tensor* indices = nullptr;  // null = every visible key (warm-up)
  int64_t index_heads = 1;
  int64_t block_size = 128;
  double scale = 1.0;
  bool deterministic = false;
  const IndexBranch* index = nullptr;  // null for sparse_attention
  const Tensor* index_lse = nullptr;   // there with index, unless neither d_kl nor kl is
  const Tensor* d_kl = nullptr;        // []; null: no gradient through kl, and d_index_q, d_index_k are null
  Execution execution;
  const Tensor *d_q = nullptr, *d_k = nullptr, *d_v = nullptr;
  const Tensor *d_index_q = nullptr, *d_index_k = nullptr;
  const Tensor* kl = nullptr;  // optional out []
};

struct CombineParams {
  Tensor outs{}, lses{};  // [S, Tq, Hq, Dv], [S, Hq, Tq]
  Execution execution;
  Tensor out{}, lse{};
};

struct CapturedMassParams {
  SequenceLayout layout;
  Tensor q{}, k{}, indices{};
  int64_t block_size = 128;
  double scale = 1.0;
  Execution execution;
  Tensor share{}, best{};
};

struct AppendParams {
  SequenceLayout layout;
  Tensor k{}, v{}, index_k{};
  CacheScale k_scale, v_scale;
  Execution execution;
  Tensor k_cache{}, v_cache{}, index_k_cache{};
};

// One implementation of the stages. A stage that a backend lacks keeps the default, which throws OPENMSA_UNSUPPORTED
// with the backend's and the operation's name. docs/backends.md says how to add one.
class Backend {
 public:
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  virtual ~Backend() = default;

  virtual const char* name() const = 0;  // "reference", "cpu", "sm90"
  virtual openmsa_device_type device() const = 0;
  virtual bool available() const = 0;  // this machine can run it
  // Comma-separated operations of openmsa.h (without "openmsa_", backward ones included) that it has the stages for.
  // The api refuses every other operation by name.
  virtual const char* operations() const = 0;
  // What openmsa_info tells beside that. Texts like "64, 128" or "1-256"; the defaults are what every CPU backend
  // takes.
  struct Limits {
    const char* types = "float32, float16, bfloat16, float8_e4m3";
    const char* block_sizes = "32, 64, 128";
    const char* head_dims = "1-256";
    const char* topk = "any";
  };
  virtual Limits limits() const { return {}; }
  // The instruction set that its kernels run on, where it chooses among several; else "".
  virtual const char* target() const { return ""; }
  // Names of the devices that it finds on this machine, by device_index.
  virtual std::vector<std::string> device_names() const { return {}; }

  // Copies what `source` on this backend's device holds once `stream` got there, and waits: for the checking mode. CPU
  // backends are not asked.
  virtual void copy_to_host(void* destination, const void* source, int64_t bytes, void* stream) const;

  virtual void select(const SelectParams& params) const;
  virtual void attend(const AttendParams& params) const;
  virtual void backward(const BackwardParams& params) const;
  virtual void combine(const CombineParams& params) const;
  virtual void captured_mass(const CapturedMassParams& params) const;
  virtual void append(const AppendParams& params) const;

  // Workspace bytes; 0 by default.
  virtual int64_t workspace(const SelectParams& params) const;
  virtual int64_t workspace(const AttendParams& params) const;
  virtual int64_t workspace(const BackwardParams& params) const;
  virtual int64_t workspace(const CombineParams& params) const;
  virtual int64_t workspace(const CapturedMassParams& params) const;
  virtual int64_t workspace(const AppendParams& params) const;

  // Refuses, by argument name, what this backend cannot do among valid arguments (types, head dimensions, alignment).
  // Called before anything is written.
  virtual void check(const SelectParams& params) const;
  virtual void check(const AttendParams& params) const;
  virtual void check(const BackwardParams& params) const;
  virtual void check(const CombineParams& params) const;
  virtual void check(const CapturedMassParams& params) const;
  virtual void check(const AppendParams& params) const;
};

// The backends of this build, each in its own room.
const Backend& reference_backend();
const Backend& cpu_backend();
#ifdef OPENMSA_WITH_SM90
const Backend& sm90_backend();
#endif

// The backend for tensors on `device`: OPENMSA_BACKEND's choice when it serves that device, else the fastest available.
const Backend& choose_backend(openmsa_device_type device);

}  // namespace openmsa
