# Sets up what the commands in scripts/ need. Sourced by them; needs nothing but bash and, where packages are missing,
# Debian's apt-get as root or with sudo. Everything here may run again at no cost.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"

export DEBIAN_FRONTEND=noninteractive
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1
# On a terminal pip shows its progress.
[ -t 1 ] || export PIP_QUIET=1
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
# Waiting threads sleep: spinning ones take the cores from the other processes of a step.
export OMP_WAIT_POLICY=passive

# Debian's own interpreter: python3-venv belongs to it, whatever else is first on PATH.
python="${PYTHON:-/usr/bin/python3}"
venv="$root/.venv"

# libcli11-dev, libfmt-dev and nlohmann-json3-dev are the command's.
build_packages=(
  g++ cmake ninja-build libhwy-dev libcli11-dev libfmt-dev nlohmann-json3-dev python3 python3-venv
)
# libomp-dev brings Archer; python3-dev is for the code that torch.compile generates.
test_packages=(
  git clang clang-format-14 clang-tidy-14 libclang-rt-14-dev libomp-dev libgtest-dev python3-dev
)

# Runs a command up to three times: mirrors fail now and then.
retry() {
  local attempt
  for attempt in 1 2; do
    "$@" && return
    echo "attempt $attempt of 3 failed: $*" >&2
    sleep $((attempt * 5))
  done
  "$@"
}

as_root() {
  if [ "$(id -u)" -eq 0 ]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo --preserve-env=DEBIAN_FRONTEND "$@"
  else
    echo "needs root or sudo: $*" >&2
    return 1
  fi
}

# install_packages NAME...: those of the Debian packages that are missing.
install_packages() {
  local missing=() name
  for name in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null)" = installed ] || missing+=("$name")
  done
  [ ${#missing[@]} -eq 0 ] && return
  if ! command -v apt-get >/dev/null; then
    echo "this system has no apt-get; install what Debian calls: ${missing[*]}" >&2
    return 1
  fi
  echo "installing ${missing[*]}"
  retry as_root apt-get update -qq
  retry as_root apt-get install -qq -y --no-install-recommends "${missing[@]}"
}

# install_requirements NAME...: requirements/NAME.txt into .venv, unless they are there as the files now ask.
install_requirements() {
  local files=() name stamp
  for name in "$@"; do files+=("requirements/$name.txt"); done
  stamp="$venv/openmsa-$(cat "${files[@]}" | sha256sum | cut -c 1-16)"
  [ -e "$stamp" ] && return
  [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
  echo "installing $* (PyTorch is a download of several GB)"
  retry "$venv/bin/pip" install "${files[@]/#/--requirement=}"
  touch "$stamp"
}

# The package of this checkout, built again when sources changed.
install_openmsa() {
  "$venv/bin/pip" install --no-build-isolation --no-deps --force-reinstall "$root"
}
