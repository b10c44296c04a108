# Functions of the scripts beside it. Sourced by sh, in the root of the repository. Nothing here acts when it is sourced.

VENV=.venv
VPY=$VENV/bin/python

say() { printf '%s\n' "deepc: $*" >&2; }

die() { # what is wrong, then the line to type
  printf '%s\n' "deepc: $1" >&2
  [ $# -lt 2 ] || printf '\n    %s\n\n' "$2" >&2
  exit 1
}

has() { command -v "$1" >/dev/null 2>&1; }

has_gpu() { # an NVIDIA GPU that this machine can use
  [ -e /dev/nvidia0 ] || { has nvidia-smi && nvidia-smi -L >/dev/null 2>&1; }
}

# --- Debian packages ---------------------------------------------------------------------------------------------------

sudo_apt() { # the line that a user without root would type
  if [ "$(id -u)" = 0 ]; then echo "apt-get update && apt-get install -y $*"; else echo "sudo apt-get update && sudo apt-get install -y $*"; fi
}

apt_install() { # packages...; quiet; false if they can't be had (no root, no apt, no network)
  [ "$(id -u)" = 0 ] && has apt-get || return 1
  say "installing $* (apt-get)"
  log=$(mktemp)
  if ! DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" >"$log" 2>&1 </dev/null; then
    apt-get update >"$log" 2>&1 </dev/null &&
      DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" >>"$log" 2>&1 </dev/null ||
      { tail -3 "$log" >&2; rm -f "$log"; return 1; }
  fi
  rm -f "$log"
}

need() { # command or test, what it is for, packages: installs or stops with the line to type
  eval "$1" >/dev/null 2>&1 && return
  # shellcheck disable=SC2086
  apt_install $3 && eval "$1" >/dev/null 2>&1 && return
  die "$2 is missing and could not be installed. Type" "$(sudo_apt "$3")"
}

# --- Python packages ---------------------------------------------------------------------------------------------------

PIP_ERROR="no pip"
has_pip() { "$VPY" -m pip --version >/dev/null 2>&1; }

pip_install() { # arguments of pip install; its output only if it fails
  has_pip || return 1
  # Python compiles what is imported, when it is; pip would compile 13,000 files, for half a minute of a processor.
  [ -n "${PYTHONDONTWRITEBYTECODE:-}" ] || set -- --no-compile "$@"
  log=$(mktemp)
  if "$VPY" -m pip install --disable-pip-version-check --retries 1 --timeout 30 "$@" >"$log" 2>&1 </dev/null; then
    rm -f "$log"
    return 0
  fi
  PIP_ERROR=$(grep -m1 -i error "$log" || tail -1 "$log")
  rm -f "$log"
  return 1
}

has_module() { # names...: all importable, without importing them
  "$VPY" -c 'import importlib.util, sys; sys.exit(any(importlib.util.find_spec(n) is None for n in sys.argv[1:]))' "$@" 2>/dev/null
}

torch_usable() { # interpreter: it has torch >= 2.10
  "$1" -c 'import sys, torch; sys.exit(tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 10))' >/dev/null 2>&1
}

# --- builds ------------------------------------------------------------------------------------------------------------

sources_hash() { # of everything that the package is built from, and the interpreter that it is for
  { find CMakeLists.txt pyproject.toml README.md ops zero comm offload shim python -type f ! -name '*.pyc' 2>/dev/null |
      LC_ALL=C sort | tr '\n' '\0' | xargs -0 sha256sum; "$VPY" -c 'import sys; print(sys.version, sys.executable)'; } | sha256sum | cut -c1-32
}

# For cmake's DEEPC_CUDA: what the user says, else OFF where there is no GPU: there nobody calls the kernels, and nvcc takes most of a build.
cuda_choice() {
  if [ -n "${DEEPC_CUDA:-}" ]; then echo "$DEEPC_CUDA"; elif has_gpu; then echo AUTO; else echo OFF; fi
}

kernels() { # DEEPC_NATIVE: what tells a build's instruction sets from those of another machine that shares this folder
  if [ "$1" = OFF ]; then echo all; else grep -m1 '^flags' /proc/cpuinfo 2>/dev/null | tr ' ' '\n' | grep -x -e avx512vl -e avx512_bf16 | tr '\n' '+'; fi
}

tool() { # name: the program in .venv, else the system's
  if [ -x "$VENV/bin/$1" ]; then echo "$PWD/$VENV/bin/$1"; else command -v "$1"; fi
}

use_ccache() { # for the cmake that follows, where there is one; checkouts in other folders share what they compiled
  has ccache || return 0
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1
  export CCACHE_SLOPPINESS=pch_defines,time_macros # the precompiled header of tests/c
}

cmake_configure() { # build folder, arguments...
  folder=$1
  shift
  use_ccache
  generator="Unix Makefiles"
  ninja=$(tool ninja || true)
  if [ -n "$ninja" ] && "$ninja" --version >/dev/null 2>&1; then
    generator=Ninja
    set -- "$@" "-DCMAKE_MAKE_PROGRAM=$ninja"
  fi
  # a folder of another generator or of a moved checkout can't be configured again
  if [ -f "$folder/CMakeCache.txt" ] &&
    ! { grep -q "CMAKE_GENERATOR:INTERNAL=$generator\$" "$folder/CMakeCache.txt" && grep -q "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD\$" "$folder/CMakeCache.txt"; }; then
    rm -rf "$folder"
  fi
  "$(tool cmake)" -S . -B "$folder" -G "$generator" "$@"
}

quietly() { # log file, command...: its output goes to the log, whose end is shown if it fails
  log=$1
  shift
  mkdir -p "$(dirname "$log")"
  "$@" >"$log" 2>&1 </dev/null || {
    tail -40 "$log" >&2
    die "failed: $* (all of its output: $log)"
  }
}
