#!/bin/sh
# Usage: run.sh BUILD_DIR. Installs the build into a fresh prefix, then configures, builds and runs a user's project there.
set -eu
build=$1
source=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/prefix" > "$work/install.log" || { cat "$work/install.log"; exit 1; }
# The command, where the build has it, from where it was installed.
if [ -x "$work/prefix/bin/openmsa" ]; then
  "$work/prefix/bin/openmsa" info --json > "$work/info.json"
  grep -q '"backends"' "$work/info.json"
fi
cmake -G Ninja -S "$source" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_BUILD_TYPE=Release \
      -DCMAKE_C_FLAGS="${OPENMSA_PACKAGE_FLAGS:-}" -DCMAKE_CXX_FLAGS="${OPENMSA_PACKAGE_FLAGS:-}" \
      -DCMAKE_C_COMPILER="${CC:-cc}" -DCMAKE_CXX_COMPILER="${CXX:-c++}"
cmake --build "$work/build"
ctest --test-dir "$work/build" --output-on-failure
