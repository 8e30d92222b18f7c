"""Requirements on the machine: Python version, disk, memory. Each failed check is one sentence."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from roostream.errors import SetupError

DISK_BYTES = 10 * 10**9
MEMORY_BYTES = 8 * 10**9


def require_python(version: tuple[int, int] = sys.version_info[:2]) -> None:
    """Raise SetupError if this version of Python is not supported."""
    if not (3, 11) <= version < (3, 13):
        raise SetupError(
            f"expected Python 3.11 or 3.12 (Flink has packages for no others), got {version[0]}.{version[1]}"
        )


def require_disk(path: Path, min_bytes: int = DISK_BYTES, what: str = "a stack") -> None:
    """Require free space in `path`, or in the nearest parent folder that exists."""
    folder = next(p for p in (path, *path.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(folder).free
    if free < min_bytes:
        raise SetupError(
            f"{what} needs {min_bytes / 1e9:.0f} GB of free disk in {folder}, got {free / 1e9:.1f} GB; "
            "free some, or choose another folder"
        )


def require_memory(meminfo: Path = Path("/proc/meminfo")) -> None:
    """Raise SetupError if the machine has less memory than a stack needs."""
    total = memory_bytes(meminfo.read_text(encoding="utf-8"))
    if total < MEMORY_BYTES:
        raise SetupError(
            f"a stack needs a machine with {MEMORY_BYTES / 1e9:.0f} GB of memory, got {total / 1e9:.1f} GB"
        )


def memory_bytes(meminfo: str) -> int:
    """Total memory of the machine, from the text of /proc/meminfo."""
    line = next(x for x in meminfo.splitlines() if x.startswith("MemTotal:"))
    return int(line.split()[1]) * 1024
