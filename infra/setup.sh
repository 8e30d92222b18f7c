#!/usr/bin/env bash
# `make setup`: from a bare CPython 3.11 or 3.12 to everything that the project runs. A second run takes seconds: each step is
# skipped when a hash of what it reads is the one it left behind.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

UV_VERSION=0.13.8
NEEDED_KB=$((8 * 1000 * 1000))
VENV=$PWD/.venv

fail() {
  echo "error: $*" >&2
  exit 2
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
      "$candidate" -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))'
      return
    fi
  done
  fail "CPython 3.11 or 3.12 is needed and none was found (python3 is: $(python3 --version 2>&1 || true)); install one, or name it: make setup PYTHON=/path/to/python3.11"
}

hash_of() { cat "$@" | sha256sum | cut -d' ' -f1; }

[[ "$(uname -s)-$(uname -m)" == Linux-x86_64 ]] || fail "expected Linux on x86_64 (Flink and torch packages are pinned for it), got $(uname -s) on $(uname -m)"
python=$(find_python)
mkdir -p .tools
echo "$python" > .tools/python

if [[ "$(.tools/bin/uv --version 2>/dev/null || true)" != "uv $UV_VERSION"* ]]; then
  "$python" -m pip --version > /dev/null 2>&1 || fail "$python has no pip, which fetches the installer; install it (Debian: apt install python3-pip python3-venv)"
  echo "fetching uv $UV_VERSION"
  "$python" -m pip install --quiet --disable-pip-version-check --upgrade --target .tools "uv==$UV_VERSION" \
    || fail "pip could not fetch uv $UV_VERSION; check the network or pip's configuration and run it again"
fi

wanted=$(hash_of requirements.lock pyproject.toml .tools/python infra/setup.sh)
if [[ "$(cat "$VENV/roostream.stamp" 2>/dev/null || true)" != "$wanted" ]]; then
  free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
  if [[ ! -d $VENV && $free_kb -lt $NEEDED_KB ]]; then
    fail "set-up needs 8 GB of free disk here, got $((free_kb / 1000 / 1000)) GB; free some and run it again"
  fi
  [[ "$("$VENV/bin/python" -c 'import os, sys; print(os.path.realpath(sys._base_executable))' 2>/dev/null || true)" == "$python" ]] \
    || .tools/bin/uv venv --quiet --clear --python "$python" "$VENV"
  # Compiled once here: where a start can't keep what it compiles, each program would do it again, seconds of CPU every time.
  .tools/bin/uv pip sync --python "$VENV/bin/python" --compile-bytecode --require-hashes requirements.lock \
    || fail "packages could not be installed; the lines above name the package, run it again when the cause is gone"
  .tools/bin/uv pip install --quiet --python "$VENV/bin/python" --no-deps --no-build-isolation --editable . \
    || fail "the project itself could not be installed; the lines above say why"
  echo "$wanted" > "$VENV/roostream.stamp"
fi

exec "$VENV/bin/python" -m infra.prepare
