#include "cpp/sm90_attend_problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "api/dtype.h"
#include "cpp/case_compare.h"

namespace openmsa::testing {
namespace {

constexpr unsigned char kNanFill = 0xff, kOutputFill = 0x55;

const int32_t* int32_data(const PlacedTensor& tensor) {
  return tensor.present() ? static_cast<const int32_t*>(tensor.tensor()->data) : nullptr;
}

int64_t batch_of(const AttendOptions& o) {
  if (o.pages > 0) return static_cast<int64_t>(o.seq_lens.size());
  return o.cu_seqlens_q.empty() ? 1 : static_cast<int64_t>(o.cu_seqlens_q.size()) - 1;
}

int64_t clamp(int64_t value, int64_t total) { return std::clamp<int64_t>(value, 0, total); }

// The sequence of a query and its keys, as the definition clamps offsets; -1 for a row of none.
struct Owner {
  int64_t number = -1, k_begin = 0, keys = 0, visible = 0;
};

Owner owner_of(const AttendOptions& o, int64_t query) {
  for (int64_t b = 0; b < batch_of(o); ++b) {
    const auto at = static_cast<size_t>(b);
    const int64_t begin = o.cu_seqlens_q.empty() ? 0 : clamp(o.cu_seqlens_q[at], o.tokens_q);
    const int64_t end = o.cu_seqlens_q.empty() ? o.tokens_q : clamp(o.cu_seqlens_q[at + 1], o.tokens_q);
    if (query < begin || query >= end) continue;
    Owner owner{b, 0, o.tokens_k, 0};
    if (o.pages > 0) {
      owner.keys = clamp(o.seq_lens[at], o.max_pages * o.block_size);
    } else if (!o.cu_seqlens_k.empty()) {
      owner.k_begin = clamp(o.k_starts.empty() ? o.cu_seqlens_k[at] : o.k_starts[at], o.tokens_k);
      owner.keys = std::max<int64_t>(clamp(o.cu_seqlens_k[at + 1], o.tokens_k) - owner.k_begin, 0);
    }
    owner.visible = std::max<int64_t>(owner.keys - (end - query) + 1, 0);
    return owner;
  }
  return {};
}

// Rows of k and v (paged: page x block_size + row) that some query sees.
std::vector<bool> seen_rows(const AttendOptions& o) {
  const int64_t rows = o.pages > 0 ? o.pages * o.block_size : o.tokens_k;
  std::vector<bool> seen(static_cast<size_t>(rows));
  for (int64_t query = 0; query < o.tokens_q; ++query) {
    const Owner owner = owner_of(o, query);
    for (int64_t j = 0; j < owner.visible; ++j) {
      int64_t row = owner.k_begin + j;
      if (o.pages > 0) {
        const int64_t page = o.block_table[static_cast<size_t>(owner.number * o.max_pages + j / o.block_size)];
        if (page < 0 || page >= o.pages) continue;
        row = page * o.block_size + j % o.block_size;
      }
      seen[static_cast<size_t>(row)] = true;
    }
  }
  return seen;
}

void fill_rows(HostTensor& tensor, const AttendOptions& o, const std::vector<bool>& seen, const Values& values,
               std::mt19937_64& random) {
  const bool paged = o.pages > 0;
  for (size_t row = 0; row < seen.size(); ++row) {
    if (!seen[row]) continue;
    const auto number = static_cast<int64_t>(row);
    for (int64_t head = 0; head < o.kv_heads; ++head) {
      for (int64_t d = 0; d < o.dim; ++d) {
        if (paged) {
          set_element(tensor, values(random), number / o.block_size, number % o.block_size, head, d);
        } else {
          set_element(tensor, values(random), number, head, d);
        }
      }
    }
  }
}

}  // namespace

std::vector<int64_t> distinct_blocks(std::mt19937_64& random, int64_t blocks, int64_t topk) {
  std::vector<int64_t> chosen;
  if (blocks == 0) return chosen;
  chosen.push_back(blocks - 1);
  while (static_cast<int64_t>(chosen.size()) < std::min(topk, blocks)) {
    const auto block = static_cast<int64_t>(random() % static_cast<uint64_t>(blocks));
    if (std::find(chosen.begin(), chosen.end(), block) == chosen.end()) chosen.push_back(block);
  }
  std::reverse(chosen.begin(), chosen.end());
  return chosen;
}

std::vector<int64_t> hostile_blocks(std::mt19937_64& random, int64_t blocks, int64_t topk) {
  constexpr int64_t kLow = std::numeric_limits<int32_t>::min(), kHigh = std::numeric_limits<int32_t>::max();
  const int64_t garbage[] = {kLow, -2, -1, blocks, blocks + 1, kHigh / 64, kHigh};
  std::vector<int64_t> chosen;
  for (int64_t slot = 0; slot < topk; ++slot) {
    const bool sound = blocks > 0 && random() % 3 != 0;
    chosen.push_back(sound ? static_cast<int64_t>(random() % static_cast<uint64_t>(blocks))
                           : garbage[random() % std::size(garbage)]);
  }
  return chosen;
}

std::string describe(const AttendOptions& o) {
  return "type " + std::to_string(o.dtype) + ", dim " + std::to_string(o.dim) + ", block " +
         std::to_string(o.block_size) + ", heads " + std::to_string(o.index_heads) + " x " + std::to_string(o.group) +
         " over " + std::to_string(o.kv_heads) + ", topk " + std::to_string(o.topk) + ", Tq " +
         std::to_string(o.tokens_q) + ", Tk " + std::to_string(o.tokens_k) + ", pages " + std::to_string(o.pages);
}

AttendOptions in_pages(AttendOptions o, const std::vector<int32_t>& lengths, const std::vector<int32_t>& queries) {
  const Options pages = paged_options(lengths, queries, o.block_size);
  o.tokens_q = pages.tokens_q;
  o.tokens_k = 0;
  o.cu_seqlens_q = pages.cu_seqlens_q;
  o.pages = pages.pages;
  o.max_pages = pages.max_pages;
  o.block_table = pages.block_table;
  o.seq_lens = pages.seq_lens;
  o.cu_seqlens_k.clear();
  o.k_starts.clear();
  o.cache_dtype = o.dtype;
  return o;
}

AttendProblem::AttendProblem(const AttendOptions& attend_options, const Blocks& blocks, const Values& values,
                             uint64_t seed)
    : options(attend_options),
      cu_seqlens_q(int32_tensor(options.cu_seqlens_q)),
      cu_seqlens_k(int32_tensor(options.cu_seqlens_k)),
      k_starts(int32_tensor(options.k_starts)),
      block_table(int32_tensor(options.block_table)),
      seq_lens(int32_tensor(options.seq_lens)) {
  const AttendOptions& o = options;
  std::mt19937_64 random(seed);
  q = cases::make_host_tensor(o.dtype, {o.tokens_q, o.index_heads * o.group, o.dim}, {}, kNanFill);
  for (int64_t query = 0; query < o.tokens_q; ++query) {
    if (visible(query) == 0) continue;
    for (int64_t head = 0; head < o.index_heads * o.group; ++head) {
      for (int64_t d = 0; d < o.dim; ++d) set_element(q, values(random), query, head, d);
    }
  }
  const std::vector<int64_t> shape = o.pages > 0 ? std::vector<int64_t>{o.pages, o.block_size, o.kv_heads, o.dim}
                                                 : std::vector<int64_t>{o.tokens_k, o.kv_heads, o.dim};
  const std::vector<bool> seen = seen_rows(o);
  for (HostTensor* const tensor : {&k, &v}) {
    *tensor = cases::make_host_tensor(o.pages > 0 ? o.cache_dtype : o.dtype, shape, {}, kNanFill);
    fill_rows(*tensor, o, seen, values, random);
  }
  indices = cases::make_host_tensor(o.indices_dtype, {o.index_heads, o.tokens_q, o.topk}, {}, kNanFill);
  for (int64_t head = 0; head < o.index_heads; ++head) {
    for (int64_t query = 0; query < o.tokens_q; ++query) {
      const int64_t count = (visible(query) + o.block_size - 1) / o.block_size;
      const std::vector<int64_t> entries = blocks(random, count, o.topk);
      for (size_t slot = 0; slot < entries.size(); ++slot) {
        unsigned char* const at = indices.element(head, query, static_cast<int64_t>(slot));
        if (o.indices_dtype == OPENMSA_INT64) {
          std::memcpy(at, &entries[slot], sizeof(int64_t));
        } else {
          const auto narrow = static_cast<int32_t>(entries[slot]);
          std::memcpy(at, &narrow, sizeof(int32_t));
        }
      }
    }
  }
}

int64_t AttendProblem::visible(int64_t query) const { return owner_of(options, query).visible; }

PlacedAttend::PlacedAttend(DeviceMemory& memory, const AttendProblem& problem)
    : q(memory, problem.q),
      k(memory, problem.k),
      v(memory, problem.v),
      indices(memory, problem.indices),
      cu_seqlens_q(memory, problem.cu_seqlens_q),
      cu_seqlens_k(memory, problem.cu_seqlens_k),
      k_starts(memory, problem.k_starts),
      block_table(memory, problem.block_table),
      seq_lens(memory, problem.seq_lens),
      options_(problem.options),
      memory_(memory) {
  const int64_t heads = options_.index_heads * options_.group;
  out_ = PlacedTensor(memory, cases::make_host_tensor(options_.dtype, {options_.tokens_q, heads, options_.dim},
                                                      problem.out_strides, kOutputFill));
  if (options_.with_lse) {
    lse_ = PlacedTensor(
        memory, cases::make_host_tensor(OPENMSA_FLOAT32, {heads, options_.tokens_q}, problem.lse_strides, kOutputFill));
  }
}

void PlacedAttend::clear_outputs() {
  for (PlacedTensor* const output : {&out_, &lse_}) {
    if (!output->present()) continue;
    const HostTensor& image = output->image();
    memory_.upload(static_cast<unsigned char*>(output->tensor()->data) - image.offset, image.storage.data(),
                   static_cast<int64_t>(image.storage.size()));
  }
}

AttendParams PlacedAttend::params() const {
  AttendParams params;
  SequenceLayout& layout = params.layout;
  layout.batch = batch_of(options_);
  layout.tokens_q = options_.tokens_q;
  layout.tokens_k = options_.pages > 0 ? options_.pages * options_.block_size : options_.tokens_k;
  layout.cu_seqlens_q = int32_data(cu_seqlens_q);
  layout.cu_seqlens_k = int32_data(cu_seqlens_k);
  layout.k_starts = int32_data(k_starts);
  layout.paged = options_.pages > 0;
  layout.block_table = int32_data(block_table);
  layout.block_table_stride = options_.max_pages;
  layout.max_pages = options_.max_pages;
  layout.pages = options_.pages;
  layout.seq_lens = int32_data(seq_lens);
  params.q = *q.tensor();
  params.k = *k.tensor();
  params.v = *v.tensor();
  params.k_scale.value = options_.k_scale;
  params.v_scale.value = options_.v_scale;
  params.indices = indices.tensor();
  params.index_heads = options_.index_heads;
  params.block_size = options_.block_size;
  params.scale = options_.scale != 0 ? options_.scale : 1.0 / std::sqrt(static_cast<double>(options_.dim));
  params.execution.stream = memory_.stream();
  params.out = *out_.tensor();
  params.lse = lse_.tensor();
  return params;
}

std::vector<double> PlacedAttend::out() const { return cases::decode(out_.fetch()); }
std::vector<double> PlacedAttend::lse() const {
  return lse_.present() ? cases::decode(lse_.fetch()) : std::vector<double>();
}

Attention run_attend(const Backend& backend, DeviceMemory& memory, const AttendProblem& problem) {
  const PlacedAttend placed(memory, problem);
  AttendParams params = placed.params();
  backend.check(params);
  const GuardedWorkspace workspace(memory, backend.workspace(params));
  params.execution.workspace = workspace.data();
  params.execution.workspace_bytes = backend.workspace(params);
  backend.attend(params);
  Attention result{placed.out(), placed.lse()};
  workspace.expect_guards_as_they_were();
  return result;
}

Attention attend_on_gpu(const AttendProblem& problem) {
  return run_attend(sm90_backend(), cases::gpu_memory(), problem);
}
Attention attend_on_reference(const AttendProblem& problem) {
  return run_attend(reference_backend(), cases::cpu_memory(), problem);
}

Attention rows_of(const Attention& all, const AttendOptions& o, int64_t begin, int64_t rows) {
  const int64_t heads = o.index_heads * o.group, row = heads * o.dim;
  Attention part;
  part.out.assign(all.out.begin() + begin * row, all.out.begin() + (begin + rows) * row);
  for (int64_t h = 0; o.with_lse && h < heads; ++h) {
    const auto first = all.lse.begin() + h * o.tokens_q + begin;
    part.lse.insert(part.lse.end(), first, first + rows);
  }
  return part;
}

void expect_close(const Attention& got, const Attention& want, const AttendOptions& o, const std::string& what) {
  ASSERT_EQ(got.out.size(), want.out.size()) << what;
  ASSERT_EQ(got.lse.size(), want.lse.size()) << what;
  const double tolerance = o.dtype == OPENMSA_FLOAT16 ? 2e-3 : 8e-3;
  const auto dim = static_cast<size_t>(o.dim);
  int faults = 0;
  for (size_t row = 0; row < want.out.size() / dim; ++row) {
    double difference = 0, size = 0;
    bool alike = true;
    for (size_t d = row * dim; d < (row + 1) * dim; ++d) {
      const double a = got.out[d], b = want.out[d];
      if (!std::isfinite(b) || !std::isfinite(a)) {
        alike &= std::isnan(b) ? std::isnan(a) : a == b;
        continue;
      }
      difference += (a - b) * (a - b);
      size += b * b;
    }
    const double error = std::sqrt(difference) / std::max(std::sqrt(size), 1e-30);
    if ((!alike || (difference > 0 && error > 2 * tolerance)) && ++faults <= 4) {
      ADD_FAILURE() << what << ": row " << row << " (head " << row % static_cast<size_t>(o.index_heads * o.group)
                    << " of query " << row / static_cast<size_t>(o.index_heads * o.group) << ") is off by " << error
                    << (alike ? "" : ", and nan or inf stand elsewhere") << "; first element " << got.out[row * dim]
                    << ", not " << want.out[row * dim];
    }
  }
  for (size_t i = 0; i < want.lse.size(); ++i) {
    const double a = got.lse[i], b = want.lse[i];
    const bool close = std::isfinite(b) ? std::abs(a - b) <= 2e-3 * std::max(1.0, std::abs(b))
                                        : (std::isnan(b) ? std::isnan(a) : a == b);
    if (!close && ++faults <= 8) ADD_FAILURE() << what << ": lse " << i << " is " << a << ", not " << b;
  }
  EXPECT_EQ(faults, 0) << what;
}

void expect_same_bits(const Attention& got, const Attention& want, const std::string& what) {
  const auto differing = [](const std::vector<double>& a, const std::vector<double>& b) {
    int64_t count = a.size() == b.size() ? 0 : 1;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      count += std::bit_cast<uint64_t>(a[i]) != std::bit_cast<uint64_t>(b[i]) ? 1 : 0;
    }
    return count;
  };
  EXPECT_EQ(differing(got.out, want.out), 0) << what << ": out";
  EXPECT_EQ(differing(got.lse, want.lse), 0) << what << ": lse";
}

void expect_gpu_attends_as_reference(const AttendProblem& problem, const std::string& what) {
  expect_close(attend_on_gpu(problem), attend_on_reference(problem), problem.options, what);
}

}  // namespace openmsa::testing
