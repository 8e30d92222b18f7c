"""Starts subject runners: in the project's environment, in pinned environments of peers, and in trees of
other commits.

The environment of a peer is created under .tools/peers/NAME when a benchmark first needs it, from the pinned
and hashed benchmarks/environments/NAME.txt. A peer is never a dependency of the project.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.fixture_cache import FOLDER
from benchmarks.harness.subject_runner import Slice
from roostream.errors import RoostreamError

ROOT = Path(__file__).resolve().parents[2]
_COMMIT = "commit:"


class PeerUnavailable(RoostreamError):
    """A peer's environment can't be made here; the row goes without it."""


@dataclass(frozen=True)
class Interpreter:
    """A Python executable, and the source tree that it imports from."""

    python: str
    tree: Path


def interpreter_for(environment: str, root: Path = ROOT) -> Interpreter:
    """Where subjects of this environment run; made if it isn't there.

    Raises:
        PeerUnavailable: it can't be made; says why, in words that can be published.
    """
    if not environment:
        return Interpreter(sys.executable, root)
    if environment.startswith(_COMMIT):
        return Interpreter(sys.executable, _tree_of(environment.removeprefix(_COMMIT), root))
    return Interpreter(_python_of(environment, root), root)


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


_END_S = 90.0  # a subject may be a whole stack, which stops in order


class SubjectError(RoostreamError):
    """A subject could not be opened or timed; its traceback is on stderr."""


class SubjectProcess:
    """The calls of `SubjectRunner`, answered by a process."""

    def __init__(self, interpreter: Interpreter, fixtures: str = "") -> None:
        """`made`: the folder for what is the same in every run (benchmarks/harness/fixture_cache.py); "" =
        none."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self._process = subprocess.Popen(
            [interpreter.python, "-m", "benchmarks.harness.subject_runner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=interpreter.tree,
            env=environ
            | {
                "PYTHONPATH": str(interpreter.tree),
                "OMP_NUM_THREADS": "1",
                "PATH": _path(interpreter.python),
                FOLDER: fixtures,
            },
        )

    def open(self, setup: str, arguments: list[Any], slice_s: float) -> int:
        return self._call("open", setup, arguments, slice_s)

    def slice(self, number: int) -> Slice:
        return Slice(*self._call("slice", number))

    def set_up_run(self, setup: str) -> None:
        self._call("set_up_run", setup)

    def versions(self) -> dict[str, str]:
        return self._call("versions")

    def close(self) -> None:
        """Close the subjects; the process stays."""
        self._call("close")

    def end(self) -> None:
        """End the process. Idempotent."""
        assert self._process.stdin and self._process.stdout
        with self._process:
            self._process.stdin.close()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _call(self, call: str, *arguments: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"call": call, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SubjectError(f"the process that times subjects ended during {call}; its output is above")
        answer = json.loads(line)
        if "error" in answer:
            raise SubjectError(answer["error"])
        return answer["value"]


def _path(python: str) -> str:
    return f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
