"""Set-up: checks of the machine, pinned jars, and kernels compiled before programs need them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra import jars, machine_checks, precompile, prepare
from infra.jars import Jar
from infra.options import ROOT
from roostream.errors import ConfigError, SetupError

CONTENT = b"a jar"
JAR = Jar(hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), "group", "thing", "1.0")


@pytest.mark.parametrize("version", [(3, 10), (3, 13)])
def test_an_unsupported_python_is_refused(version: tuple[int, int]) -> None:
    machine_checks.require_python((3, 11))
    with pytest.raises(SetupError, match="Python"):
        machine_checks.require_python(version)


def test_too_little_disk_is_refused_for_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    machine_checks.require_disk(tmp_path / "a" / "b", min_bytes=1)
    with pytest.raises(SetupError, match="disk"):
        machine_checks.require_disk(tmp_path / "a" / "b", min_bytes=1 << 60)


def test_too_little_memory_is_refused(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:        8000000 kB\nMemFree: 1 kB\n")
    machine_checks.require_memory(meminfo=meminfo)
    meminfo.write_text("MemTotal:        3900000 kB\n")
    with pytest.raises(SetupError, match="memory"):
        machine_checks.require_memory(meminfo=meminfo)


@pytest.mark.parametrize(
    ("packages", "free_gb", "is_refused"), [("", 8, False), ("dev", 8, True), ("", 6, True)]
)
def test_set_up_is_refused_without_room_for_its_packages(
    packages: str, free_gb: int, is_refused: bool, tmp_path: Path
) -> None:
    """All packages of `make setup-dev` take 7.6 GB, those of the demo 6. The download itself is not tried."""
    bin_folder, tools = tmp_path / "bin", tmp_path / ".tools" / "bin"
    for folder in (bin_folder, tools, tmp_path / "infra"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "infra" / "setup.sh", tmp_path / "infra")
    for name in ("requirements.lock", "requirements-dev.lock", "pyproject.toml"):
        (tmp_path / name).touch()
    for program, text in (
        (bin_folder / "df", f"printf 'head\\n/dev/x 0 0 {free_gb}000000 0%% /\\n'"),
        (tools / "uv", 'echo "uv 0.13.8"; [ "$1" = --version ]'),
    ):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", tmp_path / "infra" / "setup.sh", packages], env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0 and ("free disk" in done.stderr) is is_refused, done.stderr


def fetch(content: bytes) -> jars.Fetch:
    def write(jar: Jar, cache: Path) -> Path:
        path = cache / "downloaded"
        path.write_bytes(content)
        return path

    return write


def test_a_verified_jar_is_not_fetched_again(tmp_path: Path) -> None:
    assert jars.missing([JAR], tmp_path) == [JAR]
    jars.fetch_all([JAR], tmp_path, fetch(CONTENT))
    assert (tmp_path / "kafka" / "thing-1.0.jar").read_bytes() == CONTENT
    assert jars.missing([JAR], tmp_path) == []


def test_several_set_ups_at_once_install_the_same_jar(tmp_path: Path) -> None:
    content = bytes(8 << 20)
    jar = Jar(hashlib.sha256(content).hexdigest(), len(content), "group", "thing", "1.0")
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            list(pool.map(lambda _: jars.fetch_all([jar], tmp_path, fetch(content)), range(4)))
    assert [path.name for path in (tmp_path / "kafka").iterdir()] == ["thing-1.0.jar"]
    assert jars.missing([jar], tmp_path) == []


def test_an_earlier_version_of_a_jar_leaves_the_classpath(tmp_path: Path) -> None:
    for name in ("thing-0.9.jar", "thing-1.0.jar", "thing-more-0.9.jar", "other-1.0.jar"):
        (tmp_path / "kafka" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "kafka" / name).touch()
    assert jars.other_versions([JAR], tmp_path) == [tmp_path / "kafka" / "thing-0.9.jar"]


def test_a_damaged_download_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="sha256"):
        jars.fetch_all([JAR], tmp_path, fetch(b"A jar"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SetupError, match="make setup"):
        jars.require_jars(tmp_path)


def test_a_malformed_line_of_the_jar_list_is_named(tmp_path: Path) -> None:
    path = tmp_path / "jars.sha256"
    path.write_text("abc 12 group:artifact:1\nabc group:artifact:1\n")
    with pytest.raises(ConfigError, match=r"jars\.sha256:2"):
        jars.read_list(path)


@pytest.mark.timeout(600)  # takes minutes if no kernel is compiled yet
def test_every_module_with_kernels_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    assert precompile.main(()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        m for g in precompile.GROUPS.values() for m in g
    ]


def test_only_a_missing_extra_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lacks_extra.py").write_text("import a_package_of_an_extra\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("import broken.gone\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    groups = {"wire": ("lacks_extra",), "models": ("lacks_extra",), "other": ("broken",)}
    monkeypatch.setattr(precompile, "GROUPS", groups)
    assert precompile.main(("models",)) == 0
    for group in ("wire", "other"):
        with pytest.raises(ModuleNotFoundError):
            precompile.main((group,))


KERNEL = """
import numba, numpy as np

@numba.njit(cache=True)
def scaled(x):
    return x * 2.0 + 1.0

@numba.njit(cache=True)
def total(x):
    a, b, c, d = 0.0, 1.0, 2.0, 3.0
    for value in scaled(x):
        a, b, c, d = b + value, c, d, a
    return a + b + c + d

def precompile():
    total(np.ones(3))
"""


def test_two_processes_compile_the_same_bytes(tmp_path: Path) -> None:
    """Images are built so. Numba itself writes addresses of its process into the file of each kernel."""
    (tmp_path / "some_kernels.py").write_text(KERNEL)
    code = (
        "import sys; from infra import precompile as p; p.GROUPS = {'wire': ('some_kernels',)};"
        "p.keep_addresses_out_of_kernels(); sys.exit(p.main(()))"
    )
    found = []
    for name in ("first", "second"):
        path = os.pathsep.join((str(tmp_path), str(ROOT)))
        environment = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "NUMBA_CACHE_DIR": str(tmp_path / name)}
        subprocess.run((sys.executable, "-c", code), env=os.environ | environment, check=True)
        found.append({f.name: f.read_bytes() for f in (tmp_path / name).rglob("*.nb[ic]")})
    assert len(found[0]) == 4
    assert found[0] == found[1]


def test_equal_classes_give_equal_jars(tmp_path: Path) -> None:
    found = []
    for seconds in (10**9, 2 * 10**9):
        file = tmp_path / "Operator.class"
        file.write_bytes(b"class")
        os.utime(file, (seconds, seconds))
        prepare.write_zip(tmp_path / "operator.jar", {file: "a/Operator.class"}, "Manifest-Version: 1.0\r\n")
        found.append((tmp_path / "operator.jar").read_bytes())
    assert found[0] == found[1]


def test_a_program_that_does_not_exist_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    precompile.import_programs()
    monkeypatch.setattr(precompile, "PROGRAMS", ("joiner.missing",))
    with pytest.raises(ModuleNotFoundError):
        precompile.import_programs()


def test_compiled_kernels_are_restored_from_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second checkout with the same sources unpacks what the first one compiled."""
    from rich.console import Console

    monkeypatch.setattr(prepare, "CACHE", tmp_path / "cache")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    commands = {"first": "import sys; sys.exit(0)", "second": "import sys; sys.exit(1)"}
    for checkout, code in commands.items():
        package = tmp_path / checkout / "package"
        package.mkdir(parents=True)
        (package / "kernels.py").write_text("@njit\ndef f(): ...\n")
        monkeypatch.setattr(prepare, "ROOT", tmp_path / checkout)
        monkeypatch.setattr(prepare, "STAMPS", tmp_path / checkout / "stamps")
        monkeypatch.setattr(prepare, "GROUPS", {"wire": ("package.kernels",)})
        if checkout == "first":
            (package / "__pycache__").mkdir()
            (package / "__pycache__" / "kernels.nbi").write_bytes(b"compiled")
        infra = tmp_path / checkout / "infra"
        infra.mkdir()
        (infra / "__init__.py").write_text("")
        (infra / "precompile.py").write_text(code)
        monkeypatch.chdir(tmp_path / checkout)
        prepare.compile_kernels(Console(quiet=True), ("wire",))
    assert (tmp_path / "second" / "package" / "__pycache__" / "kernels.nbi").read_bytes() == b"compiled"


def test_a_set_up_that_ends_early_leaves_no_stamp_of_other_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stamp says which sources the jar has. The next set-up may have the sources of before."""
    from rich.console import Console

    for name in ("CACHE", "STAMPS", "JAVA_SOURCES"):
        monkeypatch.setattr(prepare, name, tmp_path / name.lower())
    monkeypatch.setattr(prepare, "OPERATOR_JAR", tmp_path / "operator.jar")
    source = tmp_path / "java_sources" / "A.java"
    source.parent.mkdir()

    def compile_java(sources: list[Path], _: object, classes: Path) -> None:
        (classes / "A.class").write_bytes(sources[0].read_bytes())

    def die(*_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "compile_java", compile_java)
    for text, is_killed in (("old", False), ("new", True), ("old", False)):
        source.write_text(text)
        with monkeypatch.context() as patched:
            if is_killed:
                patched.setattr(prepare, "stamp", die)
            with pytest.raises(KeyboardInterrupt) if is_killed else contextlib.nullcontext():
                prepare.compile_operator(Console(quiet=True))
    with zipfile.ZipFile(tmp_path / "operator.jar") as jar:
        assert jar.read("A.class") == b"old"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: (
            data[: data.index(b".nbi") + 4] + b"\xff" + data[data.index(b".nbi") + 5 :]
            if b".nbi" in data
            else data[: data.index(b".class") + 6] + b"\xff" + data[data.index(b".class") + 7 :]
        ),
    ],
    ids=["empty", "cut", "other bits"],
)
def test_a_damaged_file_in_the_users_cache_is_replaced(
    damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure may leave an empty file. Then set-up compiles, as without a cache."""
    from rich.console import Console

    console = Console(quiet=True)
    for name in ("CACHE", "STAMPS", "ROOT"):
        monkeypatch.setattr(prepare, name, tmp_path / name.lower())
    monkeypatch.setattr(prepare, "GROUPS", {"wire": ("package.kernels",)})
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    package, infra = tmp_path / "root" / "package", tmp_path / "root" / "infra"
    for folder in (package / "__pycache__", infra):
        folder.mkdir(parents=True)
    (package / "kernels.py").write_text("@njit\ndef f(): ...\n")
    (package / "__pycache__" / "kernels.nbi").write_bytes(b"compiled")
    (infra / "__init__.py").write_text("")
    (infra / "precompile.py").write_text("")
    java = tmp_path / "java"
    java.mkdir()
    (java / "A.java").write_text("class A {}")
    operator = tmp_path / "operator.jar"
    monkeypatch.setattr(prepare, "JAVA_SOURCES", java)
    monkeypatch.setattr(prepare, "OPERATOR_JAR", operator)
    monkeypatch.setattr(
        prepare, "compile_java", lambda _, __, classes: (classes / "A.class").write_bytes(b"class")
    )
    kept: list[dict[str, bytes]] = []
    for _ in range(2):
        monkeypatch.chdir(tmp_path / "root")
        prepare.compile_kernels(console, ("wire",))
        prepare.compile_operator(console)
        with zipfile.ZipFile(operator) as jar:
            assert jar.read("A.class") == b"class"
        kept.append({path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()})
        for path in (tmp_path / "cache").iterdir():
            path.write_bytes(damage(path.read_bytes()))
        shutil.rmtree(tmp_path / "stamps")
        operator.unlink()
    assert len(kept[0]) == 2 and kept[0] == kept[1]
