#include "emulate/products.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "api/numeric.h"
#include "emulate/block.h"

namespace openmsa::emulate {
namespace {

constexpr int kRows = 64;
constexpr int kStepBytes = 32;  // of k
constexpr int kMostDepth = 32;  // elements of k
constexpr int kMostColumns = 256;
constexpr int kPiece = 16;

const char* const kName = "wgmma.mma_async";

int element_bytes(ProductType type) { return type == ProductType::float8_e4m3 ? 1 : 2; }

template <std::size_t kCount, typename Bits, float (*kDecode)(Bits)>
const float* decode_table() {
  static const auto table = [] {
    std::vector<float> values(kCount);
    for (std::size_t i = 0; i < kCount; ++i) values[i] = kDecode(static_cast<Bits>(i));
    return values;
  }();
  return table.data();
}

// Elements of 16 bytes.
void decode_piece(ProductType type, const unsigned char* piece, float* out) {
  if (type == ProductType::float8_e4m3) {
    const float* const table = decode_table<256, uint8_t, float8_e4m3_to_float>();
    for (int i = 0; i < 16; ++i) out[i] = table[piece[i]];
    return;
  }
  uint16_t bits[8];
  __builtin_memcpy(bits, piece, sizeof(bits));
  if (type == ProductType::bfloat16) {
    for (int i = 0; i < 8; ++i) out[i] = bfloat16_to_float(bits[i]);
  } else {
    const float* const table = decode_table<65536, uint16_t, float16_to_float>();
    for (int i = 0; i < 8; ++i) out[i] = table[bits[i]];
  }
}

// PTX ISA, "Matrix Descriptor Format": where 16-byte pieces of an operand lie. Of a K-major one, piece p of row r holds
// elements [8 p, 8 p + 8) of k (16 of float8); of an MN-major one, row r is an element of k and piece p holds rows or
// columns [8 p, 8 p + 8) of the matrix.
class Operand {
 public:
  Operand(uint64_t descriptor, bool mn_major) : mn_major_(mn_major) {
    start_ = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
    leading_ = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4;
    stride_ = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
    switch (descriptor >> 62) {
      case 1:
        width_ = 128;
        break;
      case 2:
        width_ = 64;
        break;
      case 3:
        width_ = 32;
        break;
      default:
        width_ = 16;
    }
    if ((descriptor >> 49 & 7) != 0) Block::current().fault(std::string(kName) + ": base offsets are not emulated");
  }

  uint32_t piece(int row, int number) const {
    const auto r = static_cast<uint32_t>(row), p = static_cast<uint32_t>(number);
    uint32_t at = start_;
    if (!mn_major_) {
      // Groups of 8 rows of the swizzle's width; without a swizzle, of 16 bytes, the second piece `leading` away.
      at += r / 8 * stride_ + r % 8 * width_ + (width_ == 16 ? p * leading_ : p * kPiece);
    } else if (width_ == 16) {
      at += r % 8 * kPiece + r / 8 * leading_ + p * stride_;
    } else {
      // Groups of 8 elements of k, `stride` apart; each covers the swizzle's width of the other dimension, whose next
      // part is `leading` away.
      const uint32_t per_row = width_ / kPiece;
      at += r % 8 * width_ + r / 8 * stride_ + p % per_row * kPiece + p / per_row * leading_;
    }
    return at ^ (at >> 7 & (width_ / kPiece - 1)) << 4;
  }

 private:
  bool mn_major_;
  uint32_t start_, leading_, stride_, width_;
};

// Calls visit(row, piece, shared address) for each piece of an operand with `count` rows or columns.
template <typename Visit>
void visit_pieces(const ProductShape& shape, uint64_t descriptor, bool mn_major, int count, const Visit& visit) {
  const Operand operand(descriptor, mn_major);
  const int bytes = element_bytes(shape.type);
  const int rows = mn_major ? kStepBytes / bytes : count;
  const int pieces = mn_major ? count * bytes / kPiece : kStepBytes / kPiece;
  for (int row = 0; row < rows; ++row) {
    for (int piece = 0; piece < pieces; ++piece) visit(row, piece, operand.piece(row, piece));
  }
}

void note_reads(Product& product, uint64_t descriptor, bool mn_major, int count, const char* which) {
  Block& block = Block::current();
  visit_pieces(product.shape, descriptor, mn_major, count, [&](int, int, uint32_t address) {
    static_cast<void>(SharedMemory::at(address));
    if (block.shared.is_written(address)) {
      block.fault(std::string(kName) + ": a copy is on its way to operand " + which + ", at shared address " +
                  std::to_string(address));
    }
    block.shared.begin_read(address);
    product.reads.push_back(address);
  });
}

void release_reads(Product& product) {
  if (std::exchange(product.released, true)) return;
  for (const uint32_t address : product.reads) Block::current().shared.end_read(address);
  product.reads = {};
}

// Sum i of a thread: row and column.
int sum_row(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + 8 * (i / 2 % 2); }
int sum_column(int thread, int i) { return 8 * (i / 4) + 2 * (thread % 4) + i % 2; }

struct Matrices {
  alignas(64) float a[kRows][kMostDepth];
  alignas(64) float b[kMostDepth][kMostColumns];
};

void decode_operand(const ProductShape& shape, uint64_t descriptor, bool mn_major, int count, auto&& store) {
  const int per_piece = kPiece / element_bytes(shape.type);
  visit_pieces(shape, descriptor, mn_major, count, [&](int row, int piece, uint32_t address) {
    float values[kPiece];
    decode_piece(shape.type, SharedMemory::at(address), values);
    for (int i = 0; i < per_piece; ++i) {
      const int along = piece * per_piece + i;
      mn_major ? store(along, row, values[i]) : store(row, along, values[i]);
    }
  });
}

// Words of a register operand: bytes 4 (l % 4) to + 3 of rows l / 4 and l / 4 + 8, first those of the first 16 bytes.
void decode_registers(const Product& product, Matrices& m) {
  const int bytes = element_bytes(product.shape.type), per_word = 4 / bytes;
  for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
    float values[kPiece];
    decode_piece(product.shape.type,
                 reinterpret_cast<const unsigned char*>(&product.a_words[static_cast<std::size_t>(4 * thread)]),
                 values);
    for (int word = 0; word < 4; ++word) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + word % 2 * 8;
      const int k = word / 2 * (kPiece / bytes) + thread % 4 * per_word;
      for (int i = 0; i < per_word; ++i) m.a[row][k + i] = values[word * per_word + i];
    }
  }
}

template <int kColumns>
void multiply(const Matrices& m, int depth, float* result) {
  for (int row = 0; row < kRows; ++row) {
    float* const sums = result + row * kColumns;
    for (int k = 0; k < depth; ++k) {
      const float a = m.a[row][k];
      for (int column = 0; column < kColumns; ++column) sums[column] += a * m.b[k][column];
    }
  }
}

void multiply(const Matrices& m, int depth, int columns, float* result) {
  switch (columns) {
    case 64:
      return multiply<64>(m, depth, result);
    case 128:
      return multiply<128>(m, depth, result);
    default:
      for (int row = 0; row < kRows; ++row) {
        for (int k = 0; k < depth; ++k) {
          for (int column = 0; column < columns; ++column) {
            result[row * columns + column] += m.a[row][k] * m.b[k][column];
          }
        }
      }
  }
}

void execute(Product& product) {
  static thread_local Matrices m;
  const ProductShape& shape = product.shape;
  if (product.before != nullptr) product.result = std::move(product.before->result);
  if (shape.a_in_registers) {
    decode_registers(product, m);
  } else {
    decode_operand(shape, product.a, shape.a_is_mn_major, kRows, [](int row, int k, float v) { m.a[row][k] = v; });
  }
  decode_operand(shape, product.b, shape.b_is_mn_major, shape.n,
                 [](int column, int k, float v) { m.b[k][column] = v; });
  multiply(m, kStepBytes / element_bytes(shape.type), shape.n, product.result.data());
  product.done = true;
}

void execute_until(ProductQueue& queue, uint64_t end) {
  for (uint64_t number = queue.first; number < end; ++number) {
    Product& product = queue.products[number - queue.first];
    if (!product.done) execute(product);
  }
}

// The product of this thread's queue that its next issue belongs to.
Product& next_product(const ProductShape& shape, uint64_t a, uint64_t b, bool accumulate) {
  Block& block = Block::current();
  Thread& thread = block.thread();
  ProductQueue& queue = block.products[static_cast<std::size_t>(thread.warpgroup())];
  const uint64_t number = thread.products.issued++;
  if (number - queue.first < queue.products.size()) {
    Product& product = queue.products[number - queue.first];
    if (!(product.shape == shape) || product.b != b || product.accumulate != accumulate ||
        (!shape.a_in_registers && product.a != a)) {
      block.fault(std::string(kName) + ": threads of a warpgroup differ in shape, descriptors or accumulation");
    }
    return product;
  }
  Product& product = queue.products.emplace_back();
  product.shape = shape;
  product.a = a;
  product.b = b;
  product.accumulate = accumulate;
  product.sums.resize(kWarpgroupThreads);
  if (shape.a_in_registers) {
    product.a_words.resize(4 * kWarpgroupThreads);
  } else {
    note_reads(product, a, shape.a_is_mn_major, kRows, "a");
  }
  note_reads(product, b, shape.b_is_mn_major, shape.n, "b");
  return product;
}

}  // namespace

void issue_product(const ProductShape& shape, float* sums, uint64_t a, const uint32_t* a_words, uint64_t b,
                   bool accumulate) {
  Block& block = Block::current();
  block.maybe_give_way();
  Thread& thread = block.thread();
  if (!thread.products.fenced) {
    block.fault(std::string(kName) + ": no wgmma.fence since registers may have been used");
  }
  if (block.threads() < (thread.warpgroup() + 1) * kWarpgroupThreads) {
    block.fault(std::string(kName) + ": the warpgroup is not whole");
  }
  ProductQueue& queue = block.products[static_cast<std::size_t>(thread.warpgroup())];
  Product& product = next_product(shape, a, b, accumulate);
  const int place = thread.number % kWarpgroupThreads;
  const auto count = static_cast<std::size_t>(shape.n / 2);
  if (a_words != nullptr) std::copy_n(a_words, 4, product.a_words.begin() + 4 * place);

  // An earlier product with the same sums, still under way for this thread.
  Product* before = nullptr;
  for (uint64_t number = thread.products.issued - 1; number-- > thread.products.retired;) {
    Product& other = queue.products[number - queue.first];
    if (other.sums[static_cast<std::size_t>(place)] != sums) continue;
    before = &other;
    break;
  }
  product.sums[static_cast<std::size_t>(place)] = sums;
  if (product.issued == 0) {
    product.before = accumulate ? before : nullptr;
    if (product.before == nullptr) product.result.assign(static_cast<std::size_t>(kRows) * shape.n, 0.0F);
  } else if (accumulate && product.before != before) {
    block.fault(std::string(kName) + ": threads of a warpgroup differ in their sums");
  }
  if (before != nullptr) {
    if (!(before->shape.n == shape.n)) block.fault(std::string(kName) + ": sums under way continue in another shape");
    before->continued = true;
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      if (accumulate) {
        const auto at = static_cast<std::size_t>(sum_row(place, static_cast<int>(i)) * shape.n +
                                                 sum_column(place, static_cast<int>(i)));
        product.result[at] = sums[i];
      }
      sums[i] = std::bit_cast<float>(~uint32_t{0});
    }
  }
  if (++product.issued < kWarpgroupThreads) return;
  block.wake(queue.waiting);
  if (block.at_random(0.5)) execute_until(queue, thread.products.issued);
}

void fence_products() {
  Block::current().maybe_give_way();
  Block::current().thread().products.fenced = true;
}

void commit_products() {
  ProductThread& mine = Block::current().thread().products;
  mine.groups.push_back(mine.issued);
  mine.committed = mine.issued;
}

void wait_products(int pending) {
  Block& block = Block::current();
  block.maybe_give_way();
  Thread& thread = block.thread();
  ProductThread& mine = thread.products;
  ProductQueue& queue = block.products[static_cast<std::size_t>(thread.warpgroup())];
  const auto place = static_cast<std::size_t>(thread.number % kWarpgroupThreads);
  mine.fenced = false;
  while (static_cast<int>(mine.groups.size()) > pending) {
    const uint64_t end = mine.groups.front();
    mine.groups.pop_front();
    for (; mine.retired < end; ++mine.retired) {
      while (queue.products[mine.retired - queue.first].issued < kWarpgroupThreads) {
        block.wait(queue.waiting, "the rest of the warpgroup at wgmma.mma_async", nullptr);
      }
      execute_until(queue, end <= queue.first + queue.products.size() &&
                                   queue.products[end - 1 - queue.first].issued == kWarpgroupThreads
                               ? end
                               : mine.retired + 1);
      Product& product = queue.products[mine.retired - queue.first];
      release_reads(product);
      if (!product.continued) {
        float* const sums = product.sums[place];
        for (int i = 0; i < product.shape.n / 2; ++i) {
          sums[i] = product.result[static_cast<std::size_t>(sum_row(static_cast<int>(place), i) * product.shape.n +
                                                            sum_column(static_cast<int>(place), i))];
        }
      }
      ++product.retired;
      while (!queue.products.empty() && queue.products.front().retired == kWarpgroupThreads) {
        queue.products.pop_front();
        ++queue.first;
      }
    }
  }
}

}  // namespace openmsa::emulate
