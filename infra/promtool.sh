#!/usr/bin/env bash
# `make promtool`: Prometheus and its rule checker, from Debian's package, into .tools/bin. Unpacked, not installed: no root is needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VERSION=2.42.0+ds-5+deb12u1
SHA256=81d59a24fce84f7fbe97a45a4f2914b6a5881b5cd1db2a6a0e129e515e1a5f55

[[ -x .tools/bin/promtool && -x .tools/bin/prometheus ]] && exit 0
command -v apt-get dpkg-deb >/dev/null || { echo "error: apt-get and dpkg-deb are needed; or put a promtool on PATH" >&2; exit 2; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
(cd "$folder" && apt-get download -qq "prometheus=$VERSION") ||
  { echo "error: this machine's package lists have no prometheus $VERSION; run apt-get update, or put a promtool on PATH" >&2; exit 2; }
echo "$SHA256  $(ls "$folder"/*.deb)" | sha256sum --check --quiet
dpkg-deb -x "$folder"/*.deb "$folder/x"
for program in promtool prometheus; do install -D -m 755 "$folder/x/usr/bin/$program" ".tools/bin/$program"; done
