"""Where subjects run that are not ours today: peers in environments of their own, and other commits of ours.

A peer's environment is made when a benchmark first asks for it, under .tools/peers/NAME, from the pinned and hashed
benchmarks/environments/NAME.txt. Nothing of it is ever a dependency of the project.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from roostream.errors import RoostreamError

ROOT = Path(__file__).resolve().parent.parent
_COMMIT = "commit:"


class PeerUnavailable(RoostreamError):
    """A peer's environment can't be made here; the row goes without it."""


@dataclass(frozen=True)
class Place:
    """A Python, and the tree that it imports from."""

    python: str
    tree: Path


def place_of(environment: str, root: Path = ROOT) -> Place:
    """Where subjects of this environment run; made if it isn't there.

    Raises:
        PeerUnavailable: it can't be made; says why, in words that can be published.
    """
    if not environment:
        return Place(sys.executable, root)
    if environment.startswith(_COMMIT):
        return Place(sys.executable, _tree_of(environment.removeprefix(_COMMIT), root))
    return Place(_python_of(environment, root), root)


def _python_of(name: str, root: Path) -> str:
    requirements, home = (
        root / "benchmarks" / "environments" / f"{name}.txt",
        root / ".tools" / "peers" / name,
    )
    if not requirements.is_file():
        raise PeerUnavailable(f"benchmarks/environments/{name}.txt is not there")
    python, stamp = home / "bin" / "python", home / "made-from"
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return str(python)
    uv = _uv(root)
    shutil.rmtree(home, ignore_errors=True)
    _run([uv, "venv", "--quiet", "--python", sys.executable, str(home)], "its environment could not be made")
    _run(
        [uv, "pip", "sync", "--quiet", "--python", str(python), "--require-hashes", str(requirements)],
        "its packages could not be installed",
    )
    stamp.write_text(wanted)
    return str(python)


def _uv(root: Path) -> str:
    own = root / ".tools" / "bin" / "uv"
    found = str(own) if own.is_file() else shutil.which("uv")
    if found is None:
        raise PeerUnavailable("the installer is not there; run `make setup`")
    return found


def _tree_of(commit: str, root: Path) -> Path:
    """The files of a commit, under its full id."""
    if not re.fullmatch(r"[A-Za-z0-9._/-]+", commit) or commit.startswith("-"):
        raise PeerUnavailable(f"expected a commit or tag, got {commit!r}")
    asked = subprocess.run(
        ["git", "rev-parse", f"{commit}^{{commit}}"], cwd=root, capture_output=True, text=True
    )
    if asked.returncode:
        raise PeerUnavailable(f"commit {commit} is not in this repository")
    tree = root / ".tools" / "peers" / f"commit-{asked.stdout.strip()}"
    if not tree.is_dir():
        archive = subprocess.run(
            ["git", "archive", asked.stdout.strip()], cwd=root, capture_output=True, check=True
        ).stdout
        making = tree.with_suffix(".making")
        shutil.rmtree(making, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(making, filter="data")
        making.rename(tree)
    return tree


def _run(command: list[str], otherwise: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise PeerUnavailable(f"{otherwise} (exit code {done.returncode})")
