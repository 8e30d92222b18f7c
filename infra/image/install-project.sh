#!/bin/sh
# Installs the checkout in the current folder into an environment. Two installations are equal, byte for byte: the file in which uv
# notes the time is deleted, and sources get a fixed time, because numba writes it into the kernels.
# usage: install-project.sh ENVIRONMENT
set -eu
uv pip install --python "$1/bin/python3" --no-deps --no-build-isolation --compile-bytecode .
cd "$1"/lib/python3.*/site-packages
rm roostream-*.dist-info/uv_cache.json
sed -i '/uv_cache\.json/d' roostream-*.dist-info/RECORD
find roostream joiner param_server trainer serving infra -name '*.py' -exec touch -d @315532800 {} +
