// Every check of every operation: the message names the argument, and nothing is written.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <locale>

#include "api/checks.h"
#include "api/dtype.h"
#include "cpp/api_calls.h"

namespace openmsa::tests {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

std::vector<std::vector<unsigned char>> memory_of(const Call& call) {
  std::vector<std::vector<unsigned char>> bytes;
  for (const TensorSlot& slot : call.tensors) bytes.push_back(slot.bytes());
  return bytes;
}

// The call is refused with a message that starts with `name` and has each of `parts`, and writes nothing.
void expect_refused(Call& call, const std::string& name, const std::vector<std::string>& parts = {},
                    Status status = OPENMSA_INVALID_ARGUMENT) {
  const auto before = memory_of(call);
  try {
    call.run();
    ADD_FAILURE() << "accepted, expected an error about " << name;
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.status(), status) << message;
    EXPECT_EQ(message.rfind(name + ":", 0), 0U) << "expected an error about " << name << ", got: " << message;
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
  }
  EXPECT_EQ(memory_of(call), before) << "written by a call that was refused";
}

// "k_scale tensor" is the tensor of the argument k_scale.
std::string argument_of(const TensorSlot& slot) { return slot.name.substr(0, slot.name.find(' ')); }

void make_present(Call& call, TensorSlot& slot) {
  slot.present = true;
  if (slot.name.find("_scale tensor") == std::string::npos) return;
  // A factor is for float8 caches only; their bytes may be anything here.
  for (TensorSlot& other : call.tensors) {
    if (other.name == "k_cache" || other.name == "v_cache") other.view.dtype = OPENMSA_FLOAT8_E4M3;
  }
}

std::string operation_of(const testing::TestParamInfo<const char*>& parameter) { return parameter.param; }

class EveryOperation : public testing::TestWithParam<const char*> {
 protected:
  // Applies `change` to one tensor of a fresh call at a time; the operation must blame that tensor.
  template <typename Change>
  void blame_each_tensor(const Change& change, const std::vector<std::string>& parts, bool first_too = true) {
    const size_t count = make_call(GetParam())->tensors.size();
    for (size_t n = first_too ? 0 : 1; n < count; ++n) {
      const auto call = make_call(GetParam());
      TensorSlot& slot = call->tensors[n];
      make_present(*call, slot);
      SCOPED_TRACE(slot.name);
      if (change(slot)) expect_refused(*call, argument_of(slot), parts);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Api, EveryOperation, testing::ValuesIn(kOperationNames), operation_of);

TEST_P(EveryOperation, RunsAndWritesEveryOutput) {
  const auto call = make_call(GetParam());
  call->run();
  for (const TensorSlot& slot : call->tensors) {
    SCOPED_TRACE(slot.name);
    const std::vector<unsigned char> elements = cases::packed_bytes(slot.memory.fetch());  // throws if gaps changed
    const auto size = static_cast<size_t>(dtype_size(slot.view.dtype));
    // A cache keeps the rows that the call does not append.
    if (!slot.output || slot.name == "workspace" || slot.name.find("_cache") != std::string::npos) continue;
    for (size_t n = 0; n < elements.size(); n += size) {
      EXPECT_FALSE(std::all_of(elements.begin() + static_cast<std::ptrdiff_t>(n),
                               elements.begin() + static_cast<std::ptrdiff_t>(n + size),
                               [](unsigned char byte) { return byte == kPoison; }))
          << "element " << n / size << " was not written";
    }
  }
}

// GNU's OpenMP has no threads in a child that was forked after its first parallel loop.
TEST_P(EveryOperation, RunsInAForkedChild) {
  make_call(GetParam())->run();
  const auto call = make_call(GetParam());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);  // ends a child that waits forever
    _exit(call->run_c() == OPENMSA_OK ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

TEST_P(EveryOperation, SaysHowMuchWorkspaceItNeedsWithoutReadingOrWriting) {
  const auto call = make_call(GetParam());
  for (TensorSlot& slot : call->tensors) {
    if (slot.output) slot.view.data = nullptr;
    if (slot.name == "seq_lens") *static_cast<int32_t*>(slot.view.data) = -5;  // a value: not looked at
  }
  const auto before = memory_of(*call);
  const int64_t bytes = call->workspace_size();
  EXPECT_GE(bytes, 0);
  int64_t bytes_c = -1;
  EXPECT_EQ(call->workspace_size_c(&bytes_c), OPENMSA_OK) << openmsa_last_error();
  EXPECT_EQ(bytes_c, bytes);
  EXPECT_EQ(memory_of(*call), before);
}

TEST_P(EveryOperation, MissingTensor) {
  blame_each_tensor(
      [](TensorSlot& slot) {
        slot.present = false;
        return !slot.optional;
      },
      {"missing"});
}

TEST_P(EveryOperation, NullData) {
  blame_each_tensor(
      [](TensorSlot& slot) {
        slot.view.data = nullptr;
        return true;
      },
      {"null data"});
}

TEST_P(EveryOperation, MisalignedData) {
  blame_each_tensor(
      [](TensorSlot& slot) {
        slot.view.data = static_cast<char*>(slot.view.data) + 1;
        return dtype_size(slot.view.dtype) > 1;
      },
      {"aligned"});
}

TEST_P(EveryOperation, Rank) {
  for (int32_t rank : {-1, 5, 1000000}) {
    blame_each_tensor(
        [&](TensorSlot& slot) {
          slot.view.rank = rank;
          return true;
        },
        {"rank", std::to_string(rank)});
  }
}

TEST_P(EveryOperation, Type) {
  for (int32_t dtype : {-1, 99, 31, 32}) {
    blame_each_tensor(
        [&](TensorSlot& slot) {
          slot.view.dtype = dtype;
          return true;
        },
        {"unknown type", "expected"});
  }
  blame_each_tensor(
      [](TensorSlot& slot) {
        const bool bytes = slot.view.dtype == OPENMSA_UINT8;
        slot.view.dtype = bytes ? OPENMSA_FLOAT32 : OPENMSA_UINT8;
        return true;
      },
      {"got", "expected"});
}

TEST_P(EveryOperation, Device) {
  for (int32_t type : {-1, 2, 77}) {
    blame_each_tensor(
        [&](TensorSlot& slot) {
          slot.view.device_type = type;
          return true;
        },
        {"device type " + std::to_string(type), "cpu"});
  }
  blame_each_tensor(
      [](TensorSlot& slot) {
        slot.view.device_index = 1;
        return true;
      },
      {"cpu:1"});
  blame_each_tensor(
      [](TensorSlot& slot) {
        slot.view.device_type = OPENMSA_GPU;
        slot.view.device_index = 2;
        return true;
      },
      {"got gpu:2, expected cpu as "}, false);
}

TEST_P(EveryOperation, NegativeLength) {
  for (int64_t length : {int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
    blame_each_tensor(
        [&](TensorSlot& slot) {
          if (slot.view.rank == 0) return false;
          slot.view.shape[slot.view.rank / 2] = length;
          return true;
        },
        {std::to_string(length)});
  }
}

TEST_P(EveryOperation, SizeBeyond64Bits) {
  blame_each_tensor(
      [](TensorSlot& slot) {
        if (slot.view.rank < 2) return false;
        slot.view.shape[0] = kHuge / 2;
        slot.view.strides[0] = 0;
        return true;
      },
      {"64 bits"});
  for (int64_t stride : {kHuge, -kHuge, std::numeric_limits<int64_t>::min(), kHuge / 4}) {
    blame_each_tensor(
        [&](TensorSlot& slot) {
          if (slot.view.rank < 2 || slot.view.shape[0] < 2) return false;
          slot.view.strides[0] = stride;
          return true;
        },
        {"64 bits", std::to_string(stride)});
  }
}

TEST_P(EveryOperation, LastAxis) {
  for (int64_t stride : {0, 2, -1}) {
    blame_each_tensor(
        [&](TensorSlot& slot) {
          const int32_t last = slot.view.rank - 1;
          if (last < 0 || slot.view.shape[last] < 2) return false;
          slot.view.strides[last] = stride;
          return true;
        },
        {"last axis", std::to_string(stride)});
  }
}

TEST_P(EveryOperation, OutputThatOverlapsItself) {
  for (int64_t stride : {0, 1, -1}) {
    blame_each_tensor(
        [&](TensorSlot& slot) {
          if (!slot.output || slot.view.rank < 2) return false;
          slot.view.strides[0] = stride;
          return true;
        },
        {"overlap itself"});
  }
}

bool has_number(const Call& call, const std::string& name) {
  return std::any_of(call.numbers.begin(), call.numbers.end(),
                     [&](const NumberSlot& slot) { return slot.name == name; });
}

// Another length of any axis contradicts another argument or the axis's own limits.
TEST_P(EveryOperation, Shape) {
  const size_t count = make_call(GetParam())->tensors.size();
  for (size_t n = 0; n < count; ++n) {
    for (int32_t axis = 0; axis < OPENMSA_MAX_RANK; ++axis) {
      const auto call = make_call(GetParam());
      TensorSlot& slot = call->tensors[n];
      if (axis >= slot.view.rank || slot.name == "workspace") continue;
      if (slot.name == "block_table" && axis == 1) continue;                            // max_pages is free
      if (slot.name == "indices" && axis == 2 && !has_number(*call, "topk")) continue;  // any number of entries
      // The pool's size is free where one cache alone has it.
      if (std::string(GetParam()) == "paged_select_blocks" && slot.name == "index_k_cache" && axis == 0) continue;
      SCOPED_TRACE(slot.name + " axis " + std::to_string(axis));
      slot.view.shape[axis] += 1;
      const auto before = memory_of(*call);
      try {
        call->run();
        ADD_FAILURE() << "accepted";
      } catch (const Error& error) {
        const std::string message = error.what();
        EXPECT_EQ(error.status(), OPENMSA_INVALID_ARGUMENT);
        EXPECT_TRUE(message.find(argument_of(slot)) != std::string::npos || message.find("Tk") != std::string::npos)
            << message;
        EXPECT_NE(message.find("expected"), std::string::npos) << message;
      }
      EXPECT_EQ(memory_of(*call), before);
    }
  }
}

TEST_P(EveryOperation, ScalesAreFiniteAndPositive) {
  const size_t count = make_call(GetParam())->factors.size();
  for (size_t n = 0; n < count; ++n) {
    for (double value : {0.0, -0.0, -1.0, static_cast<double>(INFINITY), static_cast<double>(NAN), 1e300, 1e-300}) {
      ProblemSize size;
      size.cache_type = OPENMSA_FLOAT8_E4M3;
      const auto call = make_call(GetParam(), size);
      FactorSlot& slot = call->factors[n];
      slot.present = true;
      slot.value = value;
      expect_refused(*call, slot.name, {"finite"});
    }
  }
}

TEST_P(EveryOperation, ScaleTensorsAreFiniteAndPositive) {
  for (float value : {0.0f, -1.0f, INFINITY, NAN}) {
    for (const char* name : {"k_scale tensor", "v_scale tensor"}) {
      ProblemSize size;
      size.cache_type = OPENMSA_FLOAT8_E4M3;
      const auto call = make_call(GetParam(), size);
      for (TensorSlot& slot : call->tensors) {
        if (slot.name != name) continue;
        slot.present = true;
        *static_cast<float*>(slot.view.data) = value;
        expect_refused(*call, argument_of(slot), {"finite"});
      }
    }
  }
}

TEST_P(EveryOperation, ScalesOnlyForFloat8Caches) {
  const auto call = make_call(GetParam());
  for (FactorSlot& slot : call->factors) {
    if (slot.name != "k_scale" && slot.name != "v_scale") continue;
    slot.present = true;
    expect_refused(*call, slot.name, {"float32", "float8_e4m3"});
    slot.present = false;
  }
}

TEST_P(EveryOperation, Numbers) {
  const struct {
    const char* name;
    std::vector<int64_t> wrong;
  } kTable[] = {{"topk", {0, -1, std::numeric_limits<int64_t>::min(), kHuge}},
                {"init_blocks", {-1, std::numeric_limits<int64_t>::min()}},
                {"local_blocks", {-1, std::numeric_limits<int64_t>::min()}},
                {"block_size", {0, -128, 1, 31, 33, 96, 127, 256, kHuge, std::numeric_limits<int64_t>::min()}}};
  for (const auto& [name, wrong] : kTable) {
    for (int64_t value : wrong) {
      const auto call = make_call(GetParam());
      for (NumberSlot& slot : call->numbers) {
        if (slot.name != name) continue;
        slot.value = value;
        expect_refused(*call, name, {std::to_string(value), "expected"});
      }
    }
  }
}

TEST_P(EveryOperation, MoreForcedBlocksThanThereAre) {
  const auto call = make_call(GetParam());
  for (NumberSlot& slot : call->numbers) {
    if (slot.name == "init_blocks" || slot.name == "local_blocks") slot.value = kHuge;
  }
  EXPECT_NO_THROW(call->run());
}

#ifndef OPENMSA_WITH_SM90
TEST_P(EveryOperation, GpuTensorsWithoutAGpuBackend) {
  ProblemSize size;
  size.block = 64;
  const auto call = make_call(GetParam(), size);
  for (TensorSlot& slot : call->tensors) slot.view.device_type = OPENMSA_GPU;
  expect_refused(*call, "no backend of this build takes gpu tensors; it has", {"reference"}, OPENMSA_UNSUPPORTED);
}
#endif

TEST_P(EveryOperation, Block32OnAGpu) {
  const auto call = make_call(GetParam());
  if (std::string(GetParam()) == "combine") return;
  for (TensorSlot& slot : call->tensors) slot.view.device_type = OPENMSA_GPU;
  const bool paged = std::string(GetParam()).rfind("paged", 0) == 0;
  try {
    call->run();
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), OPENMSA_UNSUPPORTED);
    EXPECT_NE(std::string(error.what()).find("32 is supported on the cpu only"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(paged ? "_cache" : "block_size"), std::string::npos) << error.what();
  }
}

TEST_P(EveryOperation, EmptyBatchesAndTensors) {
  for (const auto& [queries, keys] :
       {std::pair<std::vector<int32_t>, std::vector<int32_t>>{{}, {}}, {{0}, {0}}, {{0, 3}, {33, 0}}, {{5}, {2}}}) {
    ProblemSize size;
    size.queries = queries;
    size.keys = keys;
    size.padded_queries = 0;
    const auto call = make_call(GetParam(), size);
    EXPECT_NO_THROW(call->run());
    for (TensorSlot& slot : call->tensors) {  // memory is not needed without elements
      if (slot.memory.fetch().elements() == 0) slot.view.data = nullptr;
    }
    EXPECT_NO_THROW(call->run());
    memory_of(*call);  // throws when anything else was written
  }
}

// Offsets of contiguous operations.
class Sequences : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Api, Sequences,
                         testing::Values("select_blocks", "sparse_attention", "sparse_attention_backward",
                                         "msa_attention", "msa_attention_backward", "captured_mass"),
                         operation_of);

TEST_P(Sequences, OffsetValues) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max(), kLeast = std::numeric_limits<int32_t>::min();
  const struct {
    const char* name;
    int index;
    int32_t value;
    const char* part;
  } kTable[] = {{"cu_seqlens_q", 0, 1, "at [0], expected 0"},     {"cu_seqlens_q", 0, -1, "at [0], expected 0"},
                {"cu_seqlens_q", 1, 8, "at most Tq = 7"},         {"cu_seqlens_q", 1, -1, "do not fall"},
                {"cu_seqlens_q", 1, kLeast, "do not fall"},       {"cu_seqlens_q", 2, 2, "do not fall"},
                {"cu_seqlens_q", 2, 6, "at its end [2]"},         {"cu_seqlens_q", 2, kMost, "at most Tq = 7"},
                {"cu_seqlens_k", 0, 3, "at [0], expected 0"},     {"cu_seqlens_k", 1, 111, "at most Tk = 110"},
                {"cu_seqlens_k", 2, 39, "do not fall"},           {"cu_seqlens_k", 2, 109, "at its end [2]"},
                {"k_starts", 0, -1, "0 to cu_seqlens_k[1] = 40"}, {"k_starts", 0, 41, "0 to cu_seqlens_k[1] = 40"},
                {"k_starts", 1, kMost, "cu_seqlens_k[2] = 110"},  {"k_starts", 1, kLeast, "cu_seqlens_k[2] = 110"}};
  for (const auto& row : kTable) {
    const auto call = make_call(GetParam());
    call->values<int32_t>(row.name)[row.index] = row.value;
    expect_refused(*call, row.name, {row.part, std::to_string(row.value)});
  }
}

TEST_P(Sequences, SharedKeysAndEmptySequences) {
  const auto call = make_call(GetParam());
  call->values<int32_t>("k_starts")[1] = 0;  // before its own offset: keys shared with sequence 0
  EXPECT_NO_THROW(call->run());
  call->values<int32_t>("k_starts")[0] = 40;  // no keys
  EXPECT_NO_THROW(call->run());
}

TEST_P(Sequences, TogetherOrNotAtAll) {
  for (const char* missing : {"cu_seqlens_q", "cu_seqlens_k"}) {
    const auto call = make_call(GetParam());
    call->tensor(missing).present = false;
    expect_refused(*call, missing, {"both or neither"});
  }
  const auto call = make_call(GetParam());
  call->tensor("cu_seqlens_q").present = call->tensor("cu_seqlens_k").present = false;
  expect_refused(*call, "k_starts", {"cu_seqlens_q", "cu_seqlens_k"});
  call->tensor("k_starts").present = false;
  EXPECT_NO_THROW(call->run());
}

class Requests : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Api, Requests,
                         testing::Values("paged_select_blocks", "paged_sparse_attention", "paged_msa_attention",
                                         "paged_append"),
                         operation_of);

TEST_P(Requests, Values) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max(), kLeast = std::numeric_limits<int32_t>::min();
  const struct {
    const char* name;
    int index;
    int32_t value;
    const char* part;
  } kTable[] = {{"cu_seqlens_q", 0, 1, "at [0], expected 0"},
                {"cu_seqlens_q", 1, 9, "at most Tq = 8"},
                {"cu_seqlens_q", 2, 2, "do not fall"},
                {"cu_seqlens_q", 2, kMost, "at most Tq = 8"},
                {"seq_lens", 0, -1, "0 to 96"},
                {"seq_lens", 1, 97, "0 to 96"},
                {"seq_lens", 0, kLeast, "0 to 96"},
                {"seq_lens", 1, kMost, "0 to 96"},
                {"block_table", 0, -1, "at [0, 0]"},
                {"block_table", 1, 6, "at [0, 1], expected 0 to 5"},
                {"block_table", 5, kMost, "at [1, 2]"},
                {"block_table", 3, kLeast, "at [1, 0]"}};
  for (const auto& row : kTable) {
    const auto call = make_call(GetParam());
    call->values<int32_t>(row.name)[row.index] = row.value;
    expect_refused(*call, row.name, {row.part, std::to_string(row.value)});
  }
}

TEST_P(Requests, EntriesPastARequestAreNotLookedAt) {
  const auto call = make_call(GetParam());
  call->values<int32_t>("block_table")[2] = -7;  // request 0 has 40 keys: two pages
  EXPECT_NO_THROW(call->run());
  call->values<int32_t>("seq_lens")[0] = 0;
  call->values<int32_t>("block_table")[0] = 1 << 30;
  EXPECT_NO_THROW(call->run());
}

// Its rows hold nothing, so no address may come from its stride.
TEST_P(Requests, TableWithoutPages) {
  ProblemSize size;
  size.keys = {0, 0};
  const auto call = make_call(GetParam(), size);
  Tensor& table = call->tensor("block_table").view;
  table = make_tensor(nullptr, OPENMSA_INT32, {2, 0});
  for (const int64_t stride : {int64_t{1} << 60, -(int64_t{1} << 60)}) {
    table.strides[0] = stride;
    EXPECT_NO_THROW(call->run());
  }
}

TEST(Heads, DivideEachOther) {
  ProblemSize size;
  size.heads_index = 4;  // of 6 query heads
  expect_refused(*make_call("sparse_attention", size), "indices", {"Hi = 4", "Hq = 6", "divisor", "(from q)"});
  expect_refused(*make_call("msa_attention", size), "index_q", {"Hi = 4", "Hq = 6"});
  size = {};
  size.heads_kv = 2;  // of 3 index heads
  expect_refused(*make_call("sparse_attention", size), "k", {"Hkv = 2", "Hi = 3"});
  expect_refused(*make_call("paged_msa_attention", size), "k_cache", {"Hkv = 2", "Hi = 3"});
  size = {};
  size.heads_index_k = 2;
  expect_refused(*make_call("select_blocks", size), "index_k", {"Hik = 2", "Hi = 3"});
  expect_refused(*make_call("paged_select_blocks", size), "index_k_cache", {"Hik = 2", "Hi = 3"});
}

TEST(Lengths, AreNamedWithTheirLimits) {
  ProblemSize size;
  size.dim = 257;
  expect_refused(*make_call("sparse_attention", size), "q", {"D = 257", "1 to 256"});
  size = {};
  size.dim_v = 0;
  expect_refused(*make_call("sparse_attention", size), "v", {"Dv = 0", "1 to 256"});
  size = {};
  size.dim_index = 300;
  expect_refused(*make_call("select_blocks", size), "index_q", {"Di = 300", "1 to 256"});
  size = {};
  size.heads_q = 0;
  expect_refused(*make_call("msa_attention", size), "q", {"Hq = 0"});
  size = {};
  size.block = 48;
  expect_refused(*make_call("paged_select_blocks", size), "index_k_cache", {"48", "128 or 64"});
  expect_refused(*make_call("paged_append", size), "k_cache", {"48", "128 or 64"});
}

TEST(Lengths, ShapesAreShownBesideTheNames) {
  const auto call = make_call("sparse_attention");
  call->tensor("k").view.shape[2] = 5;
  expect_refused(*call, "k", {"got shape [110, 1, 5], expected [Tk, Hkv, D] with D = 6 (from q)"});
}

TEST(Lengths, MakeTensorTakesAnyShape) {
  const auto call = make_call("sparse_attention");
  Tensor& k = call->tensor("k").view;
  k = make_tensor(k.data, OPENMSA_FLOAT32, {int64_t{1} << 40, int64_t{1} << 40, int64_t{1} << 40});
  expect_refused(*call, "k", {"expected a size in bytes that fits 64 bits"});
}

TEST(Types, QKVAreOfOneType) {
  for (const char* name : {"k", "v", "out"}) {
    const auto call = make_call("sparse_attention");
    call->tensor(name).view.dtype = OPENMSA_FLOAT16;
    expect_refused(*call, name, {"got float16, expected float32 as q"});
  }
  ProblemSize size;
  size.type = OPENMSA_FLOAT8_E4M3;
  expect_refused(*make_call("sparse_attention", size), "q", {"float8_e4m3", "float32, float16 or bfloat16"});
  expect_refused(*make_call("msa_attention_backward", size), "q", {"float8_e4m3"});
}

TEST(Types, IndexTensorsAreOfOneType) {
  for (const char* name : {"index_q", "index_k"}) {
    const auto call = make_call("select_blocks");
    call->tensor(name).view.dtype = OPENMSA_FLOAT8_E4M3;
    expect_refused(*call, "index_k", {"float8_e4m3", "float32"});
  }
  ProblemSize size;
  size.index_type = OPENMSA_FLOAT8_E4M3;
  EXPECT_NO_THROW(make_call("select_blocks", size)->run());
  EXPECT_NO_THROW(make_call("msa_attention", size)->run());
  EXPECT_NO_THROW(make_call("paged_msa_attention", size)->run());
}

TEST(Types, Float8HasNoGradient) {
  ProblemSize size;
  size.index_type = OPENMSA_FLOAT8_E4M3;
  const auto call = make_call("msa_attention_backward", size);
  expect_refused(*call, "index_q", {"float8_e4m3", "gradient"}, OPENMSA_UNSUPPORTED);
  for (const char* name : {"d_kl", "d_index_q", "d_index_k"}) call->tensor(name).present = false;
  EXPECT_NO_THROW(call->run());
}

TEST(Types, Caches) {
  ProblemSize size;
  size.cache_type = OPENMSA_BFLOAT16;  // q is float32
  expect_refused(*make_call("paged_sparse_attention", size), "k_cache", {"bfloat16", "float32 as q", "float8_e4m3"});
  const auto call = make_call("paged_sparse_attention");
  call->tensor("v_cache").view.dtype = OPENMSA_FLOAT8_E4M3;
  expect_refused(*call, "v_cache", {"float8_e4m3", "as k_cache"});
  size.cache_type = OPENMSA_FLOAT8_E4M3;
  for (const char* operation : {"paged_sparse_attention", "paged_msa_attention", "paged_append"}) {
    const auto float8 = make_call(operation, size);
    EXPECT_NO_THROW(float8->run());
    float8->tensor("k_scale tensor").present = true;  // goes before the number
    float8->factor("k_scale").value = NAN;
    EXPECT_NO_THROW(float8->run());
  }
}

TEST(Types, IndicesMayBeInt64) {
  const auto call = make_call("select_blocks");
  TensorSlot& indices = call->tensor("indices");
  place(indices, OPENMSA_INT64, {3, 7, 2}, {}, kPoison);
  EXPECT_NO_THROW(call->run());
  EXPECT_EQ(static_cast<int64_t*>(indices.view.data)[0], 0);
}

TEST(MsaAttention, WarmupHasNoIndices) {
  for (const char* operation : {"msa_attention", "msa_attention_backward"}) {
    const auto call = make_call(operation);
    call->number("warmup").value = 1;
    expect_refused(*call, "indices", {"warmup"});
    call->tensor("indices").present = false;
    for (NumberSlot& slot : call->numbers) {
      if (slot.name == "topk") slot.value = -3;  // ignored
    }
    EXPECT_NO_THROW(call->run());
  }
}

TEST(MsaAttention, KlNeedsIndexLse) {
  const auto call = make_call("msa_attention");
  call->tensor("index_lse").present = false;
  expect_refused(*call, "index_lse", {"kl"});
  call->tensor("kl").present = false;
  EXPECT_NO_THROW(call->run());
}

TEST(MsaAttentionBackward, GradientsComeWithTheirUpstream) {
  const auto call = make_call("msa_attention_backward");
  call->tensor("d_out").present = false;
  expect_refused(*call, "d_q", {"d_out", "both or neither"});
  call->tensor("d_q").present = false;
  expect_refused(*call, "d_k", {"d_out"});
  call->tensor("d_k").present = false;
  expect_refused(*call, "d_v", {"d_out"});
  call->tensor("d_v").present = false;
  EXPECT_NO_THROW(call->run());
  call->tensor("d_kl").present = false;
  expect_refused(*call, "d_index_q", {"d_kl"});
  call->tensor("d_index_q").present = false;
  expect_refused(*call, "d_index_k", {"d_kl"});
  call->tensor("d_index_k").present = false;
  EXPECT_NO_THROW(call->run());  // kl alone
  call->tensor("kl").present = false;
  call->tensor("index_lse").present = false;
  EXPECT_NO_THROW(call->run());
}

TEST(Messages, NumbersAreTheSameInEveryLocale) {
  struct Grouping : std::numpunct<char> {
    char do_thousands_sep() const override { return '.'; }
    char do_decimal_point() const override { return ','; }
    std::string do_grouping() const override { return "\3"; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale(), new Grouping));
  const auto call = make_call("select_blocks");
  call->number("block_size").value = 1234567;
  EXPECT_EQ(call->run_c(), OPENMSA_INVALID_ARGUMENT);
  EXPECT_STREQ(openmsa_last_error(), "block_size: got 1234567, expected 128 or 64 (or 32, on the cpu only)");
  call->number("block_size").value = 32;
  call->factor("scale").present = true;
  call->factor("scale").value = -1234.5;
  EXPECT_EQ(call->run_c(), OPENMSA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(openmsa_last_error()).find("scale: got -1234.5, "), 0U) << openmsa_last_error();
  std::locale::global(before);
}

// Views of stride 0 ask for more than any memory holds: 65536 heads of 2^30 blocks.
TEST(HostMemory, RunningOutIsAnErrorByName) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers end the process when memory runs out";
#endif
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
  GTEST_SKIP() << "sanitizers end the process when memory runs out";
#endif
#endif
  // The reference marks every visible block; other backends need no such memory.
  setenv("OPENMSA_BACKEND", "reference", 1);
  constexpr int64_t kHeads = 65536;
  const float value = 1;
  std::vector<int32_t> chosen(kHeads, 7);
  Tensor index_q = make_tensor(&value, OPENMSA_FLOAT32, {1, kHeads, 1});
  index_q.strides[1] = 0;
  Tensor index_k = make_tensor(&value, OPENMSA_FLOAT32, {int64_t{1} << 36, 1, 1});
  index_k.strides[0] = 0;
  const Tensor indices = make_tensor(chosen.data(), OPENMSA_INT32, {kHeads, 1, 1});
  SelectBlocksArgs args;
  args.index_q = &index_q;
  args.index_k = &index_k;
  args.indices = &indices;
  args.selection.topk = 1;
  args.block_size = 64;
  try {
    select_blocks(args);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), OPENMSA_OUT_OF_MEMORY);
    EXPECT_STREQ(error.what(), "select_blocks: host memory ran out");
  }
  unsetenv("OPENMSA_BACKEND");
  EXPECT_EQ(chosen, std::vector<int32_t>(kHeads, 7));
}

TEST(Outputs, MayBeStridedViews) {
  const auto call = make_call("sparse_attention");
  place(call->tensor("out"), OPENMSA_FLOAT32, {7, 6, 5}, {-11, 77, 1}, kPoison);  // head-major, tokens backwards
  place(call->tensor("lse"), OPENMSA_FLOAT32, {6, 7}, {9, 1}, kPoison);
  EXPECT_NO_THROW(call->run());
  memory_of(*call);  // throws when a gap was written
}

TEST(Workspace, TooSmallOrOfAnotherKind) {
  const auto needs = [](int64_t bytes) { return [bytes] { return bytes; }; };
  std::vector<unsigned char> memory(64);
  Tensor workspace = make_tensor(memory.data(), OPENMSA_UINT8, {64});
  openmsa_execution execution{nullptr, &workspace};
  const auto place_workspace = [&](int64_t bytes) {
    float value = 0;
    const Tensor scalar = make_tensor(&value, OPENMSA_FLOAT32, {});
    Arguments arguments(Purpose::run);
    arguments.input("q", &scalar, {}, kFloat32Type);
    return arguments.execution(execution, needs(bytes));
  };
  EXPECT_EQ(place_workspace(64).workspace, memory.data());
  EXPECT_EQ(place_workspace(64).workspace_bytes, 64);
  try {
    place_workspace(65);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "workspace: got 64 bytes, expected at least 65");
  }
  workspace.shape[0] = 0;
  workspace.data = nullptr;
  EXPECT_EQ(place_workspace(0).workspace, nullptr);
  execution.workspace = nullptr;  // the backend allocates
  EXPECT_EQ(place_workspace(1000).workspace_bytes, 0);
}

}  // namespace
}  // namespace openmsa::tests
