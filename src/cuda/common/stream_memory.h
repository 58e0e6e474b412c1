// Device memory for one call, ordered by its stream.
#pragma once

#include <cstdint>

namespace openmsa::cuda {

inline constexpr int64_t kWorkspaceAlignment = 256;

// What a caller has to bring for `bytes` aligned bytes: a workspace may start anywhere.
inline int64_t workspace_with_alignment(int64_t bytes) { return bytes == 0 ? 0 : bytes + kWorkspaceAlignment - 1; }

// The caller's workspace where there is one, of workspace_with_alignment(bytes), else memory of the current device's
// pool that goes back when the work queued before the destructor is done. Both may be captured into a graph.
class StreamMemory {
 public:
  StreamMemory(void* workspace, int64_t bytes, void* stream);
  ~StreamMemory();
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;

  // Aligned to kWorkspaceAlignment.
  void* data() const;

 private:
  void* data_;
  void* stream_;
  bool owned_ = false;
};

}  // namespace openmsa::cuda
