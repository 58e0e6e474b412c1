// Paged operations of the reference: appended and attended in shuffled pages they equal contiguous sequences bit by
// bit, and what lies outside the pool or past a request's length is invisible.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <limits>

#include "api/numeric.h"
#include "reference_problem.h"

namespace openmsa::testing {
namespace {

constexpr int64_t kBlock = 32, kPages = 24;

// The problem's sequences as requests over a pool of shuffled pages that starts as NaN.
struct Pool {
  explicit Pool(Problem& problem_, DataType type = OPENMSA_FLOAT32) : problem(problem_), dtype(type) {
    const Shape& s = problem.shape;
    batch = static_cast<int64_t>(s.cu_seqlens_q.size()) - 1;
    table.assign(static_cast<size_t>(batch * max_pages), 0x40000000);  // entries past a request's length: anything
    int64_t used = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const int32_t length = s.cu_seqlens_k[static_cast<size_t>(b) + 1] - s.cu_seqlens_k[static_cast<size_t>(b)];
      lengths.push_back(length);
      for (int64_t n = 0; n * kBlock < length; ++n) {
        table[static_cast<size_t>(b * max_pages + n)] = static_cast<int32_t>((used++ * 7 + 3) % kPages);
      }
    }
    const auto nan_bytes = [&](int64_t elements) {
      return std::vector<uint8_t>(static_cast<size_t>(elements * (dtype == OPENMSA_FLOAT32 ? 4 : 1)), 0xff);
    };
    k = nan_bytes(kPages * kBlock * s.heads_kv * s.dim);
    v = nan_bytes(kPages * kBlock * s.heads_kv * s.v_dim);
    index_k = nan_bytes(kPages * kBlock * s.index_key_heads * s.index_dim);
  }

  SequenceLayout layout(const std::vector<int32_t>& cu_seqlens_q, int64_t tokens_q) const {
    SequenceLayout l;
    l.batch = batch;
    l.tokens_q = tokens_q;
    l.tokens_k = kPages * kBlock;
    l.cu_seqlens_q = cu_seqlens_q.data();
    l.paged = true;
    l.block_table = table.data();
    l.block_table_stride = max_pages;
    l.max_pages = max_pages;
    l.pages = kPages;
    l.seq_lens = lengths.data();
    return l;
  }

  Tensor cache(std::vector<uint8_t>& bytes, int64_t heads, int64_t dim) const {
    return make_tensor(bytes.data(), dtype, {kPages, kBlock, heads, dim});
  }

  // Every key of the problem, as if all were new.
  void append_all() {
    const Shape& s = problem.shape;
    const AttendParams attend = problem.attend_params();
    AppendParams p;
    p.layout = layout(s.cu_seqlens_k, s.tokens_k);
    p.k = attend.k;
    p.v = attend.v;
    p.index_k = attend.index->index_k;
    p.k_scale = k_scale;
    p.v_scale = v_scale;
    p.k_cache = cache(k, s.heads_kv, s.dim);
    p.v_cache = cache(v, s.heads_kv, s.v_dim);
    p.index_k_cache = cache(index_k, s.index_key_heads, s.index_dim);
    reference_backend().append(p);
  }

  // select and attend into another problem's outputs, with its index_q as given.
  void run(Problem& result, const Tensor& index_q) {
    const Shape& s = problem.shape;
    SelectParams select = result.select_params();
    select.layout = layout(s.cu_seqlens_q, s.tokens_q);
    select.index_q = index_q;
    select.index_k = cache(index_k, s.index_key_heads, s.index_dim);
    reference_backend().select(select);
    AttendParams attend = result.attend_params();
    attend.layout = select.layout;
    attend.k = cache(k, s.heads_kv, s.dim);
    attend.v = cache(v, s.heads_kv, s.v_dim);
    attend.k_scale = k_scale;
    attend.v_scale = v_scale;
    attend.index = nullptr;
    attend.index_lse = attend.kl = nullptr;
    reference_backend().attend(attend);
  }
  void run(Problem& result) { run(result, result.select_params().index_q); }

  Problem& problem;
  DataType dtype;
  int64_t batch = 0, max_pages = 12;
  std::vector<int32_t> table, lengths;
  std::vector<uint8_t> k, v, index_k;
  CacheScale k_scale, v_scale;
};

Shape requests() {
  Shape shape;
  // Decoding, a prompt that ends inside a block, a request without keys, one without queries, several new tokens.
  shape.cu_seqlens_q = {0, 1, 34, 34, 34, 38};
  shape.cu_seqlens_k = {0, 130, 180, 180, 190, 286};
  shape.tokens_q = 38;
  shape.tokens_k = 286;
  shape.topk = 3;
  return shape;
}

TEST(ReferencePaged, AppendThenAttendEqualsContiguous) {
  Problem contiguous(requests()), paged(requests());
  contiguous.run_forward();
  Pool pool(paged);
  pool.append_all();
  pool.run(paged);
  EXPECT_EQ(paged.indices, contiguous.indices);
  EXPECT_EQ(paged.selected_lse, contiguous.selected_lse);
  EXPECT_EQ(paged.out, contiguous.out);
  EXPECT_EQ(paged.lse, contiguous.lse);
}

TEST(ReferencePaged, AppendsOnlyTheLastTokens) {
  Problem problem(requests());
  Pool pool(problem);
  // New rows: the first of the problem's keys, so many as each request has queries.
  const Shape& s = problem.shape;
  const AttendParams attend = problem.attend_params();
  AppendParams p;
  p.layout = pool.layout(s.cu_seqlens_q, s.tokens_q);
  p.k = attend.k;
  p.v = attend.v;
  p.index_k = attend.index->index_k;
  p.k.shape[0] = p.v.shape[0] = p.index_k.shape[0] = s.tokens_q;
  p.k_cache = pool.cache(pool.k, s.heads_kv, s.dim);
  p.v_cache = pool.cache(pool.v, s.heads_kv, s.v_dim);
  p.index_k_cache = pool.cache(pool.index_k, s.index_key_heads, s.index_dim);
  reference_backend().append(p);

  std::vector<float> expected(static_cast<size_t>(kPages * kBlock * s.heads_kv * s.dim), NAN);
  const size_t width = 16;
  for (size_t b = 0; b < 5; ++b) {
    const int32_t new_tokens = s.cu_seqlens_q[b + 1] - s.cu_seqlens_q[b];
    for (int32_t n = 0; n < new_tokens; ++n) {
      const int32_t position = pool.lengths[b] - new_tokens + n;
      const int32_t page = pool.table[b * 12 + static_cast<size_t>(position) / kBlock];
      const size_t slot = static_cast<size_t>(page) * kBlock + static_cast<size_t>(position) % kBlock;
      std::copy_n(problem.k.begin() + (s.cu_seqlens_q[b] + n) * 16, width,
                  expected.begin() + static_cast<int64_t>(slot * width));
    }
  }
  const auto* stored = reinterpret_cast<const float*>(pool.k.data());
  for (size_t at = 0; at < expected.size(); ++at) {
    if (std::isnan(expected[at])) {
      EXPECT_TRUE(std::isnan(stored[at])) << at;
    } else {
      EXPECT_EQ(stored[at], expected[at]) << at;
    }
  }
}

// Rows of no request are not visited, however many a view of stride 0 claims.
TEST(ReferencePaged, AppendIgnoresPaddedRows) {
  std::vector<float> row(1, 3.0F), cache(32, 0.0F);
  const std::vector<int32_t> table = {0}, lengths = {5}, offsets = {0, 2};
  AppendParams params;
  params.layout.paged = true;
  params.layout.tokens_q = int64_t{1} << 60;
  params.layout.tokens_k = 32;
  params.layout.cu_seqlens_q = offsets.data();
  params.layout.block_table = table.data();
  params.layout.block_table_stride = params.layout.max_pages = params.layout.pages = 1;
  params.layout.seq_lens = lengths.data();
  params.k = make_tensor(row.data(), OPENMSA_FLOAT32, {params.layout.tokens_q, 1, 1});
  params.k.strides[0] = 0;
  params.v = params.index_k = params.k;
  params.k_cache = params.v_cache = params.index_k_cache = make_tensor(cache.data(), OPENMSA_FLOAT32, {1, 32, 1, 1});
  reference_backend().append(params);
  std::vector<float> expected(32, 0.0F);
  expected[3] = expected[4] = 3.0F;
  EXPECT_EQ(cache, expected);
}

TEST(ReferencePaged, MoreNewTokensThanTheLengthWritesTheLastOnes) {
  Problem problem(requests());
  Pool pool(problem);
  pool.lengths = {20, 0, -5, 0, 40};  // shorter than the 130, 50, .. rows that come
  pool.append_all();
  const auto* stored = reinterpret_cast<const float*>(pool.k.data());
  int64_t written = 0;
  for (int64_t slot = 0; slot < kPages * kBlock; ++slot) written += std::isnan(stored[slot * 16]) ? 0 : 1;
  EXPECT_EQ(written, 60);
  const int64_t first = pool.table[0];
  EXPECT_EQ(stored[first * kBlock * 16], problem.k[110 * 16]);  // 130 rows for 20 places: from row 110 on
}

TEST(ReferencePaged, Float8CachesScaleAndSaturate) {
  Problem problem(requests()), rounded(requests()), paged(requests());
  Pool pool(problem, OPENMSA_FLOAT8_E4M3);
  const float factor = 0.37F;
  pool.k_scale.value = static_cast<double>(factor);
  pool.v_scale.device_value = &factor;
  problem.k[5] = 1e6F;
  const auto round = [](float x) { return float8_e4m3_to_float(float_to_float8_e4m3(x)); };
  for (size_t at = 0; at < problem.k.size(); ++at) rounded.k[at] = factor * round(problem.k[at] / factor);
  for (size_t at = 0; at < problem.v.size(); ++at) rounded.v[at] = factor * round(problem.v[at] / factor);
  for (size_t at = 0; at < problem.index_k.size(); ++at) rounded.index_k[at] = round(problem.index_k[at]);
  std::vector<uint8_t> index_q;
  for (float& x : rounded.index_q) {
    index_q.push_back(float_to_float8_e4m3(x));
    x = round(x);
  }
  EXPECT_FLOAT_EQ(rounded.k[5], factor * 448);
  rounded.run_forward();
  pool.append_all();
  pool.run(paged, make_tensor(index_q.data(), OPENMSA_FLOAT8_E4M3, {38, 2, 8}));
  EXPECT_EQ(paged.indices, rounded.indices);
  EXPECT_EQ(paged.selected_lse, rounded.selected_lse);
  EXPECT_LT(relative_error(paged.out, rounded.out), 1e-6);  // factor * stored rounds in float32 there, not here
}

TEST(ReferencePaged, PaddedRowsSeeNoKey) {
  Problem problem(requests()), padded(requests());
  problem.run_forward();
  Pool pool(padded);
  pool.append_all();
  padded.shape.cu_seqlens_q = {0, 1, 34, 34, 34, 34};  // rows 34 .. 37 are nobody's
  pool.lengths[0] = 0;                                 // and row 0 is of an empty request
  for (const size_t row : {0, 34, 35, 36, 37}) {
    for (size_t d = 0; d < 32; ++d) padded.q[row * 32 + d] = NAN;
  }
  pool.run(padded);
  for (size_t i = 0; i < 38; ++i) {
    const bool padding = i == 0 || i >= 34;
    for (size_t n = 0; n < 3; ++n) EXPECT_EQ(padded.indices[i * 3 + n], padding ? -1 : problem.indices[i * 3 + n]);
    EXPECT_EQ(padded.lse[i], padding ? -INFINITY : problem.lse[i]);
    for (size_t d = 0; d < 32; ++d) EXPECT_EQ(padded.out[i * 32 + d], padding ? 0 : problem.out[i * 32 + d]);
  }
}

TEST(ReferencePaged, PagesOutsideThePoolAreInvisible) {
  for (const int32_t page :
       {-1, static_cast<int32_t>(kPages), std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    Problem problem(requests()), holes(requests());
    Pool pool(holes);
    pool.append_all();
    pool.table[1] = page;           // block 1 of the first request
    pool.table[4 * 12 + 2] = page;  // the own block of the last request: forced, but not there
    pool.run(holes);
    // Contiguous, the same selection without the hole gives the same attention.
    problem.indices = holes.indices;
    reference_backend().attend(problem.attend_params());
    EXPECT_EQ(holes.out, problem.out);
    EXPECT_EQ(holes.lse, problem.lse);
    for (int64_t r = 0; r < 2; ++r) {
      const int32_t* first = holes.indices.data() + r * 38 * 3;
      EXPECT_EQ(std::count(first, first + 3, 1), 0);
      EXPECT_EQ(std::count(first, first + 3, -1), 0);  // 4 of its 5 blocks are left
      const int32_t* last = holes.indices.data() + (r * 38 + 37) * 3;
      EXPECT_EQ(std::count(last, last + 3, 2), 0);
      EXPECT_EQ(last[2], -1);
    }
    // Chosen by the caller, such a block counts as not there.
    std::fill(holes.indices.begin(), holes.indices.end(), 1);
    AttendParams attend = holes.attend_params();
    attend.layout = pool.layout(holes.shape.cu_seqlens_q, 38);
    attend.k = pool.cache(pool.k, 2, 8);
    attend.v = pool.cache(pool.v, 2, 8);
    attend.index = nullptr;
    attend.index_lse = attend.kl = nullptr;
    reference_backend().attend(attend);
    EXPECT_EQ(holes.lse[0], -INFINITY);
    EXPECT_EQ(holes.out[0], 0);
  }
}

TEST(ReferencePaged, LengthsClampToTheTable) {
  Problem clamped(requests());
  Pool pool(clamped);
  pool.append_all();
  pool.max_pages = 4;
  pool.lengths = {std::numeric_limits<int32_t>::max(), 50, std::numeric_limits<int32_t>::min(), 0, 96};
  std::vector<int32_t> narrow;
  for (size_t b = 0; b < 5; ++b)
    narrow.insert(narrow.end(), pool.table.begin() + static_cast<int64_t>(b * 12),
                  pool.table.begin() + static_cast<int64_t>(b * 12 + 4));
  pool.table = narrow;
  pool.run(clamped);
  // The first request has the 128 keys that its row of 4 pages can name.
  Shape first = requests();
  first.cu_seqlens_q = {0, 1, 38};
  first.cu_seqlens_k = {0, 128, 286};
  Problem expected(first);
  expected.run_forward();
  EXPECT_EQ(clamped.lse[0], expected.lse[0]);
  EXPECT_TRUE(std::equal(clamped.out.begin(), clamped.out.begin() + 32, expected.out.begin()));
}

// The pages of a pool that spans more than 2^31 elements, of which only those in use are ever touched.
TEST(ReferencePaged, PageOffsetsBeyond32Bits) {
  Shape shape;
  shape.tokens_q = 1;
  shape.tokens_k = 40;
  Problem contiguous(shape), paged(shape);
  contiguous.run_forward();
  const int64_t page_stride = (int64_t{1} << 31) + 64, bytes = 4 * (page_stride + kBlock * 16);
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no " << bytes << " bytes of address space";
  auto* pool = static_cast<float*>(memory);
  std::copy_n(paged.k.begin(), kBlock * 16, pool + page_stride);  // block 0 on page 1
  std::copy_n(paged.k.begin() + kBlock * 16, 8 * 16, pool);       // block 1 on page 0
  const int32_t table[] = {1, 0}, length = 40, cu_seqlens_q[] = {0, 1};
  paged.v = paged.k;
  contiguous.v = contiguous.k;
  reference_backend().attend(contiguous.attend_params());
  paged.indices = contiguous.indices;
  AttendParams attend = paged.attend_params();
  attend.layout.paged = true;
  attend.layout.cu_seqlens_q = cu_seqlens_q;
  attend.layout.block_table = table;
  attend.layout.block_table_stride = attend.layout.max_pages = attend.layout.pages = 2;
  attend.layout.seq_lens = &length;
  attend.k = make_tensor(pool, OPENMSA_FLOAT32, {2, kBlock, 2, 8});
  attend.k.strides[0] = page_stride;
  attend.v = attend.k;
  attend.index = nullptr;
  attend.index_lse = attend.kl = nullptr;
  reference_backend().attend(attend);
  EXPECT_EQ(paged.out, contiguous.out);
  EXPECT_EQ(paged.lse, contiguous.lse);
  munmap(memory, static_cast<size_t>(bytes));
}

}  // namespace
}  // namespace openmsa::testing
