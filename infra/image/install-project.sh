#!/bin/sh
# Installs the checkout in the current folder into an environment, with the same bytes at any time and in any folder's state:
# uv's note of when it was installed goes, and sources get a fixed time, which numba writes into its kernels.
# usage: install-project.sh ENVIRONMENT
set -eu
uv pip install --python "$1/bin/python3" --no-deps --no-build-isolation --compile-bytecode .
cd "$1"/lib/python3.*/site-packages
rm roostream-*.dist-info/uv_cache.json
sed -i '/uv_cache\.json/d' roostream-*.dist-info/RECORD
find roostream joiner param_server trainer serving infra -name '*.py' -exec touch -d @315532800 {} +
