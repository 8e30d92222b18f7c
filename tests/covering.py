"""Which tests run a line: what `tests/mutants.py` asks, so that a change is met by those tests alone.

As a pytest plugin (`-p tests.covering`, under `coverage run`) it names each test's part of the measurement after the test; what
threads do meanwhile belongs to it too. What a module or session fixture does is counted for the first test that wants it.
"""

from __future__ import annotations

import ast
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import coverage
import pytest
from coverage.numbits import numbits_to_nums

_CONTEXTS = """
select context.context, numbits from line_bits
join file on file.id = file_id join context on context.id = context_id where file.path = ?
"""
_TIMES = "TEST_TIMES_FILE"  # the file that times are appended to
USUAL = "not e2e and not chaos and not slow"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, None, None]:
    measuring = coverage.Coverage.current()
    if measuring is not None:
        measuring.switch_context(item.nodeid)
    began = time.monotonic()
    yield
    if measuring is not None:
        measuring.switch_context("")
    with open(os.environ[_TIMES], "a", encoding="utf-8") as times:
        times.write(f"{time.monotonic() - began:.3f} {item.nodeid}\n")


class Covering:
    """The tests of one room, run once and measured."""

    def __init__(self, home: Path, room: str, data: Path, *, measure: bool = True) -> None:
        """`measure`: False where `data` is that of an earlier run. Raises SystemExit: a test fails, or there is none."""
        self._home, self._data, self._times = home, data, data.with_suffix(".times")
        if measure:
            self._measure(room)
        self._took_s: dict[str, float] = {}
        for line in self._times.read_text(encoding="utf-8").splitlines():
            seconds, _, test = line.partition(" ")
            for name in (test, test.split("::")[0]):
                self._took_s[name] = self._took_s.get(name, 0.0) + float(seconds)

    def _measure(self, room: str) -> None:
        home, data = self._home, self._data
        self._times.unlink(missing_ok=True)
        env = os.environ | {"PYTHONPATH": str(home), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        env |= {_TIMES: str(self._times)}
        run = [sys.executable, "-m", "coverage", "run", "--rcfile", os.devnull, "--data-file", str(data), "--source", room]
        ask = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "tests.covering", "-m", USUAL, f"tests/{room}"]
        ran = subprocess.run([*run, *ask], cwd=home, env=env, capture_output=True, text=True)
        if ran.returncode != 0:
            raise SystemExit(f"tests/{room} fail without any change; mend that first\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")

    def took_s(self, test: str) -> float:
        """A test, or all of a file; 0 of one that was not there."""
        return self._took_s.get(test, 0.0)

    def tests_of(self, file: str, lines: range) -> list[str] | None:
        """Those that run any of these lines; None if importing the module does, so that all tests depend on them."""
        found: set[str] = set()
        with sqlite3.connect(self._data) as measured:
            rows = measured.execute(_CONTEXTS, (str(self._home / file),))
            for context, numbits in rows:
                if not set(lines).isdisjoint(numbits_to_nums(numbits)):
                    found.add(context)
        return None if "" in found else sorted(found)


def statement_lines(tree: ast.AST, line: int) -> range:
    """The lines of the innermost statement that holds `line`; of one with a body, those before it."""
    best = range(line, line + 1)
    size = sys.maxsize
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            body = getattr(node, "body", None)
            end = min(node.end_lineno or node.lineno, _before(body) if body else sys.maxsize)
            if line <= end and end - node.lineno < size:
                best, size = range(node.lineno, end + 1), end - node.lineno
    return best


def _before(body: Sequence[ast.stmt]) -> int:
    return max(body[0].lineno - 1, 1)
