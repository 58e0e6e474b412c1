// Asynchronous matrix products of warpgroups.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace openmsa::emulate {

enum class ProductType { bfloat16, float16, float8_e4m3 };

// d (64 x n) = a (64 x k) b (k x n), k of 32 bytes. An operand in shared memory is K-major or MN-major.
struct ProductShape {
  ProductType type;
  int n;
  bool a_in_registers = false;
  bool a_is_mn_major = false, b_is_mn_major = false;
  bool operator==(const ProductShape&) const = default;
};

struct Product {
  ProductShape shape{};
  uint64_t a = 0, b = 0;  // descriptors
  bool accumulate = false;
  bool continued = false;  // a later product adds to the same sums
  bool done = false, released = false;
  int issued = 0, retired = 0;    // threads
  Product* before = nullptr;      // the product whose sums this one continues
  std::vector<float> result;      // [64][n]
  std::vector<uint32_t> a_words;  // [128][4]
  std::vector<float*> sums;       // [128]
  std::vector<uint32_t> reads;    // shared addresses of its 16-byte pieces
};

// The products of a warpgroup that some of its threads have not waited for, oldest first.
struct ProductQueue {
  uint64_t first = 0;  // number of the oldest
  std::deque<Product> products;
  std::vector<struct Thread*> waiting;
};

// What a thread knows of its warpgroup's products.
struct ProductThread {
  uint64_t issued = 0, retired = 0;
  std::deque<uint64_t> groups;  // the ends of committed groups that it has not waited for
  uint64_t committed = 0;
  bool fenced = false;
};

// wgmma.mma_async. `a` is a descriptor unless a_words is given. `sums` has n / 2 floats.
void issue_product(const ProductShape& shape, float* sums, uint64_t a, const uint32_t* a_words, uint64_t b,
                   bool accumulate);
void fence_products();
void commit_products();
void wait_products(int pending);

}  // namespace openmsa::emulate
