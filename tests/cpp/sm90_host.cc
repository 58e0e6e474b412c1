// The sm90 backend before any launch; its refusals need no GPU, and each names its argument.
#include <gtest/gtest.h>

#include <functional>

#include "cpp/sm90_problem.h"
#include "cuda/common/device.h"
#include "cuda/common/error.h"
#include "cuda/common/launch.h"

namespace openmsa::testing {
namespace {

// Parameters over an address that is never read.
struct Fake {
  explicit Fake(bool paged = false) {
    params.layout.tokens_q = 10;
    params.layout.tokens_k = paged ? 5 * 128 : 20;
    params.layout.paged = paged;
    params.index_q = view(OPENMSA_BFLOAT16, {10, 4, 128});
    params.index_k = paged ? view(OPENMSA_BFLOAT16, {5, 128, 1, 128}) : view(OPENMSA_BFLOAT16, {20, 1, 128});
    params.indices = view(OPENMSA_INT32, {4, 10, 16});
    lse = view(OPENMSA_FLOAT32, {4, 10});
    params.index_lse = &lse;
  }

  static Tensor view(DataType dtype, std::initializer_list<int64_t> shape) {
    Tensor tensor = make_tensor(reinterpret_cast<const void*>(uintptr_t{1} << 20), dtype, shape);
    tensor.device_type = OPENMSA_GPU;
    return tensor;
  }

  SelectParams params;
  Tensor lse{};
};

void expect_refused(const SelectParams& params, const std::string& name, const std::string& reason) {
  try {
    sm90_backend().check(params);
    ADD_FAILURE() << name << ": not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), OPENMSA_UNSUPPORTED);
    const std::string message = error.what();
    EXPECT_EQ(message.rfind(name + ":", 0), 0U) << message;
    EXPECT_NE(message.find(reason), std::string::npos) << message;
    EXPECT_NE(message.find("sm90"), std::string::npos) << message;
  }
}

Tensor* moved(Tensor& tensor, int64_t bytes) {
  tensor.data = static_cast<char*>(tensor.data) + bytes;
  return &tensor;
}

TEST(Sm90Host, NamesWhatItIs) {
  const Backend& backend = sm90_backend();
  EXPECT_STREQ(backend.name(), "sm90");
  EXPECT_EQ(backend.device(), OPENMSA_GPU);
  EXPECT_STREQ(backend.operations(),
               "select_blocks, paged_select_blocks, sparse_attention, paged_sparse_attention, msa_attention, "
               "paged_msa_attention, combine, captured_mass, paged_append");
  EXPECT_EQ(backend.device_names().size(), static_cast<size_t>(cuda::device_count()));
}

TEST(Sm90Host, AttentionsWorkspaceStaysBelowTheLimit) {
  SKIP_WITHOUT_GPU();  // The sort's scratch depends on the device.
  for (const int64_t group : {1, 4, 16}) {
    for (const int64_t index_heads : {1, 4, 16}) {
      for (const int64_t topk : {1, 16, 64}) {
        for (const int64_t tokens : {int64_t{0}, int64_t{1}, int64_t{8192}, int64_t{1} << 20, int64_t{1} << 27}) {
          AttendParams params;
          params.layout.tokens_q = params.layout.tokens_k = tokens;
          params.q = params.out = Fake::view(OPENMSA_BFLOAT16, {tokens, index_heads * group, 128});
          params.k = params.v = Fake::view(OPENMSA_BFLOAT16, {tokens, 1, 128});
          const Tensor indices = Fake::view(OPENMSA_INT32, {index_heads, tokens, topk});
          params.indices = &indices;
          params.index_heads = index_heads;
          EXPECT_LE(sm90_backend().workspace(params), workspace_limit() + (4 * index_heads * topk + 44) * tokens)
              << group << " query heads, " << index_heads << " index heads, topk " << topk << ", " << tokens
              << " tokens";
        }
      }
    }
  }
}

TEST(Sm90Host, SelectsWorkspaceStaysBelowTheLimit) {
  SKIP_WITHOUT_GPU();  // The size depends on the device's number of processors.
  for (const int64_t heads : {1, 4, 16}) {
    for (const int64_t topk : {1, 16, 64}) {
      for (const int64_t tokens : {int64_t{0}, int64_t{1}, int64_t{8192}, int64_t{1} << 20, int64_t{1} << 27}) {
        Fake fake;
        fake.params.layout.tokens_q = fake.params.layout.tokens_k = tokens;
        fake.params.index_q = Fake::view(OPENMSA_BFLOAT16, {tokens, heads, 128});
        fake.params.index_k = Fake::view(OPENMSA_BFLOAT16, {tokens, 1, 128});
        fake.params.indices = Fake::view(OPENMSA_INT32, {heads, tokens, topk});
        fake.lse = Fake::view(OPENMSA_FLOAT32, {heads, tokens});
        fake.params.topk = topk;
        const int64_t bytes = sm90_backend().workspace(fake.params);
        EXPECT_GE(bytes, 0);
        EXPECT_LE(bytes, (int64_t{1} << 30) + (4 * heads * topk + 44) * tokens)
            << heads << " " << topk << " " << tokens;
      }
    }
  }
}

TEST(Sm90Host, WithoutGpuIsNotAvailable) {
  if (gpu_present()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_FALSE(sm90_backend().available());
  // A valid call is refused for its device.
  try {
    sm90_backend().check(Fake().params);
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), OPENMSA_UNSUPPORTED);
    EXPECT_NE(std::string(error.what()).find("index_q: device gpu:0"), std::string::npos) << error.what();
  }
  EXPECT_THROW(cases::gpu_memory(), std::runtime_error);
}

TEST(Sm90Host, RefusesADeviceThatIsNotThere) {
  Fake fake;
  for (const int32_t index : {-1, cuda::device_count(), 1 << 30}) {
    fake.params.index_q.device_index = index;
    try {
      sm90_backend().check(fake.params);
      ADD_FAILURE() << "device " << index << " not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), OPENMSA_UNSUPPORTED);
    }
  }
}

TEST(Sm90Host, RefusesTypesByName) {
  Fake fake;
  fake.params.index_q.dtype = OPENMSA_FLOAT32;
  expect_refused(fake.params, "index_q", "float32");
  Fake other;
  other.params.index_k.dtype = OPENMSA_FLOAT32;
  expect_refused(other.params, "index_k", "float16, bfloat16 or float8_e4m3");
  Fake paged(true);
  paged.params.index_k.dtype = OPENMSA_FLOAT32;
  expect_refused(paged.params, "index_k_cache", "float32");
}

TEST(Sm90Host, RefusesShapesByName) {
  for (const int64_t dim : {1, 32, 96, 192, 256}) {
    Fake fake;
    fake.params.index_q = Fake::view(OPENMSA_BFLOAT16, {10, 4, dim});
    fake.params.index_k = Fake::view(OPENMSA_BFLOAT16, {20, 1, dim});
    expect_refused(fake.params, "index_q", std::to_string(dim));
  }
  Fake block;
  block.params.block_size = 32;
  expect_refused(block.params, "block_size", "32");
  Fake topk;
  topk.params.topk = 65;
  expect_refused(topk.params, "topk", "65");
  Fake heads;
  heads.params.index_q = Fake::view(OPENMSA_BFLOAT16, {10, 17, 128});
  expect_refused(heads.params, "index_q", "17 index heads");
  Fake keys;
  keys.params.layout.tokens_k = int64_t{1} << 40;
  expect_refused(keys.params, "index_k", "keys");
}

TEST(Sm90Host, RefusesStridesThatBulkCopiesCannotExpress) {
  for (const int64_t stride : {int64_t{1} << 39, -(int64_t{1} << 39)}) {  // elements of two bytes
    Fake q, k, paged(true);
    q.params.index_q.strides[0] = stride;
    expect_refused(q.params, "index_q", "2^40 bytes");
    k.params.index_k.strides[0] = stride;
    expect_refused(k.params, "index_k", "2^40 bytes");
    paged.params.index_k.strides[0] = stride;
    expect_refused(paged.params, "index_k_cache", "2^40 bytes");
  }
}

TEST(Sm90Host, RefusesMisalignedTensorsByName) {
  for (const int64_t bytes : {2, 8, 14}) {
    Fake q, k, paged(true);
    moved(q.params.index_q, bytes);
    expect_refused(q.params, "index_q", "16 bytes");
    moved(k.params.index_k, bytes);
    expect_refused(k.params, "index_k", "16 bytes");
    moved(paged.params.index_k, bytes);
    expect_refused(paged.params, "index_k_cache", "16 bytes");
  }
  // Every stride of an axis longer than 1; the axis is named.
  for (int axis = 0; axis < 2; ++axis) {
    Fake fake;
    fake.params.index_q.strides[axis] += 4;
    expect_refused(fake.params, "index_q", "stride of axis " + std::to_string(axis));
  }
  for (const int axis : {0, 1}) {
    Fake fake(true);
    fake.params.index_k.strides[axis] = -fake.params.index_k.strides[axis] - 1;
    expect_refused(fake.params, "index_k_cache", "stride of axis " + std::to_string(axis));
  }
  Fake fp8;
  fp8.params.index_q.dtype = fp8.params.index_k.dtype = OPENMSA_FLOAT8_E4M3;
  fp8.params.index_k.strides[0] = 128 + 8;
  expect_refused(fp8.params, "index_k", "16 bytes");
}

TEST(Sm90Host, OutputsAndOffsetsNeedTheirTypesAlignmentOnly) {
  Fake fake;
  moved(fake.params.indices, 2);
  expect_refused(fake.params, "indices", "4 bytes");
  Fake wide;
  wide.params.indices.dtype = OPENMSA_INT64;
  moved(wide.params.indices, 4);
  expect_refused(wide.params, "indices", "8 bytes");
  Fake lse;
  moved(lse.lse, 1);
  expect_refused(lse.params, "index_lse", "4 bytes");
  Fake offsets;
  offsets.params.layout.cu_seqlens_q = reinterpret_cast<const int32_t*>(uintptr_t{4097});
  expect_refused(offsets.params, "cu_seqlens_q", "4 bytes");
  Fake table(true);
  table.params.layout.block_table = reinterpret_cast<const int32_t*>(uintptr_t{4098});
  expect_refused(table.params, "block_table", "4 bytes");
}

// What is accepted is refused for its device alone, or not at all.
void expect_accepted(const SelectParams& params) {
  try {
    sm90_backend().check(params);
  } catch (const Error& error) {
    EXPECT_FALSE(gpu_present()) << error.what();
    EXPECT_NE(std::string(error.what()).find("device gpu:0 does not exist"), std::string::npos) << error.what();
  }
}

TEST(Sm90Host, AcceptsWhatTheContractPromises) {
  Fake fake;
  expect_accepted(fake.params);
  moved(fake.params.indices, 4);
  moved(fake.lse, 4);
  fake.params.indices.strides[0] = -7;
  fake.params.index_k.strides[1] = 3;  // an axis of length 1
  fake.params.index_q.strides[0] = -8;
  expect_accepted(fake.params);
  Fake empty;
  empty.params.index_k = Fake::view(OPENMSA_BFLOAT16, {0, 1, 128});
  empty.params.index_k.data = nullptr;
  empty.params.layout.tokens_k = 0;
  expect_accepted(empty.params);
  Fake paged(true);
  paged.params.topk = 64;
  expect_accepted(paged.params);
}

TEST(Sm90Host, OtherStagesAreUnsupportedByName) {
  try {
    sm90_backend().backward(BackwardParams{});
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), OPENMSA_UNSUPPORTED);
    EXPECT_NE(std::string(error.what()).find("sm90"), std::string::npos) << error.what();
  }
}

TEST(Sm90Host, FailuresOfTheRuntimeBecomeErrors) {
  EXPECT_NO_THROW(cuda::check_cuda(cudaSuccess, "cudaFree"));
  const auto status_of = [](cudaError_t code, const char* part) {
    try {
      cuda::check_cuda(code, "cudaCall");
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).rfind("cudaCall: ", 0), 0U) << error.what();
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      return error.status();
    }
    return OPENMSA_OK;
  };
  EXPECT_EQ(status_of(cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation"), OPENMSA_OUT_OF_MEMORY);
  EXPECT_EQ(status_of(cudaErrorInvalidValue, "cudaErrorInvalidValue"), OPENMSA_DEVICE_ERROR);
  EXPECT_EQ(status_of(cudaErrorIllegalAddress, "context is lost"), OPENMSA_DEVICE_ERROR);
}

}  // namespace
}  // namespace openmsa::testing
