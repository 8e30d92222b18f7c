"""Savepoints and checkpoints in a folder of Flink's, from which a new job can continue.

    FOLDER/savepoints/savepoint-JOB-NAME/_metadata     FOLDER/checkpoints/JOB/chk-N/_metadata

A savepoint's JOB is six characters long. Flink numbers the savepoints and checkpoints of a job together, so
within a job the number says which one is newest; between jobs the time does.

Flink writes `_metadata` last, so a point that has it is complete. Flink does not sync the file: after a power
failure it may be empty, and the point is not used.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import struct
from pathlib import Path

_CHECKPOINT, _SAVEPOINT = re.compile(r"chk-(\d+)"), re.compile(r"savepoint-([0-9a-f]{6})-")
_HEADER, _MAGIC = struct.Struct(">IIq"), 0x4960672D  # magic number, version, number of the checkpoint


def newest_restore_point(flink: Path) -> Path | None:
    """The newest complete savepoint or checkpoint below the folder `flink`; None = there is none."""
    return next(reversed(_restore_points(flink)), None)


def delete_old_restore_points(flink: Path, keep: int = 2) -> list[Path]:
    """Delete all savepoints and checkpoints but the `keep` newest restore points; returns the deleted
    folders.

    Call before a job is submitted: Flink owns the folder of a running job. The times of those that stay are
    set to 1970, in their order, so that what the job writes is newer, even if the clock was set back.
    """
    points = _restore_points(flink)[::-1]
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
    """The complete ones, oldest first."""
    files = [*flink.glob("savepoints/*/_metadata"), *flink.glob("checkpoints/*/chk-*/_metadata")]
    points = [p.parent for p in files if p.stat().st_size]
    places, job_ns = {point: _place(point) for point in points}, dict[str, int]()
    for point, (job, _) in places.items():
        job_ns[job] = max(job_ns.get(job, 0), (point / "_metadata").stat().st_mtime_ns)
    return sorted(points, key=lambda point: (job_ns[places[point][0]], *places[point]))


def _place(point: Path) -> tuple[str, int]:
    """The job of a restore point, as six characters, and its number there. A savepoint of which one of the
    two is unknown counts as a job of its own."""
    if found := _CHECKPOINT.fullmatch(point.name):
        return point.parent.name[:6], int(found[1])
    with (point / "_metadata").open("rb") as file:
        header = file.read(_HEADER.size)
    if (found := _SAVEPOINT.match(point.name)) and len(header) == _HEADER.size:
        magic, _, number = _HEADER.unpack(header)
        if magic == _MAGIC:
            return found[1], number
    return point.name, 0


def _folder_to_delete(point: Path) -> Path:
    """A savepoint's own folder, or the folder of the job with all its checkpoints."""
    return point.parent if point.name.startswith("chk-") else point
