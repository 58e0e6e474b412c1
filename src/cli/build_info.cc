#include "cli/build_info.h"

#include "openmsa_commit.h"  // made by cmake/OpenmsaCommit.cmake at every build

namespace openmsa::cli {

BuildInfo build_info() {
  return {OPENMSA_COMMIT, OPENMSA_COMMIT_MODIFIED != 0, OPENMSA_BUILD_TYPE, OPENMSA_COMPILER, OPENMSA_CUDA_VERSION};
}

}  // namespace openmsa::cli
