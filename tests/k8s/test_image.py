"""The images: the Dockerfile follows rules, image packages equal the lock file's, and every RUN command is
executed here, because no image is built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from infra.options import ROOT
from tests.k8s.dockerfile import Instruction, read
from tests.k8s.generate import IMAGES, locked_for_image
from tests.k8s.manifests import build_overlay, find_object, workloads

IMAGE = ROOT / "infra" / "image"
FILE = IMAGE / "Dockerfile"
FINAL_STAGES = tuple(IMAGES)
BUILD_STAGES = ("build-data", "build-model", "build-flink")


def instructions(word: str = "", *stages: str) -> list[Instruction]:
    return [i for i in read(FILE) if word in ("", i.keyword) and (not stages or i.stage in stages)]


def variables(stage: str) -> dict[str, str]:
    """The variables that ENV of a stage sets."""
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(i.text for i in instructions("ENV", stage))))


def test_base_images_are_pinned() -> None:
    stages = {i.stage for i in instructions()}
    for instruction in instructions("FROM"):
        base = instruction.text.partition(" ")[0]
        assert base in {*stages, "scratch"} or re.search(r":\d+\.\d+[\w.-]*$", base), base


def test_the_final_image_is_unprivileged_and_has_no_compiler() -> None:
    for stage in FINAL_STAGES:
        user = instructions("USER", stage)[-1].text
        assert int(user.partition(":")[0]) == built_user() >= 1000
    base = instructions("FROM", "base")[0].text.partition(" ")[0]
    assert base.endswith("-slim-bookworm")
    assert {instructions("FROM", stage)[0].text.partition(" ")[0] for stage in FINAL_STAGES} == {"base"}
    final = " ".join(i.text for i in instructions("", "base", *FINAL_STAGES))
    assert not re.search(r"gcc|build-essential|apt-get", final)


def built_user() -> int:
    """The user id with which the manifests run the image."""
    return int(next(iter(workloads(build_overlay("prod")))).pod["securityContext"]["runAsUser"])


@pytest.mark.parametrize("image", IMAGES)
def test_image_packages_are_those_of_the_lock_file(image: str) -> None:
    text = locked_for_image(image)
    assert (IMAGE / f"requirements/{image}.txt").read_text(encoding="utf-8") == text
    names = set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))
    assert {"numpy", "numba", "confluent-kafka", "obstore", "setuptools"} <= names
    assert ("torch" in names) == (image == "roostream")
    assert ("apache-flink" in names) == (image == "roostream-flink")
    assert not {"pytest", "mypy", "ruff", "playwright", "moto", "hypothesis", "ray"} & names


def test_all_our_packages_are_copied() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    our_packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert {i.text.split()[0] for i in instructions("COPY", "source")} >= our_packages
    for stage in BUILD_STAGES:
        assert "source" in [i.flags.get("from") for i in instructions("COPY", stage)], stage
    not_ignored = {
        line[1:]
        for line in (IMAGE / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
        if line[:1] == "!"
    }
    assert not_ignored == our_packages | {"pyproject.toml", "README.md", "LICENSE"}


def test_kernels_are_compiled_and_loaded_for_the_same_cpu() -> None:
    compiled_for, used_with = variables("tools"), variables("base")
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        assert compiled_for[name] == used_with[name]
    kernels = next(
        c for c in next(iter(workloads(build_overlay("prod")))).containers if c["name"] == "kernels"
    )
    assert f"{compiled_for['NUMBA_CACHE_DIR']}/." in kernels["command"]
    assert used_with["NUMBA_CACHE_DIR"] in kernels["command"]


def test_paths_in_flinks_manifest_exist() -> None:
    spec = find_object(build_overlay("prod"), "FlinkDeployment", "roostream-joiner")["spec"]
    home = variables("roostream-flink")["FLINK_HOME"]
    assert spec["job"]["jarURI"].startswith(f"local://{home}/opt/flink-python-")
    assert f"{home}/bin" in variables("roostream-flink")["PATH"].split(":")
    assert spec["flinkConfiguration"]["python.executable"] == "/opt/roostream/bin/python3"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("build", BUILD_STAGES)
def test_run_commands_of_the_dockerfile_work(build: str, tmp_path: Path) -> None:
    """Folders of the test replace /opt and /src; the interpreter and uv's cache are this machine's. The
    result must have the command, compiled kernels, and Flink with its Java."""
    uv = shutil.which("uv") or str(ROOT / ".tools/bin/uv")
    if not os.access(uv, os.X_OK):
        pytest.skip("uv is not there: run make setup")
    python = (ROOT / ".tools/python").read_text(encoding="utf-8").strip()
    replacements = {
        "/opt/": f"{tmp_path}/opt/",
        " /src": f" {tmp_path}/src",
        "/usr/local/bin/python3": python,
    }
    (tmp_path / "src").mkdir()
    inherited = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PYTHON", "VIRTUAL_ENV", "COVERAGE", "NUMBA", "ROOSTREAM"))
    }
    environment = {**inherited, "PATH": f"{Path(uv).parent}:/usr/bin:/bin"}

    def localize(text: str) -> str:
        for found, replacement in replacements.items():
            text = text.replace(found, replacement)
        return text

    for instruction in instructions("", "tools", build, *(["flink-home"] if build == "build-flink" else [])):
        if instruction.keyword == "ENV":
            environment |= {
                n: localize(f"{v} ").strip() for n, v in re.findall(r"(\w+)=(\S+)", instruction.text)
            }
        elif instruction.keyword == "COPY":
            from_source = instruction.flags.get("from") == "source"
            for copied in instructions("COPY", "source") if from_source else [instruction]:
                if "from" not in copied.flags:
                    _copy(copied.body.split(), tmp_path / "src")
        elif instruction.keyword == "RUN":
            completed = _run(("/bin/sh", "-euc", localize(instruction.body)), tmp_path / "src", environment)
            assert completed.returncode == 0, (
                f"{instruction.body}\n{completed.stdout[-2000:]}\n{completed.stderr[-3000:]}"
            )
    _check_environment(tmp_path, environment, has_flink=build == "build-flink")


def _run(
    command: tuple[str, ...], work: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)


def _copy(words: list[str], work: Path) -> None:
    *sources, target = words
    for source in sources:
        path = work / (Path(source).name if target.endswith("/") else target)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, path, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, path)


def _check_environment(root: Path, environment: dict[str, str], has_flink: bool) -> None:
    version = _run((f"{root}/opt/roostream/bin/roostream", "--version"), root, environment)
    assert re.match(r"roostream \d", version.stdout)
    assert list((root / "opt/roostream/kernels").rglob("*.nbi")), "there must be compiled kernels"
    ours = next((root / "opt/roostream/lib").glob("python3.*")) / "site-packages/roostream"
    assert len({source.stat().st_mtime for source in ours.rglob("*.py")}) == 1, "the time of a checksum"
    assert list((ours / "__pycache__").glob("*.pyc")), "containers cannot write byte code"
    if not has_flink:
        return
    flink = root / "opt/flink"
    assert _run((f"{flink}/java/bin/java", "-version"), root, environment).returncode == 0
    plugin = next((flink / "plugins/s3-fs-presto").glob("*.jar"))
    with zipfile.ZipFile(plugin) as opened:
        assert any("s3" in name for name in opened.namelist())
    assert (flink / "bin/kubernetes-jobmanager.sh").exists() and list(
        (flink / "lib").glob("roostream-flink.jar")
    )
