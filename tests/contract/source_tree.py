"""The product's folders, source files and imports, for the contract tests."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("roostream", "joiner", "param_server", "trainer", "serving", "infra")
GENERATED = {"roo_pb2.py"}


@cache
def sources(*folders: str) -> list[Path]:
    """Every Python file below these folders (default: the whole product) except generated ones."""
    found = [p for folder in folders or FOLDERS for p in (ROOT / folder).rglob("*.py")]
    return sorted(p for p in found if p.name not in GENERATED and "__pycache__" not in p.parts)


@cache
def parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, dotted name) of every import, also inside functions. `from a import b` gives a.b."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(parse_file(path)):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    return tuple(found)


def module_of(path: Path) -> str:
    """The dotted module name: `trainer/loop.py` → `trainer.loop`. An `__init__.py` stands for its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def relative_path(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
