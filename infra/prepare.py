"""The steps of `make setup` after the packages: jars, the operator's jar, compiled kernels. `roostream
prepare` runs them too.

    python -m infra.prepare early      # during the installation: jars, and kernels without torch
    python -m infra.prepare            # everything that is missing

Each step has a stamp in `build/stamps/` with a hash of what it read, and is skipped while the stamp is valid.
Compiled kernels and the operator's jar are also kept in the user's cache folder under that hash, so that a
fresh checkout does not compile.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console

from infra import jars
from infra.jars import BUILD, COMPILER_JARS, CONNECTOR_JARS, OPERATOR_JAR, STAMPS, find_java
from infra.machine_checks import require_disk
from infra.options import ROOT
from infra.precompile import EARLY_GROUPS, GROUPS
from roostream.errors import RoostreamError, SetupError

JAVA_SOURCES = ROOT / "joiner" / "java"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roostream"
_MIN_FREE_BYTES = 1 << 30
_KEPT_ARCHIVES = 4
_KERNEL = re.compile(r"^@(njit|kernel|short_kernel)\b", re.MULTILINE)


def main(only: str = "") -> int:
    """Run the missing steps in parallel; returns the exit code. `only`: "early", or "" for all steps."""
    console = Console(highlight=False)
    try:
        require_disk(BUILD, _MIN_FREE_BYTES, "set-up")
        if only == "early":
            _run_parallel(lambda: fetch_jars(console), lambda: compile_kernels(console, EARLY_GROUPS))
        else:
            fetch_jars(console)
            _run_parallel(
                lambda: compile_operator(console),
                lambda: compile_kernels(console, tuple(GROUPS)),
                lambda: write_byte_code(console),
            )
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


def _run_parallel(*steps: Callable[[], None]) -> None:
    """Run each step in a thread of its own; raises the first error after all have ended."""
    errors: list[Exception] = []

    def run(step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def digest(paths: Iterable[Path], *words: str) -> str:
    """A hash of the names and contents of files, and of further strings."""
    hasher = hashlib.sha256()
    for path in sorted(paths):
        hasher.update(str(path.name).encode() + b"\0" + path.read_bytes())
    for word in words:
        hasher.update(b"\0" + word.encode())
    return hasher.hexdigest()


def is_stamped(name: str, value: str) -> bool:
    """Whether the step `name` was last completed with this value (see `stamp`)."""
    stamp = STAMPS / name
    return stamp.exists() and stamp.read_text(encoding="utf-8") == value


def stamp(name: str, value: str) -> None:
    """Record that the step `name` was completed with this value, so that the next set-up can skip it."""
    STAMPS.mkdir(parents=True, exist_ok=True)
    (STAMPS / name).write_text(value, encoding="utf-8")


def fetch_jars(console: Console) -> None:
    """Download the jars of jars.sha256 that are missing, and delete other versions of them.

    Raises:
        SetupError: a jar can't be downloaded or has another hash. The jars before it stay.
    """
    wanted = jars.read_list()
    for old in jars.other_versions(wanted):
        old.unlink(missing_ok=True)
    missing = jars.missing(wanted)
    if not missing:
        return
    started_s = time.monotonic()
    console.print(f"fetching {len(missing)} jars, {sum(j.num_bytes for j in missing) / 1e6:.0f} MB")
    jars.fetch_all(missing)
    console.print(f"jars: {time.monotonic() - started_s:.0f} s")


def compile_operator(console: Console) -> None:
    """Compile `joiner/java/**.java` against Flink's and the connector's jars to build/roostream-flink.jar."""
    from roostream.runtime.flink_rest import pyflink_home

    sources = sorted(JAVA_SOURCES.rglob("*.java"))
    if not sources:
        return
    folders = (pyflink_home() / "lib", pyflink_home() / "opt", CONNECTOR_JARS)
    libraries = [jar for folder in folders for jar in folder.glob("*.jar")]
    key = digest(sources, *sorted(p.name for p in libraries))
    if OPERATOR_JAR.exists() and is_stamped("operator", key):
        return
    started_s = time.monotonic()
    cached = CACHE / f"operator-{key[:32]}.jar"
    with tempfile.TemporaryDirectory(prefix="roostream-classes-") as folder:
        classes, jar = Path(folder) / "classes", cached
        if not _is_intact(cached):
            classes.mkdir()
            compile_java(sources, libraries, classes)
            entries = {path: str(path.relative_to(classes)) for path in sorted(classes.rglob("*.class"))}
            write_zip(jar := Path(folder) / cached.name, entries, manifest="Manifest-Version: 1.0\r\n\r\n")
            _keep_in_cache(jar, cached)
        (STAMPS / "operator").unlink(missing_ok=True)  # it is not of the new file
        jars.replace_file(OPERATOR_JAR, jar)
    stamp("operator", key)
    console.print(f"Java classes: {time.monotonic() - started_s:.0f} s")


def compile_java(sources: list[Path], libraries: list[Path], classes: Path) -> None:
    """Compile `sources` into the folder `classes`. Raises SetupError with the compiler's messages."""
    compiler = next(iter(COMPILER_JARS.glob("*.jar")))
    path = os.pathsep.join(str(p) for p in libraries)
    options = ("--release", "17", "-proc:none", "-nowarn", "-classpath", path, "-d", str(classes))
    command = (str(find_java()), "-jar", str(compiler), *options, *(str(s) for s in sources))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"Java sources of the joiner don't compile:\n{(done.stderr or done.stdout).strip()}")


def kernel_sources() -> list[Path]:
    """The source files with compiled functions."""
    folders = sorted({name.partition(".")[0] for modules in GROUPS.values() for name in modules})
    files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [path for path in files if _KERNEL.search(path.read_text(encoding="utf-8"))]


def compile_kernels(console: Console, groups: tuple[str, ...]) -> None:
    """Compile the groups that are not stamped, each in a process of its own; or unpack them from the user's
    cache."""
    key = digest(kernel_sources(), sys.version, importlib.metadata.version("numba"), _processor())
    pending = [group for group in groups if not is_stamped(f"kernels-{group}", key)]
    if not pending:
        return
    started_s = time.monotonic()
    archive = CACHE / f"kernels-{key[:32]}.zip"
    use_cache = "NUMBA_CACHE_DIR" not in os.environ
    is_cached = use_cache and _is_intact(archive)
    if is_cached:
        with zipfile.ZipFile(archive) as file:
            file.extractall(ROOT)
        pending = list(GROUPS)
    else:
        console.print(f"compiling kernels: {', '.join(pending)}")
        commands = [(sys.executable, "-m", "infra.precompile", group) for group in pending]
        processes = [subprocess.Popen(command, cwd=ROOT) for command in commands]
        if any([process.wait() for process in processes]):
            raise SetupError("kernels could not be compiled; the lines above say why")
    for group in pending:
        stamp(f"kernels-{group}", key)
    if use_cache and not is_cached and all(is_stamped(f"kernels-{group}", key) for group in GROUPS):
        with tempfile.TemporaryDirectory(prefix="roostream-kernels-") as folder:
            files = (
                p
                for top in {s.relative_to(ROOT).parts[0] for s in kernel_sources()}
                for p in (ROOT / top).rglob("__pycache__/*.nb[ic]")
            )
            write_zip(Path(folder) / "kernels.zip", {path: str(path.relative_to(ROOT)) for path in files})
            _keep_in_cache(Path(folder) / "kernels.zip", archive)
    console.print(f"kernels: {time.monotonic() - started_s:.0f} s")


def _processor() -> str:
    """What compiled code depends on: the processor's model and features, and numba's settings for them."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = [next((x for x in lines if x.startswith(key)), "") for key in ("model name", "flags")]
    return "\n".join([*cpu, *(os.environ.get(f"NUMBA_CPU_{key}", "") for key in ("NAME", "FEATURES"))])


def write_byte_code(console: Console) -> None:
    """Import the programs once after an installation. Compiling all 20,000 installed files would take much
    longer."""
    key = digest(
        [], sys.version, *sorted(f"{d.name}=={d.version}" for d in importlib.metadata.distributions())
    )
    if is_stamped("byte-code", key):
        return
    started_s = time.monotonic()
    command = (sys.executable, "-c", "from infra.precompile import import_programs; import_programs()")
    # Not checked: it is only a preparation, programs can do it too.
    subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    stamp("byte-code", key)
    console.print(f"byte code: {time.monotonic() - started_s:.0f} s")


def write_zip(path: Path, entries: dict[Path, str], manifest: str = "") -> None:
    """The same files give the same bytes: each entry has the date 1980-01-01."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        if manifest:
            archive.writestr(zipfile.ZipInfo("META-INF/MANIFEST.MF"), manifest)
        for file, name in entries.items():
            archive.writestr(zipfile.ZipInfo(name), file.read_bytes(), zipfile.ZIP_DEFLATED)


def _is_intact(archive: Path) -> bool:
    """Whether an archive of the user's cache can be used. A power failure may leave an empty one."""
    try:
        with zipfile.ZipFile(archive) as file:
            return file.testzip() is None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error):
        return False


def _keep_in_cache(file: Path, cached: Path) -> None:
    """Copy a file to the user's cache and delete old versions of it. If the cache cannot be written, nothing
    is copied."""
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        temporary = cached.with_suffix(f".{os.getpid()}")
        shutil.copyfile(file, temporary)
        os.replace(temporary, cached)
        versions = CACHE.glob(f"{cached.name.partition('-')[0]}-*{cached.suffix}")
        for old in sorted(versions, key=lambda p: p.stat().st_mtime_ns)[:-_KEPT_ARCHIVES]:
            old.unlink(missing_ok=True)
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
