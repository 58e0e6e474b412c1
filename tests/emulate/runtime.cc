// The CUDA runtime's API, on the host: one device, whose kernels run thread block after thread block.
//
// OPENMSA_EMULATE_SEED      0 (default): threads in order, copies late. Else a random schedule, the same for the same
// seed OPENMSA_EMULATE_THREADS   thread blocks at a time, one on each operating system thread (default 1)
// OPENMSA_EMULATE_PROCESSORS  multiprocessors that the device says it has (default 4)
#include <cuda.h>
#include <cuda_runtime.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulate/block.h"

struct EmulatedGraph {
  std::vector<std::function<cudaError_t()>> work;
};

struct EmulatedStream {
  EmulatedGraph* captured = nullptr;
};

namespace {

using openmsa::emulate::Block;
using openmsa::emulate::Launch;

constexpr std::size_t kMostArgumentBytes = 4096;
constexpr std::size_t kAllocationAlignment = 256;

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 10) : otherwise;
}

// The process's one device.
struct Device {
  std::mutex mutex;
  std::map<uintptr_t, std::size_t> allocations;  // end by start
  std::unordered_map<const void*, int> shared_limits;
  std::string failure;
  cudaError_t last = cudaSuccess;
  std::atomic<uint64_t> launches = 0;
};

Device& device() {
  static Device instance;
  return instance;
}

cudaError_t report(cudaError_t code) {
  if (code != cudaSuccess) device().last = code;
  return code;
}

// How much there is to read at `argument`, a variable of a launching function: up to the end of this thread's stack.
std::size_t readable(const void* argument) {
  static thread_local const uintptr_t end = [] {
    pthread_attr_t attributes;
    void* start = nullptr;
    std::size_t bytes = 0;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &start, &bytes);
    pthread_attr_destroy(&attributes);
    return reinterpret_cast<uintptr_t>(start) + bytes;
  }();
  return std::min<std::size_t>(kMostArgumentBytes, (end - reinterpret_cast<uintptr_t>(argument)) / 8 * 8);
}

cudaError_t run_grid(const Launch& launch) {
  const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  std::vector<uint64_t> order;
  if (launch.seed != 0) {
    order.resize(blocks);
    for (uint64_t i = 0; i < blocks; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937_64(launch.seed));
  }
  std::atomic<uint64_t> next = 0;
  std::atomic<bool> failed = false;
  const auto work = [&] {
    for (uint64_t i = next++; i < blocks && !failed; i = next++) {
      const uint64_t number = order.empty() ? i : order[i];
      const dim3 index(static_cast<unsigned>(number % launch.grid.x),
                       static_cast<unsigned>(number / launch.grid.x % launch.grid.y),
                       static_cast<unsigned>(number / launch.grid.x / launch.grid.y));
      const std::string fault = Block::current().run(launch, index);
      if (fault.empty() || failed.exchange(true)) continue;
      const std::lock_guard lock(device().mutex);
      device().failure = fault;
      std::fprintf(stderr, "emulation: %s\n", fault.c_str());
    }
  };
  const uint64_t threads = std::min(std::max<uint64_t>(setting("OPENMSA_EMULATE_THREADS", 1), 1), blocks);
  if (threads <= 1) {
    work();
  } else {
    std::vector<std::jthread> pool(threads);
    for (std::jthread& thread : pool) thread = std::jthread(work);
  }
  return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace

cudaError_t emulate_on_stream(cudaStream_t stream, std::function<cudaError_t()> work) {
  if (stream != nullptr && stream->captured != nullptr) {
    stream->captured->work.push_back(std::move(work));
    return cudaSuccess;
  }
  return report(work());
}

// ---- Errors, devices ------------------------------------------------------------------------------------------------

const char* cudaGetErrorName(cudaError_t code) {
  switch (code) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    default:
      return "an error of CUDA";
  }
}

const char* cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorLaunchFailure ? device().failure.c_str() : cudaGetErrorName(code);
}

cudaError_t cudaGetLastError() { return std::exchange(device().last, cudaSuccess); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* number) {
  *number = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int number) { return report(number == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int number) {
  if (number != 0) return report(cudaErrorInvalidDevice);
  *properties = {};
  std::strcpy(properties->name, "emulated Hopper");
  properties->totalGlobalMem = std::size_t{1} << 33;
  properties->major = 9;
  properties->multiProcessorCount = static_cast<int>(setting("OPENMSA_EMULATE_PROCESSORS", 4));
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int number) {
  if (number != 0) return report(cudaErrorInvalidDevice);
  *value = attribute == cudaDevAttrL2CacheSize ? 50 << 20 : static_cast<int>(openmsa::emulate::kMostSharedBytes);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

// ---- Memory ---------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  if (posix_memalign(pointer, kAllocationAlignment, std::max<std::size_t>(bytes, 1)) != 0) {
    return report(cudaErrorMemoryAllocation);
  }
  std::memset(*pointer, openmsa::emulate::kPoison, bytes);
  const std::lock_guard lock(device().mutex);
  device().allocations[reinterpret_cast<uintptr_t>(*pointer)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  {
    const std::lock_guard lock(device().mutex);
    if (device().allocations.erase(reinterpret_cast<uintptr_t>(pointer)) == 0) return report(cudaErrorInvalidValue);
  }
  std::free(pointer);
  return cudaSuccess;
}

// A graph's memory stays: its replays use it.
cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes, cudaStream_t /*stream*/) {
  return cudaMalloc(pointer, bytes);
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return stream != nullptr && stream->captured != nullptr ? cudaSuccess : cudaFree(pointer);
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind /*kind*/) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return emulate_on_stream(stream, [=] { return cudaMemcpy(to, from, bytes, kind); });
}
cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                         std::size_t height, cudaMemcpyKind /*kind*/) {
  for (std::size_t row = 0; row < height; ++row) {
    std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return emulate_on_stream(stream, [=] {
    std::memset(to, value, bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const std::lock_guard lock(device().mutex);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const auto after = device().allocations.upper_bound(address);
  const bool ours =
      after != device().allocations.begin() && address < std::prev(after)->first + std::prev(after)->second;
  *attributes = {ours ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered, 0};
  return cudaSuccess;
}

// ---- Streams, graphs ------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = new EmulatedStream;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return report(stream != nullptr && stream->captured != nullptr ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  stream->captured = new EmulatedGraph;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = std::exchange(stream->captured, nullptr);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* replay, cudaGraph_t graph, unsigned long long /*flags*/) {
  *replay = new EmulatedGraph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t replay, cudaStream_t /*stream*/) {
  for (const auto& work : replay->work) {
    if (const cudaError_t code = work(); code != cudaSuccess) return report(code);
  }
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t replay) {
  delete replay;
  return cudaSuccess;
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute /*attribute*/, int value) {
  if (value < 0 || value > openmsa::emulate::kMostSharedBytes) return report(cudaErrorInvalidValue);
  const std::lock_guard lock(device().mutex);
  device().shared_limits[kernel] = value;
  return cudaSuccess;
}

#if defined(__GNUC__)
__attribute__((no_sanitize_address))
#endif
cudaError_t
cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared_bytes,
                 cudaStream_t stream) {
  constexpr std::size_t kWithoutAsking = 48 * 1024;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > openmsa::emulate::kMostThreads || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
      grid.x > 0x7fffffffu || grid.y > 0xffff || grid.z > 0xffff) {
    return report(cudaErrorInvalidConfiguration);
  }
  {
    const std::lock_guard lock(device().mutex);
    const auto limit = device().shared_limits.find(kernel);
    const std::size_t most = limit == device().shared_limits.end() ? 0 : static_cast<std::size_t>(limit->second);
    if (shared_bytes > std::max(kWithoutAsking, most)) return report(cudaErrorInvalidValue);
  }
  std::vector<unsigned char> copy(kMostArgumentBytes + 128);
  unsigned char* const argument = copy.data();
  const auto* const from = static_cast<const unsigned char*>(arguments[0]);
  const std::size_t bytes = readable(from);
  for (std::size_t i = 0; i < bytes; ++i) argument[i] = from[i];
  return emulate_on_stream(stream, [=, copy = std::move(copy)] {
    Launch launch;
    launch.kernel = kernel;
    launch.argument = copy.data();
    launch.argument_bytes = kMostArgumentBytes;
    launch.grid = grid;
    launch.block = block;
    launch.shared_bytes = static_cast<int64_t>(shared_bytes);
    const uint64_t seed = setting("OPENMSA_EMULATE_SEED", 0);
    launch.seed = seed == 0 ? 0 : seed * 1000003 + ++device().launches;
    return run_grid(launch);
  });
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned /*version*/,
                                             unsigned long long /*flags*/, cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *entry = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
