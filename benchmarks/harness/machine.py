"""The machine and commit of a result, without names of hosts, persons or paths."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BUSY_LOAD_A_CORE = 0.35


def machine() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory, system, and the load average of the last minute."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return {
        "cpu": _search(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or platform.machine(),
        "cores": cores,
        "memory_gib": round(int(_search(Path("/proc/meminfo"), r"MemTotal:\s*(\d+)") or 0) / (1 << 20), 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_before": round(load, 2),
        "busy": load > BUSY_LOAD_A_CORE * cores,
    }


def commit(root: Path, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """`git describe` of the checkout, and whether tracked files differ from it, except those in `ignored`."""
    description = _git(root, "describe", "--always", "--abbrev=12")
    if description is None:
        return {"describe": "unknown", "dirty": True}
    excluded = [f":(exclude){path}" for path in ignored]
    return {"describe": description, "dirty": bool(_git(root, "status", "--porcelain", "--", ".", *excluded))}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _search(path: Path, pattern: str) -> str:
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8"))
    except OSError:
        return ""
    return match[1].strip() if match else ""


def no_device(nodes: Path = Path("/dev")) -> str:
    """Why rows that need a CUDA device can't run here, judged by the driver's device nodes without importing
    torch; "" = they can."""
    has_device = any(nodes.glob("nvidia[0-9]*")) or (nodes / "dxg").exists()
    return "" if has_device else "this machine shows no CUDA device"
