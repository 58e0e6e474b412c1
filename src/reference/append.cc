// Writes the new rows of each request into its pages.
#include <cstring>
#include <vector>

#include "reference/stages.h"
#include "reference/tensor_access.h"

namespace openmsa::reference {
namespace {

class Appender {
 public:
  Appender(const Tensor& rows, const Tensor& cache, float factor)
      : rows_(rows), cache_(cache), same_type_(rows.dtype == cache.dtype), factor_(factor), row_(rows.shape[2]) {}

  void append(int64_t query, int64_t slot) {
    for (int64_t head = 0; head < rows_.heads(); ++head) {
      if (same_type_) {
        cache_.copy(slot, head, rows_, query);
        continue;
      }
      rows_.load(query, head, row_.data());
      // In float32, as kernels divide: the quotient that is rounded to storage is the same everywhere.
      for (double& x : row_) x = static_cast<float>(x) / factor_;
      cache_.store(slot, head, row_.data());
    }
  }

 private:
  Rows rows_, cache_;
  bool same_type_;
  float factor_;
  std::vector<double> row_;
};

}  // namespace

// One thread: requests may share pages, and then the order of the rows decides what stays.
void append(const AppendParams& params) {
  const Sequences sequences(params.layout, params.k_cache.shape[1]);
  Appender k(params.k, params.k_cache, factor_of(params.k_scale));
  Appender v(params.v, params.v_cache, factor_of(params.v_scale));
  Appender index_k(params.index_k, params.index_k_cache, 1.0F);

  for (int64_t query = 0; query < sequences.queries_end(); ++query) {
    const QueryKeys keys = sequences.keys_of(query);
    const KeyBlock own = keys.block(keys.blocks() - 1);
    if (own.length == 0) continue;  // padding, a row before the first key, or a page outside the pool
    const int64_t slot = own.first + own.length - 1;
    k.append(query, slot);
    v.append(query, slot);
    index_k.append(query, slot);
  }
}

}  // namespace openmsa::reference
