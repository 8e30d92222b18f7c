"""Savepoints and checkpoints in a folder of Flink's, from which a new job can continue.

    FOLDER/savepoints/NAME/_metadata     FOLDER/checkpoints/JOB/chk-N/_metadata

Flink writes `_metadata` last, so a point that has it is complete. Flink does not sync the file: after a power
failure it may be empty, and the point is not used.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def newest_restore_point(flink: Path) -> Path | None:
    """The newest complete savepoint or checkpoint below the folder `flink`; None = there is none."""
    return max(_restore_points(flink), key=_written_ns, default=None)


def delete_old_restore_points(flink: Path, keep: int = 2) -> list[Path]:
    """Delete all savepoints and checkpoints but the `keep` newest restore points; returns the deleted
    folders.

    Call before a job is submitted: Flink owns the folder of a running job. The times of those that stay are
    set to 1970, in their order, so that what the job writes is newer, even if the clock was set back.
    """
    points = sorted(_restore_points(flink), key=_written_ns, reverse=True)
    kept = {_folder_to_delete(p) for p in points[:keep]}
    folders = [
        p for d in ("checkpoints", "savepoints") if (flink / d).is_dir() for p in (flink / d).iterdir()
    ]
    deleted = [p for p in folders if p not in kept]
    for path in deleted:
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        for rank, point in enumerate(p for p in reversed(points) if _folder_to_delete(p) in kept):
            os.utime(point / "_metadata", (rank, rank))
    return deleted


def _restore_points(flink: Path) -> list[Path]:
    files = [*flink.glob("savepoints/*/_metadata"), *flink.glob("checkpoints/*/chk-*/_metadata")]
    return [p.parent for p in files if p.stat().st_size]


def _written_ns(point: Path) -> int:
    return (point / "_metadata").stat().st_mtime_ns


def _folder_to_delete(point: Path) -> Path:
    """A savepoint's own folder, or the folder of the job with all its checkpoints."""
    return point.parent if point.name.startswith("chk-") else point
