"""Which savepoint or checkpoint the joiner's job goes on from, and which of them can be deleted."""

from __future__ import annotations

import shutil
from pathlib import Path


def newest(flink: Path) -> Path | None:
    """The newest complete savepoint or checkpoint below `{home}/flink`: one with its `_metadata`, which is written last."""
    return max(_complete(flink), key=lambda p: (p / "_metadata").stat().st_mtime_ns, default=None)


def clean(flink: Path, keep: int = 2) -> list[Path]:
    """Delete savepoints and ended jobs' checkpoints older than the `keep` newest restore points; what was deleted.

    Call before a job is submitted: the folder of a running job is Flink's own.
    """
    points = sorted(_complete(flink), key=lambda p: (p / "_metadata").stat().st_mtime_ns, reverse=True)
    kept = {_owner(p) for p in points[:keep]}
    owners = [
        p
        for kind in ("checkpoints", "savepoints")
        if (flink / kind).is_dir()
        for p in (flink / kind).iterdir()
    ]
    gone = [p for p in owners if p not in kept]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    return gone


def _complete(flink: Path) -> list[Path]:
    found = [*flink.glob("savepoints/*/_metadata"), *flink.glob("checkpoints/*/chk-*/_metadata")]
    return [p.parent for p in found]


def _owner(point: Path) -> Path:
    """The folder that is deleted with a restore point: the savepoint's, or that of the job with all its checkpoints."""
    return point.parent if point.name.startswith("chk-") else point
