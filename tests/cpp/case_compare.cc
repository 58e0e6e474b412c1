#include "cpp/case_compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "api/dtype.h"
#include "host/elements.h"
#include "host/sequences.h"
#include "reference/select.h"
#include "reference/tensor_access.h"

namespace openmsa::cases {
namespace {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

double decode_element(int32_t dtype, const unsigned char* bytes) {
  const auto as = [&]<typename Stored>(Stored stored) {
    std::memcpy(&stored, bytes, sizeof(stored));
    return stored;
  };
  switch (dtype) {
    case OPENMSA_FLOAT32:
      return static_cast<double>(as(float{}));
    case OPENMSA_FLOAT16:
      return static_cast<double>(float16_to_float(as(uint16_t{})));
    case OPENMSA_BFLOAT16:
      return static_cast<double>(bfloat16_to_float(as(uint16_t{})));
    default:
      return static_cast<double>(float8_e4m3_to_float(as(uint8_t{})));
  }
}

// "[2, 0, 17]" for an element's number in row-major order.
std::string place(const HostTensor& tensor, size_t element) {
  std::string text;
  auto left = static_cast<int64_t>(element);
  for (int32_t axis = tensor.view.rank; axis-- > 0;) {
    const int64_t length = std::max<int64_t>(tensor.view.shape[axis], 1);
    text = std::to_string(left % length) + (text.empty() ? "" : ", ") + text;
    left /= length;
  }
  return "[" + text + "]";
}

double largest_norm(const Tensor& tensor, const std::vector<int64_t>& rows) {
  const reference::Rows access(tensor);
  std::vector<double> row(static_cast<size_t>(access.dim()));
  double largest = 0;
  for (int64_t r : rows) {
    for (int64_t head = 0; head < access.heads(); ++head) {
      access.load(r, head, row.data());
      double sum = 0;
      for (double x : row) sum += std::isfinite(x) ? x * x : 0.0;
      largest = std::max(largest, sum);
    }
  }
  return std::sqrt(largest);
}

// One row of a selection against its block scores (NaN = invisible).
std::string selection_fault(const int64_t* row, const std::vector<double>& scores, const SelectParams& params,
                            double margin) {
  const auto blocks = static_cast<int64_t>(scores.size());
  const auto visible = [&](int64_t b) { return b >= 0 && b < blocks && !std::isnan(scores[static_cast<size_t>(b)]); };
  const auto score = [&](int64_t b) { return scores[static_cast<size_t>(b)]; };
  std::vector<int64_t> local, init, rest;
  for (int64_t b = blocks - 1; b >= 0; --b) {
    if (!visible(b)) continue;
    if (b >= blocks - params.local_blocks) {
      local.push_back(b);
    } else if (b < params.init_blocks) {
      init.push_back(b);
    } else {
      rest.push_back(b);
    }
  }
  std::reverse(init.begin(), init.end());
  const auto count = std::min<int64_t>(params.topk, static_cast<int64_t>(local.size() + init.size() + rest.size()));
  local.resize(std::min(local.size(), static_cast<size_t>(params.topk)));
  init.resize(std::min(init.size(), static_cast<size_t>(params.topk) - local.size()));
  std::reverse(local.begin(), local.end());

  for (int64_t slot = count; slot < params.topk; ++slot) {
    if (row[slot] != -1) return "slot " + std::to_string(slot) + " is " + std::to_string(row[slot]) + ", expected -1";
  }
  const std::set<int64_t> chosen(row, row + count);
  if (static_cast<int64_t>(chosen.size()) != count) return "a block repeats";
  for (int64_t b : chosen) {
    if (!visible(b)) return "block " + std::to_string(b) + " is not visible";
  }
  const auto scored = count - static_cast<int64_t>(local.size());
  if (!std::equal(local.begin(), local.end(), row + scored)) return "the local blocks do not stand last, ascending";
  for (int64_t b : init) {
    if (!chosen.contains(b)) return "init block " + std::to_string(b) + " is missing";
  }
  // a may stand before b: its score is higher, or as high within the margin. Equal scores go by number.
  const auto may_precede = [&](int64_t a, int64_t b) {
    if (score(a) == score(b)) return a < b;
    return score(a) > score(b) || score(a) >= score(b) - margin;
  };
  for (int64_t slot = 0; slot + 1 < scored; ++slot) {
    if (!may_precede(row[slot], row[slot + 1])) {
      return "block " + std::to_string(row[slot]) + " stands before " + std::to_string(row[slot + 1]);
    }
  }
  const std::set<int64_t> forced_init(init.begin(), init.end());
  for (int64_t b : rest) {
    if (chosen.contains(b)) continue;
    for (int64_t slot = 0; slot < scored; ++slot) {
      if (!forced_init.contains(row[slot]) && !may_precede(row[slot], b)) {
        return "block " + std::to_string(row[slot]) + " is chosen before block " + std::to_string(b);
      }
    }
  }
  return "";
}

}  // namespace

std::vector<double> decode(const HostTensor& tensor) {
  const std::vector<unsigned char> bytes = packed_bytes(tensor);
  const auto size = static_cast<size_t>(dtype_size(tensor.view.dtype));
  std::vector<double> values(bytes.size() / size);
  for (size_t i = 0; i < values.size(); ++i) values[i] = decode_element(tensor.view.dtype, bytes.data() + i * size);
  return values;
}

std::vector<int64_t> decode_blocks(const HostTensor& indices) {
  std::vector<int64_t> blocks;
  HostTensor copy = indices;
  const Tensor view = copy.tensor();
  for (int64_t head = 0; head < view.shape[0]; ++head) {
    for (int64_t query = 0; query < view.shape[1]; ++query) {
      for (int64_t slot = 0; slot < view.shape[2]; ++slot) {
        blocks.push_back(host::load_index(view, head, query, slot));
      }
    }
  }
  return blocks;
}

AssertionResult same_bits(const HostTensor& got, const HostTensor& want) {
  const std::vector<unsigned char> a = packed_bytes(got), b = packed_bytes(want);
  if (a.size() != b.size())
    return AssertionFailure() << "sizes differ: " << a.size() << " and " << b.size() << " bytes";
  const auto difference = std::mismatch(a.begin(), a.end(), b.begin());
  if (difference.first == a.end()) return AssertionSuccess();
  const auto element =
      static_cast<size_t>(difference.first - a.begin()) / static_cast<size_t>(dtype_size(got.view.dtype));
  return AssertionFailure() << "bits differ first at " << place(got, element);
}

AssertionResult same_bits(const Results& got, const Results& want) {
  for (const auto& [name, tensor] : want) {
    if (const AssertionResult result = same_bits(got.at(name), tensor); !result) {
      return AssertionFailure() << name << ": " << result.message();
    }
  }
  return AssertionSuccess();
}

AssertionResult close(const HostTensor& got, const HostTensor& want, double relative, double floor) {
  const std::vector<double> a = decode(got), b = decode(want);
  if (a.size() != b.size()) return AssertionFailure() << a.size() << " elements, expected " << b.size();
  double difference = 0, norm = 0, largest = floor;
  size_t finite = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    if (std::isfinite(b[i])) largest = std::max(largest, std::abs(b[i]));
  }
  for (size_t i = 0; i < b.size(); ++i) {
    if (!std::isfinite(b[i])) {
      const bool same = std::isnan(b[i]) ? std::isnan(a[i]) : a[i] == b[i];
      if (!same) return AssertionFailure() << "got " << a[i] << " at " << place(got, i) << ", expected " << b[i];
      continue;
    }
    const double off = std::abs(a[i] - b[i]);
    if (!(off <= 8 * relative * largest)) {
      return AssertionFailure() << "got " << a[i] << " at " << place(got, i) << ", expected " << b[i];
    }
    difference += off * off;
    norm += b[i] * b[i];
    ++finite;
  }
  norm = std::max(norm, floor * floor * static_cast<double>(finite));
  if (difference > relative * relative * norm) {
    return AssertionFailure() << "relative norm of the difference is " << std::sqrt(difference / norm) << ", allowed "
                              << relative;
  }
  return AssertionSuccess();
}

double tolerance(const Case& c, const std::string& result) {
  const auto main = [&](double fp32, double fp16, double bf16) {
    return c.dtype == OPENMSA_FLOAT32 ? fp32 : c.dtype == OPENMSA_FLOAT16 ? fp16 : bf16;
  };
  const auto index = [&](double fp32, double fp16, double bf16) {
    return c.index_dtype == OPENMSA_FLOAT32 ? fp32 : c.index_dtype == OPENMSA_FLOAT16 ? fp16 : bf16;
  };
  if (result == "out") return main(5e-5, 2e-3, 8e-3);
  if (result == "d_q" || result == "d_k" || result == "d_v") return 2 * main(5e-5, 2e-3, 8e-3);
  if (result == "d_index_q" || result == "d_index_k") {
    return 2.5 * std::max(index(5e-5, 2e-3, 8e-3), main(5e-5, 2e-3, 8e-3));
  }
  if (result == "index_lse") return index(5e-5, 2e-3, 2e-3);
  if (result == "kl" || result == "backward_kl") return std::max(main(2e-4, 5e-3, 5e-3), index(2e-4, 5e-3, 5e-3));
  return main(5e-5, 2e-3, 2e-3);  // lse, share, best
}

double floor_of(const Case& c, const std::string& result) {
  if (result != "d_index_q" && result != "d_index_k") return 0;
  const double scale = c.index_scale.value_or(1.0 / std::sqrt(static_cast<double>(c.dim_index)));
  return 1e-3 * static_cast<double>(kUpstreamOfKl) * scale /
         static_cast<double>(std::max<int64_t>(c.heads_index * c.tokens_q, 1));
}

AssertionResult close(const Case& c, const Results& got, const Results& want) {
  for (const auto& [name, tensor] : want) {
    if (name == "indices") continue;
    AssertionResult result = AssertionSuccess();
    if (name == "kl" || name == "backward_kl") {
      const double a = decode(got.at(name))[0], b = decode(tensor)[0];
      const bool right = std::isfinite(b) ? std::abs(a - b) <= tolerance(c, name) * std::max(b, 0.05)
                         : std::isnan(b)  ? std::isnan(a)
                                          : a == b;
      if (!right) result = AssertionFailure() << "got " << a << ", expected " << b;
    } else {
      result = close(got.at(name), tensor, tolerance(c, name), floor_of(c, name));
    }
    if (!result) return AssertionFailure() << name << ": " << result.message();
  }
  return AssertionSuccess();
}

AssertionResult valid_selection(const HostTensor& got, const HostTensor& want, const SelectParams& params,
                                double margin) {
  const std::vector<int64_t> a = decode_blocks(got), b = decode_blocks(want);
  const int64_t heads = got.view.shape[0], tokens = got.view.shape[1], topk = params.topk;
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t query = 0; query < tokens; ++query) {
      const int64_t at = (head * tokens + query) * topk;
      if (std::equal(a.begin() + at, a.begin() + at + topk, b.begin() + at)) continue;
      const std::string fault =
          selection_fault(a.data() + at, reference::block_scores(params, head, query), params, margin);
      if (!fault.empty()) return AssertionFailure() << "index head " << head << ", query " << query << ": " << fault;
    }
  }
  return AssertionSuccess();
}

double selection_margin(const Inputs& in) {
  std::vector<int64_t> queries, keys;
  for (const SequenceKeys& s : sequence_keys(in.c)) {
    for (int64_t i = 0; i < s.queries; ++i) queries.push_back(s.first_query + i);
    if (s.queries > 0)
      std::copy_if(s.rows.begin(), s.rows.end(), std::back_inserter(keys), [](int64_t r) { return r >= 0; });
  }
  const double scale = in.c.index_scale.value_or(1.0 / std::sqrt(static_cast<double>(in.c.dim_index)));
  return 5e-6 * scale * largest_norm(*in.index_q.tensor(), queries) * largest_norm(*in.index_k.tensor(), keys);
}

}  // namespace openmsa::cases
