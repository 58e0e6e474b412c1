// Emulates src/cuda/common/instructions/fence_proxy.cuh: the emulation has one proxy.
#pragma once

namespace openmsa::cuda {

inline void fence_proxy_async() {}

}  // namespace openmsa::cuda
