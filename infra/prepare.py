"""The steps of `make setup` after the environment: jars, our operator's jar, compiled kernels. `python -m infra.prepare`

Each step has a stamp in `build/stamps/` that holds a hash of what it read; a step whose stamp is right is skipped.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from infra import jars
from infra.flink_cluster import pyflink_home
from infra.jars import BUILD, COMPILER_JARS, CONNECTOR_JARS, OPERATOR_JAR, STAMPS, find_java
from infra.machine_checks import require_disk
from infra.options import ROOT
from infra.precompile import MODULES
from roostream.errors import RoostreamError, SetupError

JAVA_SOURCES = ROOT / "joiner" / "java"
_BYTES_NEEDED = 1 << 30
_COMPILED = re.compile(r"^@(njit|kernel|short_kernel)\b", re.MULTILINE)


def main() -> int:
    """1 disk  2 jars  3 the operator's jar  4 kernels. Each is skipped where what it would make is there; the exit code."""
    console = Console(highlight=False)
    try:
        require_disk(BUILD, _BYTES_NEEDED, "set-up")
        fetch_jars(console)
        compile_operator(console)
        warm_kernels(console)
    except RoostreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: {BUILD} can't be written ({error}); run it as the owner of this environment",
            file=sys.stderr,
        )
        return 2
    return 0


def digest(paths: Iterable[Path], *words: str) -> str:
    """A hash of names and bytes of files, and of words."""
    hasher = hashlib.sha256()
    for path in sorted(paths):
        hasher.update(str(path.name).encode() + b"\0" + path.read_bytes())
    for word in words:
        hasher.update(b"\0" + word.encode())
    return hasher.hexdigest()


def is_stamped(name: str, value: str) -> bool:
    stamp = STAMPS / name
    return stamp.exists() and stamp.read_text(encoding="utf-8") == value


def stamp(name: str, value: str) -> None:
    STAMPS.mkdir(parents=True, exist_ok=True)
    (STAMPS / name).write_text(value, encoding="utf-8")


def fetch_jars(console: Console) -> None:
    """The jars of jars.sha256 that aren't there yet.

    Raises:
        SetupError: one can't be fetched or has another hash; those that came stay.
    """
    wanted = jars.missing(jars.read_list())
    if not wanted:
        return
    total = sum(j.num_bytes for j in wanted)
    if not console.is_terminal:
        console.print(f"fetching {len(wanted)} jars, {total / 1e6:.0f} MB")
        return jars.fetch_all(wanted)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console
    ) as progress:
        task = progress.add_task("jars", total=total)
        jars.fetch_all(
            wanted, fetched=lambda j: progress.update(task, advance=j.num_bytes, description=j.artifact)
        )


def compile_operator(console: Console) -> None:
    """`joiner/java/**.java` → build/roostream-flink.jar, compiled against Flink's and the connector's jars."""
    sources = sorted(JAVA_SOURCES.rglob("*.java"))
    if not sources:
        return
    libraries = [
        *(pyflink_home() / "lib").glob("*.jar"),
        *(pyflink_home() / "opt").glob("*.jar"),
        *CONNECTOR_JARS.glob("*.jar"),
    ]
    value = digest(sources, *sorted(p.name for p in libraries))
    if OPERATOR_JAR.exists() and is_stamped("operator", value):
        return
    console.print(f"compiling {len(sources)} Java files")
    with tempfile.TemporaryDirectory(prefix="roostream-classes-") as classes:
        compile_java(sources, libraries, Path(classes))
        _pack(Path(classes))
    stamp("operator", value)


def compile_java(sources: list[Path], libraries: list[Path], classes: Path) -> None:
    """Compile `sources` into the folder `classes`. Raises SetupError: they don't compile; says where."""
    compiler = next(iter(COMPILER_JARS.glob("*.jar")))
    path = os.pathsep.join(str(p) for p in libraries)
    options = ("--release", "17", "-proc:none", "-nowarn", "-classpath", path, "-d", str(classes))
    command = (str(find_java()), "-jar", str(compiler), *options, *(str(s) for s in sources))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"Java sources of the joiner don't compile:\n{(done.stderr or done.stdout).strip()}")


def _pack(classes: Path) -> None:
    temporary = OPERATOR_JAR.with_suffix(".new")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as jar:
        jar.writestr("META-INF/MANIFEST.MF", "Manifest-Version: 1.0\r\n\r\n")
        for path in sorted(classes.rglob("*.class")):
            jar.write(path, path.relative_to(classes))
    os.replace(temporary, OPERATOR_JAR)


def kernel_sources() -> list[Path]:
    """The files of ours that have compiled functions."""
    folders = sorted({name.partition(".")[0] for name in MODULES})
    files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [path for path in files if _COMPILED.search(path.read_text(encoding="utf-8"))]


def warm_kernels(console: Console) -> None:
    """Compile and cache every kernel, in a process of its own so that the cache is what programs will find."""
    value = digest(kernel_sources(), sys.version, importlib.import_module("numba").__version__)
    if is_stamped("kernels", value):
        return
    console.print(f"compiling kernels of {', '.join(MODULES)}")
    done = subprocess.run((sys.executable, "-m", "infra.precompile"), cwd=ROOT, check=False)
    if done.returncode:
        raise SetupError("kernels could not be compiled; the lines above say why")
    stamp("kernels", value)


if __name__ == "__main__":
    sys.exit(main())
