from __future__ import annotations

import os
from pathlib import Path

from infra import restore_points


def point(flink: Path, name: str, time_s: int, complete: bool = True) -> Path:
    folder = flink / name
    folder.mkdir(parents=True)
    if complete:
        (folder / "_metadata").write_text("x")
        os.utime(folder / "_metadata", (time_s, time_s))
    return folder


def test_the_newest_complete_point_wins_whatever_its_kind(tmp_path: Path) -> None:
    assert restore_points.newest(tmp_path) is None
    point(tmp_path, "checkpoints/job1/chk-1", 10)
    savepoint = point(tmp_path, "savepoints/savepoint-a", 30)
    point(tmp_path, "checkpoints/job1/chk-2", 20)
    point(tmp_path, "checkpoints/job2/chk-9", 99, complete=False)
    assert restore_points.newest(tmp_path) == savepoint
    newer = point(tmp_path, "checkpoints/job2/chk-10", 40)
    assert restore_points.newest(tmp_path) == newer


def test_cleaning_keeps_what_the_next_start_may_need(tmp_path: Path) -> None:
    old = point(tmp_path, "checkpoints/job0/chk-1", 10)
    gone = point(tmp_path, "savepoints/savepoint-a", 20)
    kept = [point(tmp_path, "checkpoints/job1/chk-5", 30), point(tmp_path, "savepoints/savepoint-b", 40)]
    unfinished = point(tmp_path, "savepoints/savepoint-c", 50, complete=False)
    assert set(restore_points.clean(tmp_path, keep=2)) == {old.parent, gone, unfinished}
    assert all(p.exists() for p in kept)
    assert not old.exists()
    assert not gone.exists()


def test_cleaning_an_empty_folder_is_nothing(tmp_path: Path) -> None:
    assert restore_points.clean(tmp_path / "absent") == []
