#include "cli/verify_compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "api/numeric.h"
#include "reference/tensor_access.h"

namespace openmsa::cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Element i of a contiguous host array.
double element(const Array& array, int64_t i) {
  switch (array.tensor.dtype) {
    case OPENMSA_FLOAT32:
      return static_cast<double>(array.data<float>()[i]);
    case OPENMSA_FLOAT16:
      return static_cast<double>(float16_to_float(array.data<uint16_t>()[i]));
    case OPENMSA_BFLOAT16:
      return static_cast<double>(bfloat16_to_float(array.data<uint16_t>()[i]));
    default:
      return static_cast<double>(float8_e4m3_to_float(array.data<uint8_t>()[i]));
  }
}

// The relative norm of the difference, or an eighth of the largest single difference over the largest element where
// that is more: a wrong element must not hide among many. `floor` is the size of numbers of which a sum is left that
// cancels.
double relative_error(const Array& got, const Array& want, double floor, const std::vector<bool>& ignored) {
  double difference = 0, norm = 0, largest = floor, worst = 0;
  const int64_t elements = want.elements();
  for (int64_t i = 0; i < elements; ++i) {
    if (!ignored.empty() && ignored[static_cast<size_t>(i)]) continue;
    const double a = element(got, i), b = element(want, i);
    if (!std::isfinite(b)) {
      if (std::isnan(b) ? !std::isnan(a) : a != b) return kInfinity;
      continue;
    }
    if (!std::isfinite(a)) return kInfinity;
    difference += (a - b) * (a - b);
    norm += b * b;
    largest = std::max(largest, std::abs(b));
    worst = std::max(worst, std::abs(a - b));
  }
  if (difference == 0) return 0;
  norm = std::max(norm, floor * floor * static_cast<double>(elements));
  return std::max(std::sqrt(difference / norm), worst / (8 * largest));
}

double by_type(int32_t dtype, double fp32, double fp16, double bf16) {
  return dtype == OPENMSA_FLOAT32 ? fp32 : dtype == OPENMSA_FLOAT16 ? fp16 : bf16;
}

double limit_of(const VerifyInputs& in, const std::string& result) {
  const double main = by_type(in.dtype, 5e-5, 2e-3, 8e-3), index = by_type(in.index_dtype, 5e-5, 2e-3, 8e-3);
  if (result == "out") return main;
  if (result == "d_q" || result == "d_k" || result == "d_v") return 2 * main;
  if (result == "d_index_q" || result == "d_index_k") return 2.5 * std::max(main, index);
  if (result == "index_lse") return by_type(in.index_dtype, 5e-5, 2e-3, 2e-3);
  if (result == "kl") return std::max(by_type(in.dtype, 2e-4, 5e-3, 5e-3), by_type(in.index_dtype, 2e-4, 5e-3, 5e-3));
  return by_type(in.dtype, 5e-5, 2e-3, 2e-3);  // lse, share, best
}

// Gradients of the index branch are sums of pi - p. Where both are near 1, float32 log-sum-exps leave 1e-7 of them: a
// thousandth of what one term may weigh is the floor.
double floor_of(const VerifyInputs& in, const std::string& result) {
  const double scale = 1 / std::sqrt(static_cast<double>(in.shape.dim));
  if (result == "d_index_q" || result == "d_index_k") {
    return 1e-3 * scale / static_cast<double>(std::max<int64_t>(in.shape.heads_index * in.tokens_q, 1));
  }
  return 0;
}

// Scores of blocks in float64, to judge selections that differ.
class BlockScores {
 public:
  BlockScores(const VerifyInputs& in, bool paged)
      : in_(in),
        paged_(paged),
        queries_(in.index_q.tensor),
        keys_(paged ? in.index_k_cache.tensor : in.index_k.tensor) {}

  struct Query {
    int64_t sequence = 0, keys = 0;  // keys that it sees
  };
  Query find(int64_t query) const {
    Query found;
    const auto* offsets = in_.cu_seqlens_q.data<int32_t>();
    while (query >= offsets[found.sequence + 1]) ++found.sequence;
    const auto at = static_cast<size_t>(found.sequence);
    found.keys = std::max<int64_t>(in_.shape.keys[at] - in_.shape.queries[at] + query - offsets[found.sequence] + 1, 0);
    return found;
  }

  double score(const Query& query, int64_t token, int64_t head, int64_t block) const {
    const auto size = static_cast<size_t>(in_.shape.dim);
    std::vector<double> a(size), b(size);
    queries_.load(token, head, a.data());
    const int64_t key_head = head * in_.shape.heads_index_k / in_.shape.heads_index;
    double best = -kInfinity;
    const int64_t first = block * in_.shape.block_size;
    for (int64_t key = first; key < std::min(first + in_.shape.block_size, query.keys); ++key) {
      keys_.load(row(query.sequence, key), key_head, b.data());
      double sum = 0;
      for (size_t d = 0; d < size; ++d) sum += a[d] * b[d];
      best = std::max(best, sum);
    }
    return best / std::sqrt(static_cast<double>(in_.shape.dim));
  }

  // 5e-6 s' max |index_q| |index_k|
  double margin() const {
    return 5e-6 / std::sqrt(static_cast<double>(in_.shape.dim)) * norm(in_.index_q) *
           norm(paged_ ? in_.index_k_cache : in_.index_k);
  }

 private:
  int64_t row(int64_t sequence, int64_t key) const {
    if (!paged_) return in_.cu_seqlens_k.data<int32_t>()[sequence] + key;
    const int64_t block = in_.shape.block_size, pages = in_.block_table.tensor.shape[1];
    return in_.block_table.data<int32_t>()[sequence * pages + key / block] * block + key % block;
  }
  double norm(const Array& rows) const {
    double largest = 0, sum = 0;
    const int64_t elements = rows.elements();
    for (int64_t i = 0; i < elements; ++i) {
      if (i % in_.shape.dim == 0) sum = 0;
      sum += element(rows, i) * element(rows, i);
      largest = std::max(largest, sum);
    }
    return std::sqrt(largest);
  }

  const VerifyInputs& in_;
  bool paged_;
  reference::Rows queries_, keys_;
};

// One row of a selection: the largest difference of scores between the block that stands in a slot and the one that
// should. Infinite where it is no valid selection.
double row_error(const BlockScores& scores, const VerifyShape& shape, int64_t head, int64_t token, const int32_t* got,
                 const int32_t* want) {
  const BlockScores::Query query = scores.find(token);
  const int64_t blocks = (query.keys + shape.block_size - 1) / shape.block_size;
  const int64_t count = std::min(shape.topk, blocks), local = std::min(shape.local_blocks, count);
  const std::set<int32_t> chosen(got, got + count);
  if (static_cast<int64_t>(chosen.size()) != count) return kInfinity;
  if (count > 0 && (*chosen.begin() < 0 || *chosen.rbegin() >= blocks)) return kInfinity;
  if (!std::equal(got + count - local, got + shape.topk, want + count - local)) return kInfinity;
  double worst = 0;
  for (int64_t slot = 0; slot < count - local; ++slot) {
    if (want[slot] < shape.init_blocks && !chosen.contains(want[slot])) return kInfinity;
    if (got[slot] == want[slot]) continue;
    worst = std::max(
        worst, std::abs(scores.score(query, token, head, got[slot]) - scores.score(query, token, head, want[slot])));
  }
  return worst;
}

// `differs` gets a flag for each row [index head, query] whose blocks are not the reference's.
Comparison compare_selection(const VerifyInputs& in, bool paged, const Array& got, const Array& want,
                             std::vector<bool>& differs) {
  const BlockScores scores(in, paged);
  Comparison result{"indices", 0, scores.margin()};
  differs.assign(static_cast<size_t>(in.shape.heads_index * in.tokens_q), false);
  for (int64_t head = 0; head < in.shape.heads_index; ++head) {
    for (int64_t token = 0; token < in.tokens_q; ++token) {
      const int64_t row = head * in.tokens_q + token, at = row * in.shape.topk;
      const int32_t *a = got.data<int32_t>() + at, *b = want.data<int32_t>() + at;
      if (std::equal(a, a + in.shape.topk, b)) continue;
      differs[static_cast<size_t>(row)] = true;
      result.error = std::max(result.error, row_error(scores, in.shape, head, token, a, b));
    }
  }
  return result;
}

// The number of elements that differ, of which none may.
Comparison compare_bits(const std::string& name, const Array& got, const Array& want) {
  const auto size = static_cast<size_t>(dtype_size(want.tensor.dtype));
  int64_t different = 0;
  for (int64_t i = 0; i < want.elements(); ++i) {
    const size_t at = static_cast<size_t>(i) * size;
    different += std::memcmp(got.data<char>() + at, want.data<char>() + at, size) != 0 ? 1 : 0;
  }
  return {name, static_cast<double>(different), 0};
}

}  // namespace

std::vector<Comparison> compare(const std::string& operation, const VerifyInputs& inputs, IndexVectors selected,
                                const Results& got, const Results& want) {
  std::vector<bool> differs;
  std::vector<Comparison> comparisons;
  // By name, so that indices come before the index_lse of their rows.
  for (const auto& [name, reference] : want) {
    const Array& result = result_named(got, name);
    if (name == "indices" && selected == IndexVectors::real) {
      comparisons.push_back(compare_selection(inputs, operation.starts_with("paged"), result, reference, differs));
    } else if (name == "indices" || operation.starts_with("paged_append")) {
      comparisons.push_back(compare_bits(name, result, reference));
    } else if (name == "kl") {
      const double a = element(result, 0), b = element(reference, 0);
      const double error = std::isfinite(a) && std::isfinite(b) ? std::abs(a - b) / std::max(b, 0.05) : kInfinity;
      comparisons.push_back({name, error, limit_of(inputs, name)});
    } else {
      const bool by_row = name == "index_lse" && !differs.empty();
      const double error =
          relative_error(result, reference, floor_of(inputs, name), by_row ? differs : std::vector<bool>());
      comparisons.push_back({name, error, limit_of(inputs, name)});
    }
  }
  return comparisons;
}

}  // namespace openmsa::cli
