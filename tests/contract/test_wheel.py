"""The wheel is the complete application: in a fresh environment it finds everything that a checkout has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)  # creating and filling an environment takes minutes on a busy machine
ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TOP_PACKAGES = {name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
OUTSIDE = tuple(
    f"infra/{name}"
    for name in ("k8s/", "s3/", "image/", "systemd/", "compose/", "compose.yaml", "promtool.sh", "setup.sh")
)
"""Files of deployments, which the wheel leaves out: users take them from a checkout or a release archive."""
ENTRY = "from importlib.metadata import distribution as d; d('roostream').entry_points['roostream'].load()()"
PARTS = """
import json
from infra import jars, options, prepare
from roostream.schema.schema_file import load_schema
print(json.dumps({
    "root": str(options.ROOT),
    "build": str(jars.BUILD),
    "jars": len(jars.read_list()),
    "java": len(list(prepare.JAVA_SOURCES.glob("*.java"))),
    "schemas": sorted(load_schema(p).name for p in options.DEMO_SCHEMA.parent.glob("*.toml")),
}))
"""
SCHEMA = '[tables.item]\ndim = 4\n[[nro]]\nname = "price"\n[[nro]]\nonline = "item_id"\nkind = "ids"\n' + (
    'table = "item"\n[[label]]\nname = "click"\naction = "click"\n'
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel, which setuptools builds and uv installs. Other
    packages come from the present environment, so that nothing is downloaded. This does not show that they
    resolve."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    skip = shutil.ignore_patterns("__pycache__")
    for name in TOP_PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True)
    venv.create(folder / "env", symlinks=True)
    python, wheel = folder / "env" / "bin" / "python", next(folder.glob("*.whl"))
    install = ("pip", "install", "--quiet", "--offline", "--no-deps", "--no-index", "--python", str(python))
    subprocess.run([ROOT / ".tools" / "bin" / "uv", *install, str(wheel)], check=True, capture_output=True)
    packages = next((folder / "env").glob("lib/python*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def run_python(python: Path, folder: Path, *arguments: str) -> str:
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COVERAGE", "VIRTUAL_ENV"))
    }
    environ = {**inherited, "NUMBA_DISABLE_JIT": "1"}  # runs the same code without a minute of compilation
    completed = subprocess.run(
        [python, *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=110
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def test_an_installed_wheel_has_the_command(python: Path, tmp_path: Path) -> None:
    script = python.with_name("roostream")
    assert script.read_text().startswith("#!" + str(python))
    output = run_python(python, tmp_path, str(script), "plan", "--requests-per-s", "1000")
    assert "bottleneck: " in output


def test_the_wheel_contains_all_sources_and_data_files_and_nothing_else(python: Path) -> None:
    """A package, page or table that the project's lists forget would be missed by users only."""
    tracked = subprocess.run(
        ("git", "ls-files", *sorted(TOP_PACKAGES)), cwd=ROOT, capture_output=True, text=True, check=True
    )
    expected = {
        name
        for name in tracked.stdout.splitlines()
        if not name.endswith(".md") and not name.startswith(OUTSIDE) and "kustomization" not in name
    }
    packages = next((python.parents[1]).glob("lib/python*/site-packages"))
    assert {name for name in expected if not (packages / name).is_file()} == set()
    record = next(packages.glob("roostream-*.dist-info/RECORD")).read_text().splitlines()
    tops = {line.partition("/")[0] for line in record if not line.startswith(("..", "roostream-"))}
    assert tops == TOP_PACKAGES


def test_extras_name_existing_extras() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"flink", "gpu", "bench"} <= set(extras)
    for requirement in (one for needs in extras.values() for one in needs if one.startswith("roostream[")):
        assert set(requirement.removeprefix("roostream[").removesuffix("]").split(",")) <= set(extras)


def test_the_command_prints_its_version(python: Path, tmp_path: Path) -> None:
    assert (
        run_python(python, tmp_path, "-c", ENTRY, "--version")
        == f"roostream {PROJECT['project']['version']}\n"
    )


def test_programs_find_their_data_files_in_the_wheel(python: Path, tmp_path: Path) -> None:
    found = json.loads(run_python(python, tmp_path, "-c", PARTS))
    assert Path(found["root"]).is_relative_to(python.parents[1]), (
        "files must come from the wheel and not from the checkout"
    )
    assert found["build"] == str(python.parents[1] / "share" / "roostream")
    assert found["jars"] > 30 and found["java"] == len(list((ROOT / "joiner" / "java").glob("*.java")))
    assert found["schemas"] == ["demo", "ebnerd", "yambda"]


def test_a_log_is_replayed_in_one_process(python: Path, tmp_path: Path) -> None:
    (tmp_path / "shop.toml").write_text(SCHEMA)
    lines: list[dict[str, object]] = []
    for i in range(6):
        key, time_ms = {"request_id": f"r{i}", "user_id": i + 1}, 1_700_000_000_000 + 60_000 * i
        candidates = [{"item_id": 10 * i + k, "price": 1.0 + k} for k in range(3)]
        click = {"item_id": 10 * i, "action": "click", "time": time_ms + 1000}
        lines.append({**key, "type": "impression", "time": time_ms, "candidates": candidates})
        lines.append({**key, "type": "engagement", **click})
    (tmp_path / "shop.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    replay = "replay jsonl --log shop.jsonl --schema shop.toml --engine local --report out.json"
    run_python(python, tmp_path, "-c", ENTRY, *replay.split())
    assert json.loads((tmp_path / "out.json").read_text())["counts"]["samples"] == 6
