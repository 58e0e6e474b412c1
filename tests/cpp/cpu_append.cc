// append beyond the case table: every rounding to float8, and pages that many rows of many requests share.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <numeric>
#include <vector>

#include "api/numeric.h"
#include "api/stages.h"
#include "cpp/cpu_threads.h"

namespace openmsa::testing {
namespace {

Tensor dense(void* data, DataType dtype, const std::vector<int64_t>& shape) {
  Tensor tensor{};
  tensor.data = data;
  tensor.rank = static_cast<int32_t>(shape.size());
  tensor.dtype = dtype;
  int64_t stride = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    tensor.shape[axis] = shape[axis];
    tensor.strides[axis] = stride;
    stride *= shape[axis];
  }
  return tensor;
}

// Requests that append all their keys: request b's page of block n is table[b][n].
struct Requests {
  std::vector<int32_t> offsets, lengths, table;
  SequenceLayout layout;

  Requests(const std::vector<int32_t>& keys, const std::vector<int32_t>& block_table, int64_t pages, int64_t page_size)
      : offsets(keys.size() + 1), lengths(keys), table(block_table) {
    std::partial_sum(keys.begin(), keys.end(), offsets.begin() + 1);
    layout.paged = true;
    layout.batch = static_cast<int64_t>(keys.size());
    layout.tokens_q = offsets.back();
    layout.tokens_k = pages * page_size;
    layout.cu_seqlens_q = offsets.data();
    layout.seq_lens = lengths.data();
    layout.block_table = table.data();
    layout.max_pages = layout.block_table_stride = static_cast<int64_t>(table.size() / keys.size());
    layout.pages = pages;
  }
};

// Every upper half of a float32 with a few lower ones: all exponents, all mantissas around every tie of e4m3.
TEST(CpuAppend, RoundsToFloat8AsTheScalarConversionDoes) {
  constexpr int64_t kDim = 128, kRows = 5 * 65536 / kDim, kPage = 128, kPages = kRows / kPage;
  std::vector<float> rows;
  for (uint32_t upper = 0; upper < 65536; ++upper) {
    for (uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0xffffu}) {
      rows.push_back(std::bit_cast<float>((upper << 16) | lower));
    }
  }
  std::vector<int32_t> pages(kPages);
  std::iota(pages.begin(), pages.end(), 0);
  const Requests requests({kRows}, pages, kPages, kPage);
  for (float factor : {1.0F, 0.37F}) {
    std::vector<uint8_t> cache(rows.size()), other = cache, third = cache;
    AppendParams params;
    params.layout = requests.layout;
    params.k = params.v = params.index_k = dense(rows.data(), OPENMSA_FLOAT32, {kRows, 1, kDim});
    params.k_cache = dense(cache.data(), OPENMSA_FLOAT8_E4M3, {kPages, kPage, 1, kDim});
    params.v_cache = dense(other.data(), OPENMSA_FLOAT8_E4M3, {kPages, kPage, 1, kDim});
    params.index_k_cache = dense(third.data(), OPENMSA_FLOAT8_E4M3, {kPages, kPage, 1, kDim});
    params.k_scale.value = static_cast<double>(factor);
    cpu_backend().append(params);
    int64_t wrong = 0;
    for (size_t n = 0; n < rows.size(); ++n) {
      if (cache[n] != float_to_float8_e4m3(rows[n] / factor) && ++wrong < 5) {
        ADD_FAILURE() << rows[n] << " / " << factor << ": " << int{cache[n]};
      }
      if (third[n] != float_to_float8_e4m3(rows[n])) ++wrong;
    }
    EXPECT_EQ(wrong, 0);
  }
}

// Four requests write the same two pages, and one of them a page twice: the last row of the call stays.
TEST(CpuAppend, TheLastRowStaysOnSharedPagesOnAnyThreads) {
  constexpr int64_t kDim = 256, kPage = 128, kPages = 3, kKeys = 2 * kPage;
  const Requests requests({kKeys, kKeys, kKeys - 5, kKeys}, {0, 1, 1, 0, 2, 2, 0, 1}, kPages, kPage);
  const int64_t tokens = requests.layout.tokens_q;
  std::vector<float> rows(static_cast<size_t>(tokens * kDim));
  for (size_t n = 0; n < rows.size(); ++n) rows[n] = static_cast<float>(n / kDim);
  const auto append = [&](const Backend& backend) {
    std::vector<float> cache(static_cast<size_t>(kPages * kPage * kDim), -1.0F), v_cache = cache, index_cache = cache;
    AppendParams params;
    params.layout = requests.layout;
    params.k = params.v = params.index_k = dense(rows.data(), OPENMSA_FLOAT32, {tokens, 1, kDim});
    params.k_cache = dense(cache.data(), OPENMSA_FLOAT32, {kPages, kPage, 1, kDim});
    params.v_cache = dense(v_cache.data(), OPENMSA_FLOAT32, {kPages, kPage, 1, kDim});
    params.index_k_cache = dense(index_cache.data(), OPENMSA_FLOAT32, {kPages, kPage, 1, kDim});
    backend.append(params);
    return bits_of(cache, v_cache, index_cache);
  };
  const std::vector<unsigned char> expected = append(reference_backend());
  expect_same_bits_on_any_threads([&] { return append(cpu_backend()); });
  const ThreadCount count(3);
  for (int repeat = 0; repeat < 10; ++repeat) ASSERT_TRUE(append(cpu_backend()) == expected) << repeat;
}

}  // namespace
}  // namespace openmsa::testing
