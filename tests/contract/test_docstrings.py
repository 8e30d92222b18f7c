"""Public functions of some length say what they do: at least 90 % of those whose body has 8 lines or more."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {"tests", "docs", "build"}
GENERATED = {"roo_pb2.py"}
LEAST_PERCENT, LONG_BODY_LINES = 90.0, 8


def long_functions() -> list[tuple[str, bool]]:
    """(place, has a docstring) of every public function and method whose body has 8 lines or more."""
    folders = [p.parent for p in ROOT.glob("*/__init__.py") if p.parent.name not in NOT_OURS]
    found = []
    for path in sorted(p for folder in folders for p in folder.rglob("*.py") if p.name not in GENERATED):
        public(ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT).as_posix(), found)
    return found


def public(node: ast.AST, place: str, found: list[tuple[str, bool]]) -> None:
    """Into classes, not into functions: what is inside of one isn't public."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            public(child, f"{place} {child.name}.", found)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            has = ast.get_docstring(child) is not None
            first = child.body[1] if has and len(child.body) > 1 else child.body[0]
            if (child.body[-1].end_lineno or 0) - first.lineno + 1 >= LONG_BODY_LINES:
                found.append((f"{place} {child.name}" if not place.endswith(".") else f"{place}{child.name}", has))


def test_nine_of_ten_public_functions_of_eight_lines_say_what_they_do() -> None:
    found = long_functions()
    missing = [place for place, has in found if not has]
    assert 100 * (1 - len(missing) / len(found)) >= LEAST_PERCENT, missing
