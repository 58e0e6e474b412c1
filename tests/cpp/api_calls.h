// A small valid call of every operation, taken apart into named tensors, numbers and factors, so that a test can change
// one part and see what the operation says.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "cpp/case_memory.h"
#include "openmsa/openmsa.hpp"

namespace openmsa::tests {

inline constexpr std::array<const char*, 11> kOperationNames = {"select_blocks",
                                                                "sparse_attention",
                                                                "sparse_attention_backward",
                                                                "msa_attention",
                                                                "msa_attention_backward",
                                                                "paged_select_blocks",
                                                                "paged_sparse_attention",
                                                                "paged_msa_attention",
                                                                "combine",
                                                                "captured_mass",
                                                                "paged_append"};

struct ProblemSize {
  std::vector<int32_t> queries = {3, 4};  // of each sequence or request
  std::vector<int32_t> keys = {40, 70};
  int64_t padded_queries = 1;  // rows after the last request; paged calls only
  int64_t heads_q = 6, heads_kv = 1, heads_index = 3, heads_index_k = 1;
  int64_t dim = 6, dim_v = 5, dim_index = 7;
  int64_t block = 32, topk = 2, splits = 3;
  DataType type = OPENMSA_FLOAT32, index_type = OPENMSA_FLOAT32, cache_type = OPENMSA_FLOAT32;
};

struct TensorSlot {
  std::string name;
  bool output = false;
  bool optional = false;
  const Tensor** field = nullptr;
  cases::PlacedTensor memory;
  Tensor view{};        // what the call gets
  bool present = true;  // false: the call gets null

  std::vector<unsigned char> bytes() const { return memory.fetch().storage; }
};

struct NumberSlot {
  std::string name;
  int64_t value;
  int64_t* field64;
  int32_t* field32;
};

struct FactorSlot {
  std::string name;
  const double** field;
  double value;
  bool present;
};

inline constexpr unsigned char kPoison = 0xA5;

class Call {
 public:
  Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  virtual ~Call() = default;

  void run() { bind(), run_operation(); }
  int64_t workspace_size() { return bind(), ask_workspace_size(); }
  openmsa_status run_c() { return bind(), run_c_operation(); }
  openmsa_status workspace_size_c(int64_t* bytes) { return bind(), ask_workspace_size_c(bytes); }

  TensorSlot& tensor(const std::string& name);
  NumberSlot& number(const std::string& name);
  FactorSlot& factor(const std::string& name);
  template <typename Value>
  Value* values(const std::string& name) {
    return static_cast<Value*>(tensor(name).view.data);
  }

  std::deque<TensorSlot> tensors;
  std::deque<NumberSlot> numbers;
  std::deque<FactorSlot> factors;

 protected:
  virtual void run_operation() = 0;
  virtual int64_t ask_workspace_size() = 0;
  virtual openmsa_status run_c_operation() = 0;
  virtual openmsa_status ask_workspace_size_c(int64_t* bytes) = 0;

 private:
  void bind();
};

// Inputs hold small deterministic values, outputs kPoison. `operation` is one of kOperationNames.
std::unique_ptr<Call> make_call(const std::string& operation, const ProblemSize& size = {});

// Gives the slot new memory: every byte `fill`.
void place(TensorSlot& slot, DataType dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
           unsigned char fill);

}  // namespace openmsa::tests
