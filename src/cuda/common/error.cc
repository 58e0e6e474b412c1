#include "cuda/common/error.h"

#include "api/error.h"

namespace openmsa::cuda {
namespace {

// Failures of earlier work that leave the process's context unusable: every later call returns the same code.
bool is_sticky(cudaError_t code) {
  switch (code) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

}  // namespace

void check_cuda(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  // The runtime also remembers the code for the next cudaGetLastError; it is reported here, once.
  static_cast<void>(cudaGetLastError());
  const Status status = code == cudaErrorMemoryAllocation ? OPENMSA_OUT_OF_MEMORY : OPENMSA_DEVICE_ERROR;
  fail(status, call, ": ", cudaGetErrorString(code), " (", cudaGetErrorName(code), ")",
       is_sticky(code) ? "; an earlier kernel of this process failed, and its GPU context is lost" : "");
}

}  // namespace openmsa::cuda
