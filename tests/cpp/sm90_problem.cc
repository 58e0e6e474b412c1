#include "cpp/sm90_problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "api/dtype.h"
#include "api/numeric.h"

namespace openmsa::testing {
namespace {

constexpr unsigned char kFill = 0xff;  // NaN of every float type, -1 of every integer
constexpr unsigned char kGuard = 0xa5;

int64_t batch_of(const Options& options) {
  if (options.pages > 0) return static_cast<int64_t>(options.seq_lens.size());
  return options.cu_seqlens_q.empty() ? 1 : static_cast<int64_t>(options.cu_seqlens_q.size()) - 1;
}

const int32_t* int32_data(const PlacedTensor& tensor) {
  return tensor.present() ? static_cast<const int32_t*>(tensor.tensor()->data) : nullptr;
}

void fill(HostTensor& tensor, const Values& values, std::mt19937_64& random) {
  const int64_t* shape = tensor.view.shape;
  const int64_t last = tensor.view.rank > 3 ? shape[3] : 1;
  for (int64_t a = 0; a < shape[0]; ++a) {
    for (int64_t b = 0; b < shape[1]; ++b) {
      for (int64_t c = 0; c < shape[2]; ++c) {
        for (int64_t d = 0; d < last; ++d) set_element(tensor, values(random), a, b, c, d);
      }
    }
  }
}

}  // namespace

bool gpu_present() { return sm90_backend().available(); }

float small_integer(std::mt19937_64& random) { return static_cast<float>(random() % 5) - 2.0F; }

float normal(std::mt19937_64& random) { return std::normal_distribution<float>()(random); }

float one(std::mt19937_64& /*random*/) { return 1.0F; }

void set_element(HostTensor& tensor, float value, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
  unsigned char* const at = tensor.element(i0, i1, i2, i3);
  const auto store = [&](auto bits) { std::memcpy(at, &bits, sizeof(bits)); };
  switch (tensor.view.dtype) {
    case OPENMSA_BFLOAT16:
      return store(float_to_bfloat16(value));
    case OPENMSA_FLOAT16:
      return store(float_to_float16(value));
    default:
      return store(float_to_float8_e4m3(value));
  }
}

HostTensor int32_tensor(const std::vector<int32_t>& values) {
  if (values.empty()) return {};
  HostTensor tensor = cases::make_host_tensor(OPENMSA_INT32, {static_cast<int64_t>(values.size())}, {}, kFill);
  std::memcpy(tensor.element(), values.data(), values.size() * sizeof(int32_t));
  return tensor;
}

SelectProblem::SelectProblem(const Options& problem_options, const Values& values, uint64_t seed)
    : options(problem_options),
      cu_seqlens_q(int32_tensor(options.cu_seqlens_q)),
      cu_seqlens_k(int32_tensor(options.cu_seqlens_k)),
      k_starts(int32_tensor(options.k_starts)),
      block_table(int32_tensor(options.block_table)),
      seq_lens(int32_tensor(options.seq_lens)) {
  const Options& o = options;
  std::mt19937_64 random(seed);
  index_q = cases::make_host_tensor(o.dtype, {o.tokens_q, o.index_heads, o.dim}, {}, kFill);
  const std::vector<int64_t> shape = o.pages > 0 ? std::vector<int64_t>{o.pages, o.block_size, o.index_key_heads, o.dim}
                                                 : std::vector<int64_t>{o.tokens_k, o.index_key_heads, o.dim};
  index_k = cases::make_host_tensor(o.dtype, shape, {}, kFill);
  fill(index_q, values, random);
  fill(index_k, values, random);
}

PlacedProblem::PlacedProblem(DeviceMemory& memory, const SelectProblem& problem)
    : index_q(memory, problem.index_q),
      index_k(memory, problem.index_k),
      cu_seqlens_q(memory, problem.cu_seqlens_q),
      cu_seqlens_k(memory, problem.cu_seqlens_k),
      k_starts(memory, problem.k_starts),
      block_table(memory, problem.block_table),
      seq_lens(memory, problem.seq_lens),
      options_(problem.options),
      memory_(memory),
      indices_(memory,
               cases::make_host_tensor(options_.indices_dtype, {options_.index_heads, options_.tokens_q, options_.topk},
                                       options_.indices_strides, 0x55)) {
  if (options_.with_lse) {
    index_lse_ =
        PlacedTensor(memory, cases::make_host_tensor(OPENMSA_FLOAT32, {options_.index_heads, options_.tokens_q},
                                                     options_.lse_strides, 0x55));
  }
}

void PlacedProblem::clear_outputs() {
  for (PlacedTensor* const output : {&indices_, &index_lse_}) {
    if (!output->present()) continue;
    const HostTensor& image = output->image();
    memory_.upload(static_cast<unsigned char*>(output->tensor()->data) - image.offset, image.storage.data(),
                   static_cast<int64_t>(image.storage.size()));
  }
}

SelectParams PlacedProblem::params() const {
  SelectParams params;
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
  params.index_q = *index_q.tensor();
  params.index_k = *index_k.tensor();
  params.topk = options_.topk;
  params.init_blocks = options_.init_blocks;
  params.local_blocks = options_.local_blocks;
  params.block_size = options_.block_size;
  params.scale = 1.0 / std::sqrt(static_cast<double>(options_.dim));
  params.execution.stream = memory_.stream();
  params.indices = *indices_.tensor();
  params.index_lse = index_lse_.tensor();
  return params;
}

std::vector<int64_t> PlacedProblem::indices() const {
  const std::vector<unsigned char> bytes = packed_bytes(indices_.fetch());
  if (options_.indices_dtype == OPENMSA_INT64) {
    std::vector<int64_t> result(bytes.size() / sizeof(int64_t));
    std::memcpy(result.data(), bytes.data(), bytes.size());
    return result;
  }
  std::vector<int32_t> narrow(bytes.size() / sizeof(int32_t));
  std::memcpy(narrow.data(), bytes.data(), bytes.size());
  return {narrow.begin(), narrow.end()};
}

std::vector<float> PlacedProblem::index_lse() const {
  if (!index_lse_.present()) return {};
  const std::vector<unsigned char> bytes = packed_bytes(index_lse_.fetch());
  std::vector<float> result(bytes.size() / sizeof(float));
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

GuardedWorkspace::GuardedWorkspace(DeviceMemory& memory, int64_t bytes) : memory_(memory), bytes_(bytes) {
  if (bytes == 0) return;
  static unsigned char* allocation = nullptr;  // of one device's memory; kept to the end, when the runtime may be gone
  static DeviceMemory* owner = nullptr;
  static int64_t room = 0;
  if (owner != &memory || room < bytes) {
    if (owner != nullptr) owner->release(allocation);
    owner = &memory;
    room = 2 * bytes;
    const std::vector<unsigned char> image(static_cast<size_t>(room + 2 * cases::kGuardBytes), kFill);
    allocation = static_cast<unsigned char*>(memory.allocate(static_cast<int64_t>(image.size())));
    memory.upload(allocation, image.data(), static_cast<int64_t>(image.size()));
  }
  data_ = allocation + cases::kGuardBytes;
  const std::vector<unsigned char> guard(cases::kGuardBytes, kGuard);
  memory.upload(allocation, guard.data(), cases::kGuardBytes);
  memory.upload(data_ + bytes, guard.data(), cases::kGuardBytes);
}

void GuardedWorkspace::expect_guards_as_they_were() const {
  if (bytes_ == 0) return;
  for (const unsigned char* const at : {data_ - cases::kGuardBytes, data_ + bytes_}) {
    std::vector<unsigned char> now(cases::kGuardBytes);
    memory_.download(now.data(), at, cases::kGuardBytes);
    const auto changed = std::count_if(now.begin(), now.end(), [](unsigned char byte) { return byte != kGuard; });
    EXPECT_EQ(changed, 0) << "bytes written " << (at < data_ ? "before" : "behind") << " a workspace of " << bytes_;
  }
}

Selection run_select(const Backend& backend, DeviceMemory& memory, const SelectProblem& problem) {
  const PlacedProblem placed(memory, problem);
  SelectParams params = placed.params();
  backend.check(params);
  const GuardedWorkspace workspace(memory, backend.workspace(params));
  params.execution.workspace = workspace.data();
  params.execution.workspace_bytes = backend.workspace(params);
  backend.select(params);
  Selection result{placed.indices(), placed.index_lse()};
  workspace.expect_guards_as_they_were();
  return result;
}

Selection run_on_gpu(const SelectProblem& problem) { return run_select(sm90_backend(), cases::gpu_memory(), problem); }

Selection run_on_reference(const SelectProblem& problem) {
  return run_select(reference_backend(), cases::cpu_memory(), problem);
}

Selection rows_of(const Selection& all, const Options& o, int64_t begin, int64_t rows) {
  Selection part;
  for (int64_t h = 0; h < o.index_heads; ++h) {
    const int64_t row = h * o.tokens_q + begin;
    part.indices.insert(part.indices.end(), all.indices.begin() + row * o.topk,
                        all.indices.begin() + (row + rows) * o.topk);
    if (o.with_lse)
      part.index_lse.insert(part.index_lse.end(), all.index_lse.begin() + row, all.index_lse.begin() + row + rows);
  }
  return part;
}

void expect_equal(const Selection& got, const Selection& expected, const std::string& what) {
  ASSERT_EQ(got.indices.size(), expected.indices.size()) << what;
  int64_t faults = 0;
  for (size_t i = 0; i < got.indices.size(); ++i) {
    if (got.indices[i] == expected.indices[i]) continue;
    if (++faults <= 3)
      ADD_FAILURE() << what << ": entry " << i << " is " << got.indices[i] << ", not " << expected.indices[i];
  }
  ASSERT_EQ(got.index_lse.size(), expected.index_lse.size()) << what;
  for (size_t i = 0; i < got.index_lse.size(); ++i) {
    const float a = got.index_lse[i], b = expected.index_lse[i];
    const bool same = std::isfinite(b) ? std::abs(a - b) <= 1e-4F * std::max(1.0F, std::abs(b))
                                       : (std::isnan(b) ? std::isnan(a) : a == b);
    if (!same && ++faults <= 6) ADD_FAILURE() << what << ": index_lse " << i << " is " << a << ", not " << b;
  }
  EXPECT_EQ(faults, 0) << what;
}

void expect_same_bits(const Selection& got, const Selection& expected, const std::string& what) {
  EXPECT_EQ(got.indices, expected.indices) << what;
  ASSERT_EQ(got.index_lse.size(), expected.index_lse.size()) << what;
  int64_t faults = 0;
  for (size_t i = 0; i < got.index_lse.size(); ++i) {
    faults += std::bit_cast<uint32_t>(got.index_lse[i]) != std::bit_cast<uint32_t>(expected.index_lse[i]) ? 1 : 0;
  }
  EXPECT_EQ(faults, 0) << what << ": log-sum-exps differ in bits";
}

void expect_gpu_equals_reference(const SelectProblem& problem, const std::string& what) {
  expect_equal(run_on_gpu(problem), run_on_reference(problem), what);
}

std::string describe(const Options& o) {
  return "type " + std::to_string(o.dtype) + ", dim " + std::to_string(o.dim) + ", block " +
         std::to_string(o.block_size) + ", heads " + std::to_string(o.index_heads) + "/" +
         std::to_string(o.index_key_heads) + ", topk " + std::to_string(o.topk) + ", init " +
         std::to_string(o.init_blocks) + ", local " + std::to_string(o.local_blocks) + ", Tq " +
         std::to_string(o.tokens_q) + ", Tk " + std::to_string(o.tokens_k) + ", pages " + std::to_string(o.pages);
}

Options paged_options(const std::vector<int32_t>& lengths, const std::vector<int32_t>& queries, int64_t block_size) {
  Options o;
  o.block_size = block_size;
  o.seq_lens = lengths;
  o.cu_seqlens_q = {0};
  for (const int32_t n : queries) o.cu_seqlens_q.push_back(o.cu_seqlens_q.back() + n);
  o.tokens_q = o.cu_seqlens_q.back();
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  o.max_pages = longest / block_size + 2;
  o.pages = static_cast<int64_t>(lengths.size()) * o.max_pages + 3;
  o.tokens_k = 0;
  std::vector<int32_t> order(static_cast<size_t>(o.pages));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(7);
  std::shuffle(order.begin(), order.end(), random);
  o.block_table.assign(order.begin(), order.begin() + static_cast<int64_t>(lengths.size()) * o.max_pages);
  return o;
}

SelectProblem last_queries(const SelectProblem& problem, int64_t rows) {
  const Options& whole = problem.options;
  Options o = whole;
  o.tokens_q = rows;
  SelectProblem part = problem;
  part.options = o;
  part.index_q = cases::make_host_tensor(o.dtype, {rows, o.index_heads, o.dim}, {}, kFill);
  std::copy_n(problem.index_q.element(whole.tokens_q - rows), rows * o.index_heads * o.dim * dtype_size(o.dtype),
              part.index_q.element());
  return part;
}

SelectProblem in_pages(const SelectProblem& problem) {
  const Options& from = problem.options;
  Options o =
      paged_options({static_cast<int32_t>(from.tokens_k)}, {static_cast<int32_t>(from.tokens_q)}, from.block_size);
  o.dtype = from.dtype;
  o.indices_dtype = from.indices_dtype;
  o.index_heads = from.index_heads;
  o.index_key_heads = from.index_key_heads;
  o.dim = from.dim;
  o.topk = from.topk;
  o.init_blocks = from.init_blocks;
  o.local_blocks = from.local_blocks;
  o.with_lse = from.with_lse;
  SelectProblem pages = problem;
  pages.options = o;
  pages.cu_seqlens_q = int32_tensor(o.cu_seqlens_q);
  pages.block_table = int32_tensor(o.block_table);
  pages.seq_lens = int32_tensor(o.seq_lens);
  pages.index_k = cases::make_host_tensor(o.dtype, {o.pages, o.block_size, o.index_key_heads, o.dim}, {}, kFill);
  const int64_t row_bytes = o.index_key_heads * o.dim * dtype_size(o.dtype);
  for (int64_t j = 0; j < from.tokens_k; ++j) {
    std::copy_n(problem.index_k.element(j), row_bytes,
                pages.index_k.element(o.block_table[static_cast<size_t>(j / o.block_size)], j % o.block_size));
  }
  return pages;
}

void repeat_blocks(SelectProblem& problem, int64_t distinct) {
  const Options& o = problem.options;
  const int64_t row_bytes = o.index_key_heads * o.dim * dtype_size(o.dtype);
  for (int64_t j = distinct * o.block_size; j < o.tokens_k; ++j) {
    std::copy_n(problem.index_k.element(j % (distinct * o.block_size)), row_bytes, problem.index_k.element(j));
  }
}

}  // namespace openmsa::testing
