"""Which savepoints and checkpoints of Flink a new job continues from, and which are deleted."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from roostream.runtime.flink_restore_points import delete_old_restore_points, newest_restore_point


def restore_point(flink: Path, name: str, time_s: int, complete: bool = True) -> Path:
    folder = flink / name
    folder.mkdir(parents=True)
    if complete:
        (folder / "_metadata").write_text("x")
        os.utime(folder / "_metadata", (time_s, time_s))
    return folder


def metadata(checkpoint: int) -> bytes:
    """As Flink begins a file `_metadata`: magic number, version of the format, number of the checkpoint."""
    return struct.pack(">IIq", 0x4960672D, 6, checkpoint)


def test_the_number_of_a_checkpoint_decides_within_a_job_whatever_the_clock_said(tmp_path: Path) -> None:
    """Savepoints of a job are numbered with its checkpoints."""
    job = "abcdef" + 26 * "0"
    restore_point(tmp_path, f"checkpoints/{job}/chk-9", 9009)
    newest = restore_point(tmp_path, f"checkpoints/{job}/chk-10", 6300)
    assert newest_restore_point(tmp_path) == newest
    savepoint = restore_point(tmp_path, "savepoints/savepoint-abcdef-0123456789ab", 6200)
    (savepoint / "_metadata").write_bytes(metadata(11))
    os.utime(savepoint / "_metadata", (6200, 6200))
    assert newest_restore_point(tmp_path) == savepoint
    after = restore_point(tmp_path, f"checkpoints/{job}/chk-12", 6100)
    assert newest_restore_point(tmp_path) == after
    of_other_job = restore_point(tmp_path, f"checkpoints/{32 * '1'}/chk-1", 9100)
    assert newest_restore_point(tmp_path) == of_other_job
    delete_old_restore_points(tmp_path)
    assert newest_restore_point(tmp_path) == of_other_job and after.exists() and not savepoint.exists()


def test_the_newest_complete_restore_point_is_used(tmp_path: Path) -> None:
    assert newest_restore_point(tmp_path) is None
    restore_point(tmp_path, "checkpoints/job1/chk-1", 10)
    savepoint = restore_point(tmp_path, "savepoints/savepoint-a", 30)
    restore_point(tmp_path, "checkpoints/job2/chk-9", 99, complete=False)
    assert newest_restore_point(tmp_path) == savepoint
    checkpoint = restore_point(tmp_path, "checkpoints/job2/chk-10", 40)
    assert newest_restore_point(tmp_path) == checkpoint


def test_old_restore_points_are_deleted(tmp_path: Path) -> None:
    assert delete_old_restore_points(tmp_path / "absent") == []
    old = restore_point(tmp_path, "checkpoints/job0/chk-1", 10)
    older_savepoint = restore_point(tmp_path, "savepoints/savepoint-a", 20)
    kept = [
        restore_point(tmp_path, "checkpoints/job1/chk-5", 30),
        restore_point(tmp_path, "savepoints/savepoint-b", 40),
    ]
    unfinished = restore_point(tmp_path, "savepoints/savepoint-c", 50, complete=False)
    deleted = [old.parent, older_savepoint, unfinished]
    assert set(delete_old_restore_points(tmp_path, keep=2)) == set(deleted)
    assert all(p.exists() for p in kept) and not any(p.exists() for p in deleted)


def test_a_restore_point_that_a_power_failure_emptied_is_not_used(tmp_path: Path) -> None:
    before = restore_point(tmp_path, "checkpoints/job1/chk-4", 10)
    for number in (1, 2):
        emptied = restore_point(tmp_path, f"checkpoints/job2/chk-{number}", 20)
        (emptied / "_metadata").write_bytes(b"")
    assert newest_restore_point(tmp_path) == before
    delete_old_restore_points(tmp_path, keep=2)
    assert newest_restore_point(tmp_path) == before


def test_a_job_after_the_clock_was_set_back_has_the_newest_restore_point(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        older = restore_point(tmp_path, f"checkpoints/job0/chk-{number}", 9000 + number)
    old = restore_point(tmp_path, "savepoints/savepoint-a", 9900)
    delete_old_restore_points(tmp_path)
    assert newest_restore_point(tmp_path) == old
    newest = restore_point(tmp_path, "checkpoints/job1/chk-2", 6300)
    assert newest_restore_point(tmp_path) == newest
    assert delete_old_restore_points(tmp_path) == [older.parent] and old.exists()
    assert newest_restore_point(tmp_path) == newest
