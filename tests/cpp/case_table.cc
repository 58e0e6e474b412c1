#include "cpp/case_table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "api/dtype.h"
#include "host/elements.h"
#include "reference/tensor_access.h"

namespace openmsa::cases {
namespace {

using nlohmann::json;

constexpr const char* kNames[] = {"q",           "k",       "v",    "index_q", "index_k", "d_out", "new_k",    "new_v",
                                  "new_index_k", "indices", "outs", "lses",    "out",     "lse",   "index_lse"};

json read_json(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  return json::parse(file);
}

// checksums.json lies beside cases.json.
std::string checksums_path() {
  const std::string cases = OPENMSA_CASES;
  return cases.substr(0, cases.find_last_of('/') + 1) + "checksums.json";
}

DataType parse_dtype(const json& value) {
  for (int32_t dtype = 0; dtype < kDataTypeCount; ++dtype) {
    if (value.get<std::string>() == dtype_name(dtype)) return static_cast<DataType>(dtype);
  }
  throw std::runtime_error("unknown type " + value.dump());
}

template <typename Value>
std::optional<Value> parse_optional(const json& value) {
  if (value.is_null()) return std::nullopt;
  return value.get<Value>();
}

std::string parse_text(const json& value) { return value.is_null() ? std::string() : value.get<std::string>(); }

float parse_number(const json& value) {
  if (value.is_number()) return value.get<float>();
  const auto text = value.get<std::string>();
  if (text == "nan") return std::numeric_limits<float>::quiet_NaN();
  if (text == "inf") return std::numeric_limits<float>::infinity();
  if (text == "-inf") return -std::numeric_limits<float>::infinity();
  if (text == "-0") return -0.0F;
  throw std::runtime_error("unknown value " + text);
}

Edit parse_edit(const json& value) {
  Edit edit;
  edit.tensor = value.at("tensor").get<std::string>();
  edit.rows = value.at("rows").get<std::vector<Range>>();
  edit.heads = parse_optional<Range>(value.at("heads"));
  edit.dims = parse_optional<Range>(value.at("dims"));
  edit.value = parse_number(value.at("value"));
  return edit;
}

Pages parse_pages(const json& value) {
  Pages pages;
  pages.pages = value.at("pages").get<int64_t>();
  pages.max_pages = value.at("max_pages").get<int64_t>();
  pages.table_stride = value.at("table_stride").get<int64_t>();
  pages.block_table = value.at("block_table").get<std::vector<std::vector<int32_t>>>();
  pages.seq_lens = value.at("seq_lens").get<std::vector<int32_t>>();
  pages.layout = value.at("layout").get<std::string>();
  pages.cache_dtype = parse_dtype(value.at("cache_dtype"));
  pages.k_scale = parse_optional<double>(value.at("k_scale"));
  pages.v_scale = parse_optional<double>(value.at("v_scale"));
  pages.scale_form = value.at("scale_form").get<std::string>();
  return pages;
}

Case parse_case(const json& value) {
  Case c;
  const auto number = [&](const char* key) { return value.at(key).get<int64_t>(); };
  c.name = value.at("name").get<std::string>();
  c.seed = value.at("seed").get<uint64_t>();
  c.tags = value.at("tags").get<std::vector<std::string>>();
  c.ops = value.at("ops").get<std::vector<std::string>>();
  c.needs_index = value.at("needs").at("index").get<std::vector<std::string>>();
  c.needs_main = value.at("needs").at("main").get<std::vector<std::string>>();
  c.heads_q = number("Hq");
  c.heads_kv = number("Hkv");
  c.heads_index = number("Hi");
  c.heads_index_k = number("Hik");
  c.dim = number("D");
  c.dim_v = number("Dv");
  c.dim_index = number("Di");
  c.dtype = parse_dtype(value.at("dtype"));
  c.index_dtype = parse_dtype(value.at("index_dtype"));
  c.indices_dtype = parse_dtype(value.at("indices_dtype"));
  c.block_size = number("block_size");
  c.topk = number("topk");
  c.init_blocks = number("init_blocks");
  c.local_blocks = number("local_blocks");
  c.scale = parse_optional<double>(value.at("scale"));
  c.index_scale = parse_optional<double>(value.at("index_scale"));
  c.tokens_q = number("Tq");
  c.tokens_k = number("Tk");
  c.cu_seqlens_q = parse_optional<std::vector<int32_t>>(value.at("cu_seqlens_q"));
  c.cu_seqlens_k = parse_optional<std::vector<int32_t>>(value.at("cu_seqlens_k"));
  c.k_starts = parse_optional<std::vector<int32_t>>(value.at("k_starts"));
  if (!value.at("paged").is_null()) c.paged = parse_pages(value.at("paged"));
  c.layout = value.at("layout").get<std::string>();
  c.values = value.at("values").get<std::string>();
  c.selection = parse_text(value.at("selection"));
  c.raises = parse_text(value.at("raises"));
  c.amplitude = value.at("amplitude").get<double>();
  for (const json& edit : value.at("edits")) c.edits.push_back(parse_edit(edit));
  c.invisible = value.at("invisible").get<std::vector<Range>>();
  c.splits = number("splits");
  return c;
}

// ---- Values ---------------------------------------------------------------------------------------------------------

constexpr int64_t kWindow = 64;  // rows that an "overlap" index query averages

uint64_t mix(uint64_t x) {  // the finisher of splitmix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// 64 random bits for each element of a tensor.
class Hashes {
 public:
  Hashes(const Case& c, TensorId tensor) : start_(mix(c.seed + ((static_cast<uint64_t>(tensor) + 1) << 32))) {}
  uint64_t operator()(int64_t element) const {
    return mix(start_ + static_cast<uint64_t>(element + 1) * 0x9E3779B97F4A7C15u);
  }

 private:
  uint64_t start_;
};

// A sum of four 16-bit fields about 0: an integer, close to normal, standard deviation 1.155 * 2^15.
int64_t bell(uint64_t hash) {
  int64_t sum = -131070;
  for (int field = 0; field < 4; ++field) sum += static_cast<int64_t>((hash >> (16 * field)) & 0xFFFFu);
  return sum;
}

float scaled_bell(uint64_t hash, int exponent) {
  return static_cast<float>(std::ldexp(static_cast<double>(bell(hash)), exponent));
}

struct Floats {
  int64_t rows = 0, heads = 0, dim = 0;
  std::vector<float> values;  // [rows][heads][dim]

  int64_t row_size() const { return heads * dim; }
  float& at(int64_t row, int64_t head, int64_t d) {
    return values[static_cast<size_t>((row * heads + head) * dim + d)];
  }
};

bool is_index_input(TensorId tensor) { return tensor == TensorId::index_q || tensor == TensorId::index_k; }

// Moving averages of random rows, all shifted the same way: neighbours choose about the same blocks.
void fill_overlapping_queries(const Hashes& hashes, Floats* x) {
  const int64_t width = x->row_size();
  for (int64_t e = 0; e < width; ++e) {
    int64_t sum = 0;
    for (int64_t row = 0; row < kWindow; ++row) sum += bell(hashes(row * width + e));
    for (int64_t row = 0; row < x->rows; ++row) {
      x->values[static_cast<size_t>(row * width + e)] =
          static_cast<float>(std::ldexp(static_cast<double>(sum), -18) + 0.5);
      sum += bell(hashes((row + kWindow) * width + e)) - bell(hashes(row * width + e));
    }
  }
}

// A key near the start of each sequence that all of these queries like.
void add_sinks(const Case& c, Floats* x) {
  std::vector<int32_t> starts = {0};
  if (c.k_starts) {
    starts = *c.k_starts;
  } else if (c.cu_seqlens_k) {
    starts.assign(c.cu_seqlens_k->begin(), c.cu_seqlens_k->end() - 1);
  }
  for (int32_t start : starts) {
    const int64_t row = int64_t{start} + 5;
    if (start >= -5 && row < x->rows) std::fill_n(x->values.begin() + row * x->row_size(), x->row_size(), 1.5F);
  }
}

Floats make_floats(const Case& c, TensorId tensor) {
  const std::vector<int64_t> shape = shape_of(c, tensor);
  Floats x;
  x.rows = 1;
  for (size_t axis = 0; axis + 2 < shape.size(); ++axis) x.rows *= shape[axis];
  x.heads = shape[shape.size() - 2];
  x.dim = shape[shape.size() - 1];
  x.values.resize(static_cast<size_t>(x.rows * x.row_size()));
  const Hashes hashes(c, tensor);
  const auto count = static_cast<int64_t>(x.values.size());
  if (is_index_input(tensor) && c.values == "equal") {
    std::fill(x.values.begin(), x.values.end(), 0.5F);
    return x;
  }
  if (is_index_input(tensor) && c.values == "ties") {
    for (int64_t i = 0; i < count; ++i) {
      x.values[static_cast<size_t>(i)] = static_cast<float>((hashes(i) >> 33) % 3) - 1.0F;
    }
    return x;
  }
  if (tensor == TensorId::index_q && c.values == "overlap") {
    fill_overlapping_queries(hashes, &x);
  } else {
    for (int64_t i = 0; i < count; ++i) x.values[static_cast<size_t>(i)] = scaled_bell(hashes(i), -15);
    if (tensor == TensorId::index_k && c.values == "overlap" && !c.paged) add_sinks(c, &x);
  }
  if ((tensor == TensorId::q || tensor == TensorId::index_q) && c.amplitude != 1) {
    for (float& value : x.values) value = static_cast<float>(value * c.amplitude);
  }
  return x;
}

void apply_edits(const Case& c, TensorId tensor, Floats* x) {
  for (const Edit& edit : c.edits) {
    if (edit.tensor != tensor_name(tensor)) continue;
    const Range heads = edit.heads.value_or(Range{0, x->heads}), dims = edit.dims.value_or(Range{0, x->dim});
    for (const Range& rows : edit.rows) {
      for (int64_t row = rows[0]; row < std::min(rows[1], x->rows); ++row) {
        for (int64_t head = heads[0]; head < heads[1]; ++head) {
          for (int64_t d = dims[0]; d < dims[1]; ++d) x->at(row, head, d) = edit.value;
        }
      }
    }
  }
}

void poison(const Case& c, TensorId tensor, Floats* x) {
  const bool infinite = tensor == TensorId::v && dtype_of(c, tensor) != OPENMSA_FLOAT8_E4M3;
  const float value = infinite ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  for (const Range& rows : c.invisible) {
    std::fill(x->values.begin() + rows[0] * x->row_size(), x->values.begin() + rows[1] * x->row_size(), value);
  }
}

// The selection that the case's caller made.
int64_t caller_block(const Case& c, uint64_t hash, uint64_t row_hash, int64_t blocks, int64_t t) {
  const int64_t topk = c.topk;
  const auto pick = [&](uint64_t bits) {  // a visible block, or block 0 where there is none
    return static_cast<int64_t>(bits % static_cast<uint64_t>(std::max<int64_t>(blocks, 1)));
  };
  const std::string& kind = c.selection;
  if (kind == "random") return static_cast<int64_t>(hash % static_cast<uint64_t>(blocks + 3)) - 1;
  if (kind == "none") return -1;
  if (kind == "leading") return t < (topk + 1) / 2 ? -1 : pick(hash);
  if (kind == "middle") return t >= topk / 4 && t < 3 * topk / 4 ? -1 : pick(hash);
  if (kind == "trailing") return t >= topk / 2 ? -1 : pick(hash);
  if (kind == "reversed") return blocks - 1 - t;
  if (kind == "ascending") return t;
  if (kind == "duplicates") return pick(row_hash);
  if (kind == "local_first") return t == 0 ? blocks - 1 : pick(hash);
  if (kind == "first_block") return t == 0 ? 0 : -1;
  if (kind == "garbage") {
    const bool wide = c.indices_dtype == OPENMSA_INT64;
    using Narrow = std::numeric_limits<int32_t>;
    using Wide = std::numeric_limits<int64_t>;
    switch (hash % 6) {
      case 0:
        return wide ? Wide::min() : Narrow::min();
      case 1:
        return wide ? Wide::max() : Narrow::max();
      case 2:
        return wide ? int64_t{1} << 32 : -2;
      case 3:
        return blocks;
      default:
        return pick(hash >> 8);
    }
  }
  throw std::runtime_error("unknown selection " + kind);
}

void fill_caller_selection(const Case& c, HostTensor* indices) {
  const std::vector<int64_t> keys = visible_keys(c);
  const Hashes hashes(c, TensorId::indices);
  const Tensor view = indices->tensor();
  for (int64_t head = 0; head < c.heads_index; ++head) {
    for (int64_t query = 0; query < c.tokens_q; ++query) {
      const int64_t blocks = (keys[static_cast<size_t>(query)] + c.block_size - 1) / c.block_size;
      const int64_t row = (head * c.tokens_q + query) * c.topk;
      for (int64_t t = 0; t < c.topk; ++t) {
        host::store_index(view, head, query, t, caller_block(c, hashes(row + t), hashes(row), blocks, t));
      }
    }
  }
}

// Inputs of combine: some splits are empty for some rows, and some rows in all splits.
bool split_is_empty(const Case& c, int64_t split, int64_t head, int64_t query) {
  const Hashes hashes(c, TensorId::lses);
  return (hashes((split * c.heads_q + head) * c.tokens_q + query) >> 60) % 4 == 0 || query % 5 == 3;
}

void fill_splits(const Case& c, TensorId tensor, HostTensor* split) {
  const Hashes hashes(c, tensor);
  const Tensor all = split->tensor();
  std::vector<double> row(static_cast<size_t>(c.dim_v));
  for (int64_t s = 0; s < c.splits; ++s) {
    for (int64_t query = 0; query < c.tokens_q; ++query) {
      for (int64_t head = 0; head < c.heads_q; ++head) {
        const bool empty = split_is_empty(c, s, head, query);
        if (tensor == TensorId::lses) {
          const float lse = scaled_bell(hashes((s * c.heads_q + head) * c.tokens_q + query), -14);
          const float stored = empty ? -std::numeric_limits<float>::infinity() : lse;
          std::memcpy(split->element(s, head, query), &stored, sizeof(stored));
          continue;
        }
        const int64_t first = ((s * c.tokens_q + query) * c.heads_q + head) * c.dim_v;
        for (int64_t d = 0; d < c.dim_v; ++d) {
          row[static_cast<size_t>(d)] = empty ? 0.0 : static_cast<double>(scaled_bell(hashes(first + d), -15));
        }
        reference::Rows(all).store(s * c.tokens_q + query, head, row.data());
      }
    }
  }
}

// ---- Strides --------------------------------------------------------------------------------------------------------

// Empty = row-major.
std::vector<int64_t> strides_of(const Case& c, TensorId tensor) {
  const std::vector<int64_t> shape = shape_of(c, tensor);
  const std::string& layout = c.paged ? c.paged->layout : c.layout;
  if (layout == "contiguous") return {};
  if (tensor == TensorId::lse || tensor == TensorId::index_lse) return {shape[1] + 4, 1};
  if (tensor == TensorId::indices) {
    const int64_t tokens = shape[1], topk = shape[2];
    const bool token_major = layout == "head_major" || layout == "fused" || layout == "interleaved";
    if (token_major) return {topk, shape[0] * topk, 1};
    return {tokens * (topk + 3), topk + 3, 1};
  }
  const bool is_key = tensor == TensorId::k || tensor == TensorId::v || tensor == TensorId::index_k;
  if (c.paged) {
    if (!is_key) return {};
    const int64_t block = shape[1], heads = shape[2], dim = shape[3];
    const int64_t width = tensor == TensorId::index_k ? 2 * dim : c.dim + c.dim_v;
    if (layout == "interleaved") return {block * heads * width, heads * width, width, 1};
    if (layout == "head_major") return {heads * block * width, width, block * width, 1};
    if (layout == "page_stride") return {3 * block * heads * dim, heads * dim, dim, 1};
    if (layout == "odd_stride") return {block * (heads * dim + 1), heads * dim + 1, dim, 1};
    if (layout == "negative") return {-block * heads * dim, heads * dim, dim, 1};
    throw std::runtime_error("unknown layout " + layout);
  }
  const bool is_gradient = tensor == TensorId::d_out || tensor == TensorId::out;
  if (!is_key && !is_gradient && tensor != TensorId::q && tensor != TensorId::index_q) return {};
  const int64_t rows = shape[0], heads = shape[1], dim = shape[2];
  if (layout == "fused") {
    const int64_t width = is_index_input(tensor) ? (c.heads_index + c.heads_index_k) * c.dim_index
                                                 : (c.heads_q + c.heads_kv) * c.dim + c.heads_kv * c.dim_v;
    return {std::max(width, heads * dim), dim, 1};
  }
  if (layout == "head_major") return {dim, rows * dim, 1};
  if (layout == "padded_heads") return {heads * (dim + 16), dim + 16, 1};
  if (layout == "negative") return {-heads * dim, dim, 1};
  if (layout == "zero_stride") return is_gradient ? std::vector<int64_t>{} : std::vector<int64_t>{dim, 0, 1};
  if (layout == "odd_stride") return {heads * dim + 1, dim, 1};
  throw std::runtime_error("unknown layout " + layout);
}

bool contains(const std::vector<std::string>& list, const char* item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

}  // namespace

const char* tensor_name(TensorId tensor) { return kNames[static_cast<size_t>(tensor)]; }

TensorId tensor_named(const std::string& name) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) return static_cast<TensorId>(i);
  }
  throw std::runtime_error("no tensor is named " + name);
}

bool Case::has_tag(const char* tag) const { return contains(tags, tag); }
bool Case::runs(const char* op) const { return contains(ops, op); }

const std::vector<Case>& case_table() {
  static const std::vector<Case> table = [] {
    const json file = read_json(OPENMSA_CASES);
    std::vector<Case> cases;
    for (const json& value : file.at("cases")) cases.push_back(parse_case(value));
    return cases;
  }();
  return table;
}

std::vector<SequenceKeys> sequence_keys(const Case& c) {
  std::vector<SequenceKeys> result;
  const auto clamp = [](int64_t x, int64_t high) { return std::clamp<int64_t>(x, 0, high); };
  const size_t batch = c.paged ? c.paged->seq_lens.size() : c.packed() ? c.cu_seqlens_q->size() - 1 : 1;
  for (size_t b = 0; b < batch; ++b) {
    SequenceKeys s;
    s.first_query = c.packed() ? clamp((*c.cu_seqlens_q)[b], c.tokens_q) : 0;
    const int64_t query_end = c.packed() ? clamp((*c.cu_seqlens_q)[b + 1], c.tokens_q) : c.tokens_q;
    s.queries = std::max<int64_t>(0, query_end - s.first_query);
    if (c.paged) {
      const int64_t length = clamp(c.paged->seq_lens[b], c.paged->max_pages * c.block_size);
      for (int64_t j = 0; j < length; ++j) {
        const int64_t page = c.paged->block_table[b][static_cast<size_t>(j / c.block_size)];
        const bool inside = page >= 0 && page < c.paged->pages;
        s.rows.push_back(inside ? page * c.block_size + j % c.block_size : -1);
      }
    } else {
      int64_t row = c.packed() ? clamp((*c.cu_seqlens_k)[b], c.tokens_k) : 0;
      if (c.k_starts) row = clamp((*c.k_starts)[b], c.tokens_k);
      const int64_t end = c.packed() ? clamp((*c.cu_seqlens_k)[b + 1], c.tokens_k) : c.tokens_k;
      for (; row < end; ++row) s.rows.push_back(row);
    }
    result.push_back(std::move(s));
  }
  return result;
}

std::vector<int64_t> visible_keys(const Case& c) {
  std::vector<int64_t> counts(static_cast<size_t>(c.tokens_q), 0);
  for (const SequenceKeys& s : sequence_keys(c)) {
    for (int64_t i = 0; i < s.queries; ++i) {
      const int64_t count = static_cast<int64_t>(s.rows.size()) - s.queries + i + 1;
      counts[static_cast<size_t>(s.first_query + i)] = std::max<int64_t>(0, count);
    }
  }
  return counts;
}

std::vector<int64_t> shape_of(const Case& c, TensorId tensor) {
  const auto keys = [&](int64_t heads, int64_t dim) {
    if (c.paged) return std::vector<int64_t>{c.paged->pages, c.block_size, heads, dim};
    return std::vector<int64_t>{c.tokens_k, heads, dim};
  };
  switch (tensor) {
    case TensorId::q:
      return {c.tokens_q, c.heads_q, c.dim};
    case TensorId::k:
      return keys(c.heads_kv, c.dim);
    case TensorId::v:
      return keys(c.heads_kv, c.dim_v);
    case TensorId::index_q:
      return {c.tokens_q, c.heads_index, c.dim_index};
    case TensorId::index_k:
      return keys(c.heads_index_k, c.dim_index);
    case TensorId::new_k:
      return {c.tokens_q, c.heads_kv, c.dim};
    case TensorId::new_v:
      return {c.tokens_q, c.heads_kv, c.dim_v};
    case TensorId::new_index_k:
      return {c.tokens_q, c.heads_index_k, c.dim_index};
    case TensorId::indices:
      return {c.heads_index, c.tokens_q, c.topk};
    case TensorId::outs:
      return {c.splits, c.tokens_q, c.heads_q, c.dim_v};
    case TensorId::lses:
      return {c.splits, c.heads_q, c.tokens_q};
    case TensorId::d_out:
    case TensorId::out:
      return {c.tokens_q, c.heads_q, c.dim_v};
    case TensorId::lse:
      return {c.heads_q, c.tokens_q};
    case TensorId::index_lse:
      return {c.heads_index, c.tokens_q};
  }
  throw std::runtime_error("unknown tensor");
}

DataType dtype_of(const Case& c, TensorId tensor) {
  switch (tensor) {
    case TensorId::k:
    case TensorId::v:
      return c.paged ? c.paged->cache_dtype : c.dtype;
    case TensorId::index_q:
    case TensorId::index_k:
    case TensorId::new_index_k:
      return c.index_dtype;
    case TensorId::indices:
      return c.indices_dtype;
    case TensorId::lse:
    case TensorId::index_lse:
    case TensorId::lses:
      return OPENMSA_FLOAT32;
    default:
      return c.dtype;
  }
}

HostTensor make_input(const Case& c, TensorId tensor, bool poisoned) {
  HostTensor result = make_host_tensor(dtype_of(c, tensor), shape_of(c, tensor), strides_of(c, tensor), kFill);
  if (tensor == TensorId::indices) {
    fill_caller_selection(c, &result);
    return result;
  }
  if (tensor == TensorId::outs || tensor == TensorId::lses) {
    fill_splits(c, tensor, &result);
    return result;
  }
  Floats x = make_floats(c, tensor);
  apply_edits(c, tensor, &x);
  const bool is_key = tensor == TensorId::k || tensor == TensorId::v || tensor == TensorId::index_k;
  if (c.layout == "zero_stride" && (is_key || tensor == TensorId::q || tensor == TensorId::index_q)) {
    for (int64_t row = 0; row < x.rows; ++row) {
      for (int64_t head = 1; head < x.heads; ++head) {
        for (int64_t d = 0; d < x.dim; ++d) x.at(row, head, d) = x.at(row, 0, d);
      }
    }
  }
  if (poisoned && is_key) poison(c, tensor, &x);
  const reference::Rows rows(result.tensor());
  std::vector<double> row(static_cast<size_t>(x.dim));
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t head = 0; head < x.heads; ++head) {
      for (int64_t d = 0; d < x.dim; ++d) row[static_cast<size_t>(d)] = static_cast<double>(x.at(i, head, d));
      rows.store(i, head, row.data());
    }
  }
  return result;
}

HostTensor make_output(const Case& c, TensorId tensor, unsigned char fill) {
  // An output must not overlap itself.
  const std::vector<int64_t> strides =
      c.layout == "zero_stride" && shape_of(c, tensor).size() == 3 ? std::vector<int64_t>{} : strides_of(c, tensor);
  return make_host_tensor(dtype_of(c, tensor), shape_of(c, tensor), strides, fill);
}

HostTensor make_int32(const std::vector<int32_t>& values) {
  HostTensor result = make_host_tensor(OPENMSA_INT32, {static_cast<int64_t>(values.size())}, {}, kFill);
  if (!values.empty()) std::memcpy(result.element(0), values.data(), values.size() * sizeof(int32_t));
  return result;
}

HostTensor make_scalar(float value) {
  HostTensor result = make_host_tensor(OPENMSA_FLOAT32, {}, {}, kFill);
  std::memcpy(result.element(), &value, sizeof(value));
  return result;
}

HostTensor make_block_table(const Pages& pages) {
  const auto batch = static_cast<int64_t>(pages.block_table.size());
  HostTensor result = make_host_tensor(OPENMSA_INT32, {batch, pages.max_pages}, {pages.table_stride, 1}, kFill);
  for (int64_t b = 0; b < batch; ++b) {
    const std::vector<int32_t>& row = pages.block_table[static_cast<size_t>(b)];
    if (!row.empty()) std::memcpy(result.element(b, 0), row.data(), row.size() * sizeof(int32_t));
  }
  return result;
}

std::string checksum(const HostTensor& tensor) {
  const std::vector<unsigned char> bytes = packed_bytes(tensor);
  const auto size = static_cast<size_t>(dtype_size(tensor.view.dtype));
  uint64_t sum = 0, odd = 1;
  for (size_t at = 0; at < bytes.size(); at += size, odd += 2) {
    uint64_t bits = 0;
    for (size_t byte = 0; byte < size; ++byte) bits |= static_cast<uint64_t>(bytes[at + byte]) << (8 * byte);
    sum += bits * odd;
  }
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(sum));
  return text;
}

std::vector<std::pair<std::string, std::string>> expected_checksums(const std::string& case_name) {
  static const json all = read_json(checksums_path());
  std::vector<std::pair<std::string, std::string>> result;
  for (const auto& [name, value] : all.at(case_name).items()) result.emplace_back(name, value.get<std::string>());
  return result;
}

}  // namespace openmsa::cases
