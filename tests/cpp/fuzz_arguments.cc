// Hostile arguments: small valid calls with random parts made wrong. A call must succeed or throw openmsa::Error; it
// must write nothing when it throws and nothing outside its outputs' elements when it succeeds. Meant for builds with
// AddressSanitizer and UBSan.
//
// fuzz_arguments [iterations] [seed]: a repeatable run. With OPENMSA_FUZZER it is a libFuzzer target instead.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "api/dtype.h"
#include "cpp/api_calls.h"
#include "fuzz_driver.h"

namespace openmsa::tests {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
constexpr int32_t kMost32 = std::numeric_limits<int32_t>::max();
constexpr int32_t kLeast32 = std::numeric_limits<int32_t>::min();

// Decisions from a string of bytes; 0 when it is used up.
class Choices {
 public:
  Choices(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  size_t below(size_t bound) {
    if (left_ == 0) return 0;
    --left_;
    return *data_++ % bound;
  }
  bool one_in(size_t chances) { return below(chances) == chances - 1; }
  template <typename Value, size_t count>
  Value of(const std::array<Value, count>& values) {
    return values[below(count)];
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

ProblemSize random_size(Choices& choices) {
  constexpr std::array<int32_t, 6> kQueries{3, 0, 1, 2, 5, 4};
  constexpr std::array<int32_t, 8> kKeys{40, 0, 1, 31, 32, 33, 64, 97};
  constexpr std::array<int64_t, 5> kBlocks{32, 64, 128, 32, 48};
  constexpr std::array<int64_t, 4> kTopk{2, 1, 5, 16};
  constexpr std::array<std::array<int64_t, 4>, 7> kHeads{
      {{6, 1, 3, 1}, {4, 2, 4, 2}, {1, 1, 1, 1}, {8, 2, 2, 1}, {4, 4, 4, 4}, {4, 3, 2, 1}, {5, 1, 2, 3}}};
  constexpr std::array<DataType, 4> kTypes{OPENMSA_FLOAT32, OPENMSA_FLOAT16, OPENMSA_BFLOAT16, OPENMSA_FLOAT8_E4M3};
  ProblemSize size;
  const size_t batch = choices.below(4);
  size.queries.resize(batch);
  size.keys.resize(batch);
  for (size_t b = 0; b < batch; ++b) {
    size.queries[b] = choices.of(kQueries);
    size.keys[b] = choices.of(kKeys);
  }
  size.padded_queries = static_cast<int64_t>(choices.below(3));
  const std::array<int64_t, 4> heads = choices.of(kHeads);
  size.heads_q = heads[0], size.heads_kv = heads[1], size.heads_index = heads[2], size.heads_index_k = heads[3];
  size.dim = 1 + static_cast<int64_t>(choices.below(9));
  size.dim_v = 1 + static_cast<int64_t>(choices.below(9));
  size.dim_index = 1 + static_cast<int64_t>(choices.below(9));
  size.block = choices.of(kBlocks);
  size.topk = choices.of(kTopk);
  size.splits = static_cast<int64_t>(choices.below(4));
  size.type = kTypes[choices.below(3)];
  size.index_type = choices.of(kTypes);
  size.cache_type = choices.one_in(2) ? OPENMSA_FLOAT8_E4M3 : size.type;
  return size;
}

// What a view claims, with room for every product.
struct Claim {
  bool representable = true;  // else every operation must refuse it before it touches memory
  bool small = true;          // in memory and in work
};

Claim claim_of(const Tensor& view) {
  using Wide = __int128;
  constexpr Wide kLimit = kMost;
  Claim claim;
  Wide elements = 1, extent = 1;
  bool empty = false;
  for (int32_t axis = 0; axis < view.rank; ++axis) {
    const int64_t length = view.shape[axis];
    if (length < 0) return {false, false};
    empty = empty || length == 0;
    if (length > 1) {
      const Wide stride = view.strides[axis] < 0 ? -static_cast<Wide>(view.strides[axis]) : view.strides[axis];
      elements = std::min(elements * length, kLimit + 1);
      extent = std::min(extent + std::min(stride * (length - 1), kLimit), kLimit + 1);
    }
  }
  const Wide bytes = std::max<int64_t>(dtype_size(view.dtype), 1);
  claim.representable = elements * bytes <= kLimit && extent * bytes <= kLimit;
  claim.small = empty || (elements <= 20000 && extent * bytes <= (1 << 20));
  return claim;
}

bool same_layout(const Tensor& a, const Tensor& b) {
  return a.rank == b.rank && a.dtype == b.dtype && std::equal(a.shape, a.shape + a.rank, b.shape) &&
         std::equal(a.strides, a.strides + a.rank, b.strides);
}

// Gives a changed view memory of its own, with the elements it had, so that no call is offered memory that is not
// there.
void provide_memory(TensorSlot& slot) {
  const cases::HostTensor old = slot.memory.fetch();
  const Tensor view = slot.view;
  if (view.rank < 0 || view.rank > OPENMSA_MAX_RANK || !is_data_type(view.dtype)) return;  // refused by these alone
  if (same_layout(view, old.view)) return;
  const Claim claim = claim_of(view);
  if (!claim.representable) return;
  if (!claim.small) {
    slot.view = *slot.memory.tensor();
    return;
  }
  const std::vector<unsigned char> bytes = cases::packed_bytes(old);
  place(slot, static_cast<DataType>(view.dtype), {view.shape, view.shape + view.rank},
        {view.strides, view.strides + view.rank}, kPoison);
  slot.view.device_type = view.device_type;
  slot.view.device_index = view.device_index;
  if (view.data == nullptr) slot.view.data = nullptr;
  if (bytes.empty() || slot.view.data == nullptr) return;
  const cases::HostTensor now = slot.memory.fetch();
  if (now.elements() == 0) return;
  const int64_t item = dtype_size(view.dtype), count = now.elements();
  for (int64_t n = 0; n < count; ++n) {
    int64_t rest = n, position = 0;
    for (int32_t axis = view.rank - 1; axis >= 0; --axis) {
      position += rest % view.shape[axis] * view.strides[axis];
      rest /= view.shape[axis];
    }
    for (int64_t byte = 0; byte < item; ++byte) {
      static_cast<unsigned char*>(slot.view.data)[position * item + byte] =
          bytes[static_cast<size_t>(n * item + byte) % bytes.size()];
    }
  }
}

constexpr std::array<int64_t, 16> kLengths{
    0, 1, 2, 3, 7, 31, 33, 64, 129, 300, -1, kLeast, kMost, int64_t{1} << 31, int64_t{1} << 62, kMost / 4};
constexpr std::array<int64_t, 14> kStrides{
    0, 1, -1, 2, 9, 40, -40, 513, kMost, kLeast, -kMost, int64_t{1} << 40, int64_t{1} << 61, -2};

// Data or bytes of a tensor; a view that the layout no longer describes is left alone.
void change_values(TensorSlot& slot, Choices& choices) {
  if (slot.view.data == nullptr || !same_layout(slot.view, *slot.memory.tensor())) return;
  const cases::HostTensor image = slot.memory.fetch();
  const int64_t count = image.elements();
  if (count == 0) return;
  const size_t changes = 1 + choices.below(3);
  for (size_t change = 0; change < changes; ++change) {
    const auto n = static_cast<int64_t>(choices.below(256)) % count;
    int64_t rest = n, position = 0;
    for (int32_t axis = slot.view.rank - 1; axis >= 0; --axis) {
      position += rest % slot.view.shape[axis] * slot.view.strides[axis];
      rest /= slot.view.shape[axis];
    }
    if (slot.view.dtype == OPENMSA_INT32) {
      constexpr std::array<int32_t, 12> kValues{0, -1, 1, 2, 3, 33, 64, 1000, kMost32, kLeast32, -64, 1 << 30};
      static_cast<int32_t*>(slot.view.data)[position] = choices.of(kValues);
    } else if (slot.view.dtype == OPENMSA_FLOAT32) {
      constexpr std::array<float, 6> kValues{NAN, INFINITY, -INFINITY, 3e38f, 1e-45f, -0.0f};
      static_cast<float*>(slot.view.data)[position] = choices.of(kValues);
    } else {
      const int64_t item = dtype_size(slot.view.dtype);
      constexpr std::array<int, 4> kBytes{0xff, 0x7f, 0x7c, 0x80};
      std::memset(static_cast<unsigned char*>(slot.view.data) + position * item, choices.of(kBytes),
                  static_cast<size_t>(item));
    }
  }
}

void change_tensor(TensorSlot& slot, Choices& choices) {
  constexpr std::array<int32_t, 6> kRanks{3, 2, 0, 5, -1, kMost32};
  constexpr std::array<int32_t, 9> kTypes{0, 1, 2, 3, 4, 5, 6, -1, 77};
  constexpr std::array<int32_t, 4> kDevices{OPENMSA_GPU, 2, -1, kMost32};
  Tensor& view = slot.view;
  const size_t axis =
      view.rank > 0 && view.rank <= OPENMSA_MAX_RANK ? choices.below(static_cast<size_t>(view.rank)) : 0;
  switch (choices.below(10)) {
    case 0:
      view.rank = choices.of(kRanks);
      break;
    case 1:
      view.shape[axis] = choices.of(kLengths);
      break;
    case 2:
    case 3:
      view.strides[axis] = choices.of(kStrides);
      break;
    case 4:
      view.dtype = choices.of(kTypes);
      break;
    case 5:
      view.device_type = choices.of(kDevices);
      break;
    case 6:
      view.device_index = choices.of(kDevices);
      break;
    case 7:
      view.data = nullptr;
      break;
    case 8:
      slot.present = !slot.present;
      break;
    default:
      change_values(slot, choices);
      return;
  }
  provide_memory(slot);
}

void change_call(Call& call, Choices& choices) {
  constexpr std::array<int64_t, 12> kNumbers{0, 1, -1, 2, 5, 64, 32, 128, kMost, kLeast, kMost32, int64_t{1} << 40};
  constexpr std::array<double, 8> kFactors{0.25, 0.0, -1.0, NAN, INFINITY, 1e-300, 1e300, 1e30};
  const size_t what = choices.below(8);
  if (what == 0 && !call.numbers.empty()) {
    call.numbers[choices.below(call.numbers.size())].value = choices.of(kNumbers);
  } else if (what == 1 && !call.factors.empty()) {
    FactorSlot& slot = call.factors[choices.below(call.factors.size())];
    slot.present = !choices.one_in(4);
    slot.value = choices.of(kFactors);
  } else if (what == 2) {  // hostile offsets, tables, lengths and indices
    for (TensorSlot& slot : call.tensors) {
      if (slot.view.dtype == OPENMSA_INT32 && choices.one_in(2)) change_values(slot, choices);
    }
  } else {
    change_tensor(call.tensors[choices.below(call.tensors.size())], choices);
  }
}

std::vector<std::vector<unsigned char>> memory_of(const Call& call) {
  std::vector<std::vector<unsigned char>> bytes;
  for (const TensorSlot& slot : call.tensors) bytes.push_back(slot.bytes());  // throws when more than elements changed
  return bytes;
}

void try_call(const uint8_t* data, size_t size, Tally& tally) {
  Choices choices(data, size);
  const char* operation = choices.of(kOperationNames);
  const auto call = make_call(operation, random_size(choices));
  const size_t changes = choices.below(4);
  for (size_t change = 0; change < changes; ++change) change_call(*call, choices);

  const auto before = memory_of(*call);
  bool sized = true;
  try {
    call->workspace_size();
  } catch (const Error&) {
    sized = false;
  }
  require(memory_of(*call) == before, "workspace_size wrote");

  const openmsa_status status = call->run_c();
  require(status != OPENMSA_INTERNAL_ERROR && status != OPENMSA_OUT_OF_MEMORY && status != OPENMSA_DEVICE_ERROR,
          openmsa_last_error());
  require(status != OPENMSA_OK || sized, "workspace_size refused what the operation takes");
  const auto after = memory_of(*call);
  if (status == OPENMSA_OK) {
    ++tally.accepted;
    for (size_t n = 0; n < before.size(); ++n) {
      require(call->tensors[n].output || after[n] == before[n], "an input was written");
    }
  } else {
    ++tally.refused;
    const std::string message = openmsa_last_error();
    require(message.find(": ") != std::string::npos || message.find("backend") != std::string::npos,
            "the message names no argument");
    require(after == before, "written by a call that was refused");
  }
}

}  // namespace
}  // namespace openmsa::tests

#ifdef OPENMSA_LIBFUZZER
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  openmsa::tests::Tally tally;
  openmsa::tests::try_call(data, size, tally);
  return 0;
}
#else
int main(int argc, char** argv) {
  using openmsa::tests::Tally;
  return openmsa::tests::run_fuzzer(argc, argv, 5000, "calls", [](std::mt19937_64& random, Tally& tally) {
    std::vector<uint8_t> bytes(96);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    openmsa::tests::try_call(bytes.data(), bytes.size(), tally);
  });
}
#endif
