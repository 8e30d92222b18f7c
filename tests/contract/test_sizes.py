"""Files and bodies stay small enough to be read."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "roo",
    "runtime",
    "joiner",
    "models",
    "trainer",
    "param_server",
    "features",
    "serving",
    "traffic",
    "infra",
    "command",
    "benchmarks",
)
GENERATED = {"roo_pb2.py"}
MOST_FILE_LINES, MOST_BODY_LINES = 400, 60
USUAL_FILE_LINES, USUAL_BODY_LINES = 150, 25


def files() -> list[Path]:
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]
    return [p for p in found if p.name not in GENERATED and "__pycache__" not in p.parts]


def bodies() -> list[tuple[str, int]]:
    """(place, lines) of every function, its docstring not counted."""
    found = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
                found.append((f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node.body[-1].end_lineno - first.lineno + 1))  # type: ignore[operator]
    return found


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_is_longer_than_400_lines() -> None:
    assert [f"{p.relative_to(ROOT)}: {lines_of(p)}" for p in files() if lines_of(p) > MOST_FILE_LINES] == []


def test_no_body_is_longer_than_60_lines() -> None:
    assert [f"{place}: {lines}" for place, lines in bodies() if lines > MOST_BODY_LINES] == []


def test_most_files_are_under_150_lines() -> None:
    sizes = [lines_of(p) for p in files()]
    assert sum(n <= USUAL_FILE_LINES for n in sizes) >= 0.6 * len(sizes)


def test_most_bodies_are_under_25_lines() -> None:
    sizes = [lines for _, lines in bodies()]
    assert sum(n <= USUAL_BODY_LINES for n in sizes) >= 0.95 * len(sizes)
