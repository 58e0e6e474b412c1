// Selection beyond the case table: ranges of keys that are scored apart, tiles, threads, and scores that float32 cannot
// hold. Small whole numbers make every product exact, so that selections equal the reference's, ties included.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "api/dtype.h"
#include "api/numeric.h"
#include "api/stages.h"
#include "cpp/cpu_threads.h"
#include "reference/select.h"

namespace openmsa::testing {
namespace {

using Values = std::function<float(std::mt19937_64&)>;
float small_integer(std::mt19937_64& random) { return static_cast<float>(random() % 5) - 2.0F; }
float normal(std::mt19937_64& random) { return std::normal_distribution<float>()(random); }

struct Shape {
  DataType dtype = OPENMSA_FLOAT32;
  int64_t tokens_q = 40, tokens_k = 700, heads = 2, key_heads = 1, dim = 16;
  int64_t topk = 5, init_blocks = 0, local_blocks = 1, block_size = 32;
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_k, k_starts;  // empty: absent
  // Paged when pages > 0: tokens_k is pages * block_size.
  int64_t pages = 0;
  std::vector<int32_t> seq_lens;
  std::vector<std::vector<int32_t>> table;
  DataType indices_dtype = OPENMSA_INT32;
};

struct Selection {
  std::vector<int64_t> indices;  // [Hi, Tq, topk]
  std::vector<float> index_lse;  // [Hi, Tq]
};

class Problem {
 public:
  explicit Problem(const Shape& problem_shape, const Values& values = small_integer, uint64_t seed = 1)
      : shape(problem_shape) {
    if (shape.pages > 0) shape.tokens_k = shape.pages * shape.block_size;
    std::mt19937_64 random(seed);
    index_q.resize(static_cast<size_t>(shape.tokens_q * shape.heads * shape.dim));
    index_k.resize(static_cast<size_t>(shape.tokens_k * shape.key_heads * shape.dim));
    for (float& x : index_q) x = values(random);
    for (float& x : index_k) x = values(random);
  }

  float* key(int64_t token, int64_t head = 0) { return index_k.data() + (token * shape.key_heads + head) * shape.dim; }
  void set_keys(int64_t begin, int64_t end, float value) { std::fill(key(begin), key(end), value); }

  // `use(params)` with tensors that live as long as the call.
  template <typename Use>
  void with_params(const Use& use) {
    std::vector<unsigned char> q = stored(index_q), k = stored(index_k);
    SelectParams p;
    p.layout.tokens_q = shape.tokens_q;
    p.layout.tokens_k = shape.tokens_k;
    const auto pointer = [](const std::vector<int32_t>& values) { return values.empty() ? nullptr : values.data(); };
    p.layout.cu_seqlens_q = pointer(shape.cu_seqlens_q);
    p.layout.cu_seqlens_k = pointer(shape.cu_seqlens_k);
    p.layout.k_starts = pointer(shape.k_starts);
    if (!shape.cu_seqlens_q.empty()) p.layout.batch = static_cast<int64_t>(shape.cu_seqlens_q.size()) - 1;
    std::vector<int32_t> table;
    p.index_q = tensor(q.data(), shape.dtype, {shape.tokens_q, shape.heads, shape.dim});
    p.index_k = tensor(k.data(), shape.dtype, {shape.tokens_k, shape.key_heads, shape.dim});
    if (shape.pages > 0) {
      for (const std::vector<int32_t>& row : shape.table) table.insert(table.end(), row.begin(), row.end());
      p.layout.paged = true;
      p.layout.pages = shape.pages;
      p.layout.block_table = table.data();
      p.layout.max_pages = p.layout.block_table_stride = static_cast<int64_t>(shape.table[0].size());
      p.layout.seq_lens = shape.seq_lens.data();
      p.index_k = tensor(k.data(), shape.dtype, {shape.pages, shape.block_size, shape.key_heads, shape.dim});
    }
    p.topk = shape.topk;
    p.init_blocks = shape.init_blocks;
    p.local_blocks = shape.local_blocks;
    p.block_size = shape.block_size;
    p.scale = 0.25;
    std::vector<int32_t> indices(static_cast<size_t>(shape.heads * shape.tokens_q * shape.topk), -77);
    std::vector<int64_t> wide(indices.size(), -77);
    const bool is_wide = shape.indices_dtype == OPENMSA_INT64;
    p.indices = tensor(is_wide ? static_cast<void*>(wide.data()) : indices.data(), shape.indices_dtype,
                       {shape.heads, shape.tokens_q, shape.topk});
    Selection result;
    result.index_lse.assign(static_cast<size_t>(shape.heads * shape.tokens_q), -77.0F);
    const Tensor lse = tensor(result.index_lse.data(), OPENMSA_FLOAT32, {shape.heads, shape.tokens_q});
    p.index_lse = &lse;
    use(p);
    result.indices.assign(wide.begin(), wide.end());
    if (!is_wide) result.indices.assign(indices.begin(), indices.end());
    last_ = std::move(result);
  }

  Selection run(const Backend& backend) {
    with_params([&](const SelectParams& params) {
      backend.check(params);
      backend.select(params);
    });
    return last_;
  }

  Shape shape;
  std::vector<float> index_q, index_k;

 private:
  static Tensor tensor(void* data, DataType dtype, const std::vector<int64_t>& lengths) {
    Tensor view{};
    view.data = data;
    view.dtype = dtype;
    view.rank = static_cast<int32_t>(lengths.size());
    int64_t stride = 1;
    for (size_t axis = lengths.size(); axis-- > 0;) {
      view.shape[axis] = lengths[axis];
      view.strides[axis] = stride;
      stride *= lengths[axis];
    }
    return view;
  }

  std::vector<unsigned char> stored(const std::vector<float>& values) const {
    const auto size = static_cast<size_t>(dtype_size(shape.dtype));
    std::vector<unsigned char> bytes(values.size() * size);
    const auto store = [&](size_t i, auto bits) { std::memcpy(bytes.data() + i * size, &bits, size); };
    for (size_t i = 0; i < values.size(); ++i) {
      if (shape.dtype == OPENMSA_FLOAT32) store(i, values[i]);
      if (shape.dtype == OPENMSA_FLOAT16) store(i, float_to_float16(values[i]));
      if (shape.dtype == OPENMSA_BFLOAT16) store(i, float_to_bfloat16(values[i]));
      if (shape.dtype == OPENMSA_FLOAT8_E4M3) store(i, float_to_float8_e4m3(values[i]));
    }
    return bytes;
  }

  Selection last_;
};

void expect_reference(Problem problem, const std::string& what) {
  const Selection got = problem.run(cpu_backend()), expected = problem.run(reference_backend());
  ASSERT_EQ(got.indices, expected.indices) << what;
  for (size_t i = 0; i < got.index_lse.size(); ++i) {
    const float a = got.index_lse[i], b = expected.index_lse[i];
    const bool same = std::isfinite(b) ? std::abs(a - b) <= 2e-5F * std::max(1.0F, std::abs(b))
                      : std::isnan(b)  ? std::isnan(a)
                                       : a == b;
    ASSERT_TRUE(same) << what << ": index_lse " << a << ", expected " << b << " at " << i;
  }
}

std::string describe(const Shape& s) {
  return "topk " + std::to_string(s.topk) + ", init " + std::to_string(s.init_blocks) + ", local " +
         std::to_string(s.local_blocks) + ", block " + std::to_string(s.block_size) + ", dim " + std::to_string(s.dim) +
         ", heads " + std::to_string(s.heads) + "/" + std::to_string(s.key_heads) + ", type " + dtype_name(s.dtype);
}

// Requests of one prefix each whose pages lie anywhere in the pool.
Shape paged(const std::vector<int32_t>& queries, const std::vector<int32_t>& keys, int64_t block_size) {
  Shape s;
  s.block_size = block_size;
  s.seq_lens = keys;
  s.cu_seqlens_q = {0};
  for (int32_t n : queries) s.cu_seqlens_q.push_back(s.cu_seqlens_q.back() + n);
  s.tokens_q = s.cu_seqlens_q.back();
  int64_t most = 0;
  for (int32_t n : keys) most = std::max<int64_t>(most, (n + block_size - 1) / block_size);
  s.pages = most * static_cast<int64_t>(keys.size()) + 3;
  std::vector<int32_t> pool(static_cast<size_t>(s.pages));
  std::iota(pool.begin(), pool.end(), 0);
  std::shuffle(pool.begin(), pool.end(), std::mt19937_64(5));
  for (size_t b = 0; b < keys.size(); ++b) {
    const auto first = pool.begin() + static_cast<int64_t>(b) * most;
    s.table.emplace_back(first, first + most);
  }
  return s;
}

// 625 blocks for three queries: the scan is cut into ranges, whose lists hold many equal scores.
TEST(CpuSelect, MergesRangesOfFewQueriesExactly) {
  for (const int64_t topk : {1, 16, 70, 300, 1000}) {
    for (const int64_t local : {0, 1, 3}) {
      for (const int64_t init : {0, 2, 200}) {
        Shape s;
        s.tokens_q = 3;
        s.tokens_k = 20000 - 7;
        s.heads = 4;
        s.dim = 8;
        s.topk = topk;
        s.local_blocks = local;
        s.init_blocks = init;
        expect_reference(Problem(s), describe(s));
      }
    }
  }
}

TEST(CpuSelect, EveryTypeDimensionAndHeadCount) {
  const std::vector<std::pair<int64_t, int64_t>> heads = {{1, 1}, {4, 1}, {6, 3}, {3, 3}, {300, 1}};
  size_t turn = 0;
  for (const DataType dtype : {OPENMSA_FLOAT32, OPENMSA_BFLOAT16, OPENMSA_FLOAT16, OPENMSA_FLOAT8_E4M3}) {
    for (const int64_t dim : {1, 3, 8, 20, 64, 100, 128, 129, 256}) {
      Shape s;
      s.dtype = dtype;
      s.dim = dim;
      s.block_size = int64_t{32} << (turn % 3);
      s.local_blocks = static_cast<int64_t>(turn % 2);
      s.indices_dtype = turn % 2 == 0 ? OPENMSA_INT32 : OPENMSA_INT64;
      std::tie(s.heads, s.key_heads) = heads[turn++ % heads.size()];
      s.tokens_q = s.heads == 300 ? 5 : 90;
      expect_reference(Problem(s), describe(s));
    }
  }
}

TEST(CpuSelect, PackedSequencesSharedPrefixesAndPaddedRows) {
  for (const int64_t local : {0, 1, 2, 1000}) {
    for (const int64_t init : {0, 1, 3, 1000}) {
      Shape s;
      s.local_blocks = local;
      s.init_blocks = init;
      s.tokens_q = 420;
      s.tokens_k = 700;
      s.cu_seqlens_q = {0, 3, 3, 203, 410, 420};
      s.cu_seqlens_k = {0, 100, 150, 350, 690, 700};
      expect_reference(Problem(s), "packed, " + describe(s));
      s.k_starts = {0, 0, 40, 40, 700};
      expect_reference(Problem(s), "shared prefixes, " + describe(s));

      Shape p = paged({1, 0, 70, 300, 5}, {500, 33, 64, 290, 0}, 32);
      p.local_blocks = local;
      p.init_blocks = init;
      p.tokens_q += 9;
      expect_reference(Problem(p), "paged, " + describe(p));
      p.table[0][2] = -1;
      p.table[0][15] = 1 << 30;
      p.table[3][0] = -5;
      p.table[3][9] = static_cast<int32_t>(p.pages);
      expect_reference(Problem(p), "pages outside the pool, " + describe(p));
    }
  }
}

TEST(CpuSelect, SpecialScores) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const DataType dtype : {OPENMSA_FLOAT32, OPENMSA_BFLOAT16, OPENMSA_FLOAT16}) {
    for (const int64_t queries : {2, 100}) {
      for (const int64_t local : {0, 1}) {
        Shape s;
        s.dtype = dtype;
        s.tokens_q = queries;
        s.local_blocks = local;
        s.topk = 18;
        Problem problem(s);
        problem.set_keys(0, 64, nan);
        problem.set_keys(64, 70, nan);
        problem.set_keys(96, 128, 0.0F);
        problem.set_keys(128, 160, -0.0F);
        problem.set_keys(160, 192, 0.0F);
        problem.key(200)[3] = inf;
        problem.key(230)[5] = -inf;
        for (int64_t j = 256; j < 288; ++j) problem.key(j)[0] = -inf;
        problem.key(699)[1] = nan;
        problem.index_q[3] = nan;                                                       // head 0 of query 0
        std::fill_n(problem.index_q.begin() + s.dim * s.heads, s.dim * s.heads, 0.0F);  // query 1
        problem.index_q[static_cast<size_t>(s.dim * s.heads + 1)] = 1.0F;
        expect_reference(problem, describe(s));
      }
    }
  }
}

// Exact products far beyond float32's range: what decides is a row's order alone.
TEST(CpuSelect, QueriesOfAnyMagnitude) {
  for (const float magnitude : {1e-42F, 1e-30F, 1e-20F, 1e20F, 3e37F}) {
    for (const DataType dtype : {OPENMSA_FLOAT32, OPENMSA_BFLOAT16}) {
      Shape s;
      s.dtype = dtype;
      s.tokens_q = 30;
      Problem problem(s);
      for (float& x : problem.index_q) x *= dtype == OPENMSA_FLOAT32 ? magnitude : std::max(magnitude, 1e-30F);
      const float keys = std::clamp(magnitude, 1e-30F, 1e30F);
      for (float& x : problem.index_k) x *= keys;
      const Selection got = problem.run(cpu_backend());
      problem.with_params([&](const SelectParams& params) {
        for (int64_t head = 0; head < s.heads; ++head) {
          for (int64_t query = 0; query < s.tokens_q; ++query) {
            const std::vector<double> scores = reference::block_scores(params, head, query);
            const int64_t* row = got.indices.data() + (head * s.tokens_q + query) * s.topk;
            const auto blocks = static_cast<int64_t>(scores.size());
            ASSERT_EQ(row[s.topk - 1], blocks - 1);
            const double worst = scores[static_cast<size_t>(row[s.topk - 2])];
            const double largest = std::abs(*std::max_element(scores.begin(), scores.end()));
            const auto better = std::count_if(scores.begin(), scores.end() - 1,
                                              [&](double score) { return score > worst + 1e-5 * largest; });
            EXPECT_LE(better, s.topk - 2) << "magnitude " << magnitude << ", query " << query;
          }
        }
      });
    }
  }
}

TEST(CpuSelect, SameBitsOnAnyThreads) {
  Shape few = paged({1, 4, 16}, {9000, 12500, 70}, 32), many;
  many.tokens_q = many.tokens_k = 1500;
  many.local_blocks = 0;
  for (const Shape& s : {few, many}) {
    Problem problem(s, normal);
    expect_same_bits_on_any_threads([&] {
      const Selection selection = problem.run(cpu_backend());
      return bits_of(selection.indices, selection.index_lse);
    });
  }
}

// One query of `whole`, alone: the keys up to its position.
Selection alone(const Problem& whole, int64_t query) {
  Shape s = whole.shape;
  s.tokens_q = 1;
  s.tokens_k = whole.shape.tokens_k - whole.shape.tokens_q + query + 1;
  Problem problem(s);
  const int64_t row = s.heads * s.dim;
  std::copy_n(whole.index_q.begin() + query * row, row, problem.index_q.begin());
  std::copy_n(whole.index_k.begin(), problem.index_k.size(), problem.index_k.begin());
  return problem.run(cpu_backend());
}

// Scores have the same bits in the product of many rows, in that of few, and in ranges of keys.
TEST(CpuSelect, ARowAloneHasTheBitsThatItHasInABatch) {
  for (const DataType dtype : {OPENMSA_FLOAT32, OPENMSA_BFLOAT16, OPENMSA_FLOAT16, OPENMSA_FLOAT8_E4M3}) {
    Shape s;
    s.dtype = dtype;
    s.tokens_q = 600;
    s.tokens_k = 12600;
    s.dim = 36;
    s.heads = 3;
    s.topk = 40;
    Problem problem(s, normal);
    const Selection whole = problem.run(cpu_backend());
    for (const int64_t query : {0, 1, 255, 256, 400, 599}) {
      const Selection one = alone(problem, query);
      for (int64_t head = 0; head < s.heads; ++head) {
        const auto at = static_cast<size_t>(head * s.tokens_q + query), own = static_cast<size_t>(head);
        const auto topk = static_cast<size_t>(s.topk);
        EXPECT_TRUE(std::equal(one.indices.begin() + static_cast<int64_t>(own * topk),
                               one.indices.begin() + static_cast<int64_t>((own + 1) * topk),
                               whole.indices.begin() + static_cast<int64_t>(at * topk)))
            << "query " << query << ", " << describe(s);
        EXPECT_EQ(std::memcmp(&one.index_lse[own], &whole.index_lse[at], sizeof(float)), 0) << "query " << query;
      }
    }
  }
}

TEST(CpuSelect, PagesHaveTheBitsOfContiguousKeys) {
  Shape p = paged({20}, {10000}, 64);
  p.dim = 40;
  Problem pages(p, normal);
  Shape c = p;
  c.pages = 0;
  c.seq_lens = {};
  c.cu_seqlens_q = {};
  c.tokens_k = 10000;
  Problem contiguous(c);
  contiguous.index_q = pages.index_q;
  for (int64_t j = 0; j < c.tokens_k; ++j) {
    const int64_t page = p.table[0][static_cast<size_t>(j / 64)];
    std::copy_n(pages.key(page * 64 + j % 64), c.dim, contiguous.key(j));
  }
  const Selection a = pages.run(cpu_backend()), b = contiguous.run(cpu_backend());
  EXPECT_EQ(a.indices, b.indices);
  EXPECT_EQ(bits_of(a.index_lse), bits_of(b.index_lse));
}

// Offsets, lengths and tables of any value clamp as the reference clamps them.
TEST(CpuSelect, HostileLayouts) {
  std::mt19937_64 random(3);
  const auto hostile = [&](int32_t usual) {
    const int32_t values[] = {std::numeric_limits<int32_t>::min(), -1, 0, 1, usual / 2, usual - 1, usual, usual + 1,
                              std::numeric_limits<int32_t>::max()};
    return random() % 2 == 0 ? values[random() % std::size(values)]
                             : static_cast<int32_t>(random() % static_cast<uint64_t>(usual + 1));
  };
  for (int round = 0; round < 60; ++round) {
    Shape s;
    s.tokens_q = 150;
    s.tokens_k = 500;
    s.local_blocks = round % 3;
    s.init_blocks = round % 5;
    const size_t batch = 1 + random() % 5;
    for (size_t b = 0; b <= batch; ++b) s.cu_seqlens_q.push_back(hostile(150));
    if (round % 2 == 0) {
      for (size_t b = 0; b <= batch; ++b) s.cu_seqlens_k.push_back(hostile(500));
      if (round % 4 == 0) {
        for (size_t b = 0; b < batch; ++b) s.k_starts.push_back(hostile(500));
      }
    } else {
      s.pages = 9;
      for (size_t b = 0; b < batch; ++b) {
        s.seq_lens.push_back(hostile(7 * 32));
        s.table.emplace_back();
        for (int page = 0; page < 7; ++page) s.table.back().push_back(hostile(9));
      }
    }
    expect_reference(Problem(s), "round " + std::to_string(round));
  }
}

}  // namespace
}  // namespace openmsa::testing
