// What this binary was built from and with.
#pragma once

namespace openmsa::cli {

struct BuildInfo {
  const char* commit;  // "" where the sources came without their history
  bool modified;       // sources differed from that commit
  const char* type;    // of CMake: "Release"
  const char* compiler;
  const char* cuda;  // the toolkit's version, "" for a build without
};

BuildInfo build_info();

}  // namespace openmsa::cli
