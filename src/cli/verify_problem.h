// The problems of `openmsa verify` and the operations on them, on any device.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cli/device.h"

namespace openmsa::cli {

struct VerifyShape {
  const char* name = "";
  std::vector<int32_t> queries, keys;  // of each sequence, or paged request
  int64_t heads_q = 8, heads_kv = 2, heads_index = 2, heads_index_k = 1;
  int64_t dim = 64;  // D, Dv and Di
  int64_t block_size = 128, topk = 4, init_blocks = 0, local_blocks = 1;
};

// Index vectors of the main problems are integers, whose scores are exact: every backend must then select the same
// blocks, and what follows can be compared. `real` ones are compared by the margin of the definition.
enum class IndexVectors { integers, real };

// The arguments of all operations.
struct VerifyInputs {
  VerifyInputs() = default;
  VerifyInputs(const VerifyShape& shape, int32_t dtype, int32_t index_dtype, IndexVectors vectors);
  VerifyInputs on(Device& device) const;

  VerifyShape shape;
  int32_t dtype = OPENMSA_FLOAT32, index_dtype = OPENMSA_FLOAT32;
  Device* device = nullptr;
  int64_t tokens_q = 0, tokens_k = 0;
  Array q, k, v, index_q, index_k, d_out, d_kl, cu_seqlens_q, cu_seqlens_k;
  // Paged: the requests' keys on shuffled pages. float8 caches have factors.
  Array k_cache, v_cache, index_k_cache, float8_k_cache, float8_v_cache, block_table, seq_lens;
  Array new_k, new_v, new_index_k;
  Array outs, lses;  // of combine
};

using Results = std::vector<std::pair<std::string, Array>>;  // on the host
const Array& result_named(const Results& results, const std::string& name);

// Runs an operation by its name in the table ("msa_attention warm-up"; "paged_sparse_attention fp8") with the backend
// in use. `earlier` has what it takes from others: indices, and of a backward operation out, lse, index_lse.
Results run_operation(const std::string& operation, const VerifyInputs& inputs, const Results& earlier);

}  // namespace openmsa::cli
