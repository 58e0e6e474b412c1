#include "cpp/case_invariants.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "api/backend.h"
#include "cpp/case_compare.h"
#include "host/elements.h"
#include "reference/tensor_access.h"

namespace openmsa::cases {
namespace {

// Only the reference promises equal bits where a backend may choose another kernel or another order of sums.
bool exact_backend(const Inputs& in) { return &choose_backend(in.memory.device()) == &reference_backend(); }

::testing::AssertionResult agrees(const Inputs& in, const std::string& name, const HostTensor& got,
                                  const HostTensor& want) {
  if (exact_backend(in)) return same_bits(got, want);
  Results a, b;
  a[name] = got;
  b[name] = want;
  return close(in.c, a, b);
}

// Rows [first, first + count) of axis `axis` of a tensor, row-major.
HostTensor slice(const HostTensor& tensor, int32_t axis, int64_t first, int64_t count) {
  HostTensor view = tensor;
  view.offset += first * view.view.strides[axis] * dtype_size(view.view.dtype);
  view.view.shape[axis] = count;
  const std::vector<int64_t> shape(view.view.shape, view.view.shape + view.view.rank);
  HostTensor result = make_host_tensor(static_cast<DataType>(view.view.dtype), shape, {}, kFill);
  const std::vector<unsigned char> bytes = packed_bytes(view);
  std::copy(bytes.begin(), bytes.end(), result.storage.begin() + result.offset);
  return result;
}

// Rows of a key tensor (paged: counted through the pool), times `factor`, as another type.
HostTensor gather_keys(HostTensor tensor, const std::vector<int64_t>& rows, DataType dtype, double factor) {
  const reference::Rows from(tensor.tensor(), factor);
  HostTensor result = make_host_tensor(dtype, {static_cast<int64_t>(rows.size()), from.heads(), from.dim()}, {}, kFill);
  const reference::Rows to(result.tensor());
  std::vector<double> row(static_cast<size_t>(from.dim()));
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int64_t head = 0; head < from.heads(); ++head) {
      from.load(rows[i], head, row.data());
      to.store(static_cast<int64_t>(i), head, row.data());
    }
  }
  return result;
}

HostTensor convert(HostTensor tensor, DataType dtype) {
  std::vector<int64_t> rows(static_cast<size_t>(tensor.view.shape[0]));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
  return gather_keys(std::move(tensor), rows, dtype, 1.0);
}

// A sequence of a contiguous case as a case of its own.
struct Alone {
  Case c;
  Images images;

  Alone(const Inputs& in, const SequenceKeys& s) : c(in.c) {
    c.name += "/alone";
    c.layout = "contiguous";
    c.cu_seqlens_q.reset();
    c.cu_seqlens_k.reset();
    c.k_starts.reset();
    c.tokens_q = s.queries;
    c.tokens_k = static_cast<int64_t>(s.rows.size());
    const int64_t first_key = s.rows.empty() ? 0 : s.rows.front();
    for (TensorId tensor : {TensorId::q, TensorId::index_q, TensorId::d_out}) {
      images.emplace(tensor, slice(in.images.at(tensor), 0, s.first_query, s.queries));
    }
    for (TensorId tensor : {TensorId::k, TensorId::v, TensorId::index_k}) {
      images.emplace(tensor, slice(in.images.at(tensor), 0, first_key, c.tokens_k));
    }
  }
};

std::vector<SequenceKeys> sequences_to_try(const Case& c) {
  std::vector<SequenceKeys> all = sequence_keys(c);
  if (!c.packed() || c.paged || all.size() > 8) return {};
  std::erase_if(all, [](const SequenceKeys& s) { return s.queries == 0; });
  return all;
}

// A paged case as a contiguous one: keys gathered, padded query rows left out.
struct Gathered {
  Case c;
  Images images;

  explicit Gathered(const Inputs& in) : c(in.c) {
    c.name += "/gathered";
    c.tokens_q = c.cu_seqlens_q->back();
    c.cu_seqlens_k = std::vector<int32_t>{0};
    std::vector<int64_t> rows;
    for (const SequenceKeys& s : sequence_keys(in.c)) {
      rows.insert(rows.end(), s.rows.begin(), s.rows.end());
      c.cu_seqlens_k->push_back(static_cast<int32_t>(rows.size()));
    }
    c.tokens_k = static_cast<int64_t>(rows.size());
    const Pages& pages = *in.c.paged;
    if (pages.cache_dtype == OPENMSA_FLOAT8_E4M3) c.dtype = OPENMSA_FLOAT32;
    c.paged.reset();
    images.emplace(TensorId::q, convert(slice(in.images.at(TensorId::q), 0, 0, c.tokens_q), c.dtype));
    images.emplace(TensorId::index_q, slice(in.images.at(TensorId::index_q), 0, 0, c.tokens_q));
    images.emplace(TensorId::d_out, make_output(c, TensorId::d_out, kFill));
    images.emplace(TensorId::k, gather_keys(in.images.at(TensorId::k), rows, c.dtype, pages.k_scale.value_or(1)));
    images.emplace(TensorId::v, gather_keys(in.images.at(TensorId::v), rows, c.dtype, pages.v_scale.value_or(1)));
    images.emplace(TensorId::index_k, gather_keys(in.images.at(TensorId::index_k), rows, c.index_dtype, 1.0));
  }
};

// Distinct visible blocks that a row selects.
std::set<int64_t> distinct_blocks(const std::vector<int64_t>& entries, int64_t at, int64_t topk, int64_t blocks) {
  std::set<int64_t> chosen;
  for (int64_t slot = 0; slot < topk; ++slot) {
    const int64_t b = entries[static_cast<size_t>(at + slot)];
    if (b >= 0 && b < blocks) chosen.insert(b);
  }
  return chosen;
}

// Key rows that some query selects, for any index head. Without indices: that some query sees.
std::vector<bool> selected_rows(const Case& c, const HostTensor* indices) {
  std::vector<bool> rows(static_cast<size_t>(c.tokens_k), false);
  const std::vector<int64_t> entries = indices != nullptr ? decode_blocks(*indices) : std::vector<int64_t>();
  for (const SequenceKeys& s : sequence_keys(c)) {
    for (int64_t i = 0; i < s.queries; ++i) {
      const int64_t count = static_cast<int64_t>(s.rows.size()) - s.queries + i + 1;
      const int64_t blocks = count <= 0 ? 0 : (count + c.block_size - 1) / c.block_size;
      for (int64_t head = 0; head < c.heads_index; ++head) {
        std::set<int64_t> chosen;
        if (indices == nullptr) {
          for (int64_t b = 0; b < blocks; ++b) chosen.insert(b);
        } else {
          chosen = distinct_blocks(entries, (head * c.tokens_q + s.first_query + i) * c.topk, c.topk, blocks);
        }
        for (int64_t b : chosen) {
          for (int64_t j = b * c.block_size; j < std::min(count, (b + 1) * c.block_size); ++j) {
            const int64_t row = s.rows[static_cast<size_t>(j)];
            if (row >= 0) rows[static_cast<size_t>(row)] = true;
          }
        }
      }
    }
  }
  return rows;
}

// A block-number tensor [Hi, Tq, topk] from entries in row-major order.
HostTensor make_blocks(const Case& c, int64_t topk, const std::vector<int64_t>& entries) {
  HostTensor result = make_host_tensor(c.indices_dtype, {c.heads_index, c.tokens_q, topk}, {}, kFill);
  const Tensor view = result.tensor();
  size_t next = 0;
  for (int64_t head = 0; head < c.heads_index; ++head) {
    for (int64_t query = 0; query < c.tokens_q; ++query) {
      for (int64_t slot = 0; slot < topk; ++slot) host::store_index(view, head, query, slot, entries[next++]);
    }
  }
  return result;
}

}  // namespace

void check_sequences_select_alone(const Inputs& in, const Results& results) {
  for (const SequenceKeys& s : sequences_to_try(in.c)) {
    const Alone alone(in, s);
    const Inputs inputs(alone.c, in.memory, alone.images);
    const Results got = select({.in = inputs});
    EXPECT_TRUE(same_bits(got.at("indices"), slice(results.at("indices"), 1, s.first_query, s.queries)))
        << "the sequence from query " << s.first_query << " on, alone";
    EXPECT_TRUE(
        agrees(in, "index_lse", got.at("index_lse"), slice(results.at("index_lse"), 1, s.first_query, s.queries)));
  }
}

void check_sequences_train_alone(const Inputs& in, const Results& forward, const Results& gradients) {
  std::map<std::string, std::vector<double>> sums;
  double kl = 0;
  const std::vector<SequenceKeys> sequences = sequences_to_try(in.c);
  if (sequences.empty()) return;
  for (const SequenceKeys& s : sequences) {
    const Alone alone(in, s);
    const Inputs inputs(alone.c, in.memory, alone.images);
    const Results got = msa({.in = inputs}, false);
    EXPECT_TRUE(same_bits(got.at("indices"), slice(forward.at("indices"), 1, s.first_query, s.queries)));
    EXPECT_TRUE(agrees(in, "out", got.at("out"), slice(forward.at("out"), 0, s.first_query, s.queries)));
    EXPECT_TRUE(agrees(in, "lse", got.at("lse"), slice(forward.at("lse"), 1, s.first_query, s.queries)));
    kl += decode(got.at("kl"))[0] * static_cast<double>(s.queries);
    const Results gradient = msa_backward({.in = inputs}, false, got);
    for (const auto& [name, tensor] : gradient) {
      if (name == "kl") continue;
      const bool of_queries = name == "d_q" || name == "d_index_q";
      // The mean of KL runs over the batch's queries.
      const bool of_index = name == "d_index_q" || name == "d_index_k";
      const double factor = of_index ? static_cast<double>(s.queries) / static_cast<double>(in.c.tokens_q) : 1.0;
      const std::vector<double> values = decode(tensor);
      std::vector<double>& sum = sums[name];
      sum.resize(static_cast<size_t>(gradients.at(name).elements()), 0.0);
      const int64_t row_size = tensor.view.shape[1] * tensor.view.shape[2];
      const int64_t first = of_queries ? s.first_query : s.rows.empty() ? 0 : s.rows.front();
      for (size_t i = 0; i < values.size(); ++i) {
        sum[static_cast<size_t>(first * row_size) + i] += factor * values[i];
      }
    }
  }
  const double want_kl = decode(forward.at("kl"))[0];
  if (std::isfinite(want_kl)) {
    EXPECT_NEAR(kl / static_cast<double>(in.c.tokens_q), want_kl, 1e-5 * std::max(want_kl, 0.05));
  }
  for (const auto& [name, sum] : sums) {
    const std::vector<double> whole = decode(gradients.at(name));
    double difference = 0, norm = 0;
    for (size_t i = 0; i < sum.size(); ++i) {
      if (!std::isfinite(whole[i])) continue;
      difference += (sum[i] - whole[i]) * (sum[i] - whole[i]);
      norm += whole[i] * whole[i];
    }
    const double floor = floor_of(in.c, name);
    norm = std::max(norm, floor * floor * static_cast<double>(sum.size()));
    EXPECT_LE(std::sqrt(difference), 2 * tolerance(in.c, name) * std::sqrt(norm))
        << name << " of sequences alone, added";
  }
}

void check_paged_select_is_contiguous(const Inputs& in, const Results& results) {
  const Gathered gathered(in);
  const Inputs inputs(gathered.c, in.memory, gathered.images);
  const Results got = select({.in = inputs});
  const int64_t tokens = gathered.c.tokens_q;
  const HostTensor indices = slice(results.at("indices"), 1, 0, tokens);
  if (exact_backend(in)) {
    EXPECT_TRUE(same_bits(got.at("indices"), indices));
  } else {
    const Inputs host(gathered.c, cpu_memory(), gathered.images);
    HostTensor copy = got.at("indices");
    const Tensor view = copy.tensor();
    EXPECT_TRUE(
        valid_selection(indices, got.at("indices"), select_params(host, &view, nullptr), selection_margin(host)));
  }
  EXPECT_TRUE(agrees(in, "index_lse", got.at("index_lse"), slice(results.at("index_lse"), 1, 0, tokens)));
}

void check_paged_attend_is_contiguous(const Inputs& in, const HostTensor& indices, const Results& results) {
  const Gathered gathered(in);
  const Inputs inputs(gathered.c, in.memory, gathered.images);
  const int64_t tokens = gathered.c.tokens_q;
  const PlacedTensor blocks(in.memory, slice(indices, 1, 0, tokens));
  const Results got = attend({.in = inputs}, blocks);
  EXPECT_TRUE(agrees(in, "out", convert(got.at("out"), in.c.dtype), slice(results.at("out"), 0, 0, tokens)));
  EXPECT_TRUE(agrees(in, "lse", got.at("lse"), slice(results.at("lse"), 1, 0, tokens)));
}

void check_selection_order(const Inputs& in, const HostTensor& indices, const Results& results) {
  const Case& c = in.c;
  const std::vector<int64_t> entries = decode_blocks(indices);
  std::vector<int64_t> shuffled;
  for (size_t at = 0; at < entries.size(); at += static_cast<size_t>(c.topk)) {
    const std::vector<int64_t> row(entries.begin() + static_cast<int64_t>(at),
                                   entries.begin() + static_cast<int64_t>(at) + c.topk);
    // Garbage and a repetition first, then the row backwards.
    shuffled.insert(shuffled.end(),
                    {std::numeric_limits<int32_t>::min(), row.front(), std::numeric_limits<int32_t>::max(), -1});
    shuffled.insert(shuffled.end(), row.rbegin(), row.rend());
  }
  const PlacedTensor blocks(in.memory, make_blocks(c, c.topk + kExtraEntries, shuffled));
  const Results got = attend({.in = in}, blocks);
  for (const auto& [name, tensor] : got) EXPECT_TRUE(agrees(in, name, tensor, results.at(name))) << name;
}

void check_unselected_keys(const Inputs& in, const HostTensor& indices, const Results& results) {
  const std::vector<bool> rows = selected_rows(in.c, &indices);
  Images images = in.images;
  for (TensorId tensor : {TensorId::k, TensorId::v}) {
    HostTensor& image = images.at(tensor);
    const reference::Rows access(image.tensor());
    const std::vector<double> nan(static_cast<size_t>(access.dim()), std::nan(""));
    for (int64_t row = 0; row < in.c.tokens_k; ++row) {
      if (rows[static_cast<size_t>(row)]) continue;
      for (int64_t head = 0; head < access.heads(); ++head) access.store(row, head, nan.data());
    }
  }
  const Inputs inputs(in.c, in.memory, images);
  const PlacedTensor blocks(in.memory, indices);
  EXPECT_TRUE(same_bits(attend({.in = inputs}, blocks), results)) << "with NaN in blocks that nobody selected";
}

void check_zero_gradients(const Inputs& in, const HostTensor* indices, const Results& gradients) {
  const std::vector<bool> selected = selected_rows(in.c, indices);
  const std::vector<int64_t> visible = visible_keys(in.c);
  for (const auto& [name, tensor] : gradients) {
    if (name == "kl") continue;
    const bool of_queries = name == "d_q" || name == "d_index_q";
    const std::vector<double> values = decode(tensor);
    const auto row_size = static_cast<size_t>(tensor.view.shape[1] * tensor.view.shape[2]);
    for (int64_t row = 0; row < tensor.view.shape[0]; ++row) {
      const auto number = static_cast<size_t>(row);
      if (of_queries ? visible[number] > 0 : selected[number]) continue;
      const auto first = values.begin() + static_cast<int64_t>(static_cast<size_t>(row) * row_size);
      const bool zero = std::all_of(first, first + static_cast<int64_t>(row_size), [](double x) { return x == 0; });
      ASSERT_TRUE(zero) << name << " of row " << row << ", which takes no part, is not 0";
    }
  }
}

void check_halves_combine(const Inputs& in, const HostTensor& indices, const Results& results) {
  Case c = in.c;
  c.splits = 2;
  const std::vector<int64_t> entries = decode_blocks(indices);
  HostTensor outs = make_output(c, TensorId::outs, kFill), lses = make_output(c, TensorId::lses, kFill);
  const std::vector<int64_t> visible = visible_keys(c);
  for (int64_t split = 0; split < 2; ++split) {
    // Distinct blocks, so that the halves are disjoint.
    std::vector<int64_t> half(entries.size(), -1);
    for (int64_t row = 0; row < c.heads_index * c.tokens_q; ++row) {
      const int64_t blocks = (visible[static_cast<size_t>(row % c.tokens_q)] + c.block_size - 1) / c.block_size;
      int64_t number = 0;
      for (int64_t b : distinct_blocks(entries, row * c.topk, c.topk, blocks)) {
        if (number % 2 == split) half[static_cast<size_t>(row * c.topk + number)] = b;
        ++number;
      }
    }
    const PlacedTensor blocks(in.memory, make_blocks(c, c.topk, half));
    const Results part = attend({.in = in}, blocks);
    const std::vector<unsigned char> out = packed_bytes(part.at("out")), lse = packed_bytes(part.at("lse"));
    std::copy(out.begin(), out.end(), outs.element(split));
    std::copy(lse.begin(), lse.end(), lses.element(split));
  }
  Images images = in.images;
  images.insert_or_assign(TensorId::outs, outs);
  images.insert_or_assign(TensorId::lses, lses);
  const Inputs inputs(c, in.memory, images);
  const Results got = combine({.in = inputs});
  EXPECT_TRUE(close(got.at("out"), results.at("out"), 2 * tolerance(c, "out"))) << "halves of the selection, merged";
  EXPECT_TRUE(close(got.at("lse"), results.at("lse"), 2 * tolerance(c, "lse")));
}

}  // namespace openmsa::cases
