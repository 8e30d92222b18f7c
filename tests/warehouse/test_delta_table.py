"""The table's log commits files and progress together. Of several programs that compete, one commits."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from roostream.errors import CheckpointError, ConfigError, FencedError, UnavailableError
from roostream.runtime.checkpoint_store import open_store
from roostream.warehouse.data_file import DataFile, new_path
from roostream.warehouse.delta_table import MissingFilesError, ProgressStep, WarehouseTable
from roostream.warehouse.version_pins import VersionPin, pin_version, pinned_versions
from roostream.wire.columnar import REQUEST, ColumnType
from tests.runtime import s3_server
from tests.warehouse.memory_table import data_file

DAY = date(2023, 5, 18)


def make_file(
    first: int, last: int, partition: int = 0, *, sealed: bool = False, topic: str = ""
) -> DataFile:
    path = new_path(DAY, partition, (1 << 64) - 5, 7, topic=topic, sealed=sealed)
    return data_file(path, DAY, partition, last - first + 1, 7, first, sealed=sealed, topic=topic)


def write_file(location: str | Path, first: int, last: int, partition: int = 0, **kind: Any) -> DataFile:
    """Write a file to the store without committing it."""
    file = make_file(first, last, partition, **kind)
    open_store(location).put(f"samples/{file.path}", b"x" * file.bytes)
    return file


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    with s3_server.running():
        yield


@pytest.fixture(params=["directory", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path)
    request.getfixturevalue("s3")
    return f"s3://{s3_server.BUCKET}/{tmp_path.name.lower().replace('_', '-').strip('-')}"


def open_table(location: str | Path) -> WarehouseTable:
    table = WarehouseTable(location, "samples")
    table.create()
    return table


def test_a_table_is_created_once_and_is_empty(location: str) -> None:
    table = WarehouseTable(location, "samples")
    assert not table.exists()
    with pytest.raises(CheckpointError):
        table.snapshot()
    table.create()
    open_table(location)
    assert (
        table.exists() and table.snapshot().files == () and table.snapshot().progress("samples/t/0") is None
    )


def test_committed_files_and_progress_are_read_back(location: str) -> None:
    table = open_table(location)
    file = write_file(location, 0, 9)
    sealed = write_file(location, 10, 12, 3, sealed=True, topic="q1_-Z" * 4)
    table.commit(
        [file, sealed],
        progress={"samples/t/0": ProgressStep(None, 10), "samples/t/3": ProgressStep(None, 13)},
    )
    after = table.snapshot()
    assert set(after.files) == {file, sealed}
    assert after.files == WarehouseTable(location, "samples").snapshot().files
    assert (after.progress("samples/t/0"), after.progress("samples/t/3"), after.progress("samples/t/1")) == (
        10,
        13,
        None,
    )
    older = table.snapshot(0)
    assert (older.files, older.progress("samples/t/0")) == ((), None)


def test_a_second_commit_of_a_partition_is_rejected_and_another_partition_succeeds(location: str) -> None:
    one, other = open_table(location), open_table(location)
    one.commit([write_file(location, 0, 9)], progress={"samples/t/0": ProgressStep(None, 10)})
    with pytest.raises(FencedError, match="10"):
        other.commit([write_file(location, 0, 9)], progress={"samples/t/0": ProgressStep(None, 10)})
    other.commit([write_file(location, 0, 4, 1)], progress={"samples/t/1": ProgressStep(None, 5)})
    with pytest.raises(FencedError):
        one.commit(
            [write_file(location, 0, 4, 1), write_file(location, 10, 11)],
            progress={"samples/t/1": ProgressStep(None, 5), "samples/t/0": ProgressStep(10, 12)},
        )
    assert sorted(f.partition for f in one.snapshot().files) == [0, 1]


def test_a_commit_whose_answer_was_lost_is_not_repeated(tmp_path: Path) -> None:
    table, file = open_table(tmp_path), write_file(tmp_path, 0, 9)
    table.commit([file], progress={"samples/t/0": ProgressStep(None, 10)})
    first = table.snapshot()
    table.commit([file], progress={"samples/t/0": ProgressStep(None, 10)})
    after_retry = table.snapshot()
    assert after_retry.version == first.version and after_retry.files == (file,)


def test_what_a_commit_writes_to_the_log_is_synced(tmp_path: Path) -> None:
    """After a power failure, an entry that was not synced may be empty: its files and progress are gone. With
    an empty checkpoint the table cannot be read."""
    synced: list[str] = []

    def fsync(handle: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path))

    table, log = WarehouseTable(tmp_path, "samples", fsync=fsync), tmp_path / "samples" / "_delta_log"
    table.create()
    assert {".", "samples", "samples/_delta_log"} <= {*synced}, "each folder is an entry of its parent"
    table.widen({"ro__a": REQUEST["sample_id"]})
    for number in range(20):
        table.commit((), progress={"samples/t/0": ProgressStep(number or None, number + 1)})
        assert synced[-1] == "samples/_delta_log", "the folder is synced after its files"
    written = {path.name for path in log.iterdir() if path.suffix in (".json", ".parquet")}
    assert {f"{19:020d}.checkpoint.parquet", f"{21:020d}.json"} <= written
    assert written <= {os.path.basename(path) for path in synced}


def test_of_two_replacements_of_the_same_files_one_is_committed(location: str) -> None:
    table, rival = open_table(location), open_table(location)
    small = [write_file(location, 0, 4), write_file(location, 5, 9)]
    table.commit(small, progress={"samples/t/0": ProgressStep(None, 10)})
    whole, other = write_file(location, 0, 9, sealed=True), write_file(location, 0, 9, sealed=True)
    table.commit([whole], small, {"compact/2023-05-18/0": ProgressStep(None, 1)})
    for step in (ProgressStep(None, 1), ProgressStep(1, 2)):
        with pytest.raises(FencedError):
            rival.commit([other], small, {"compact/2023-05-18/0": step})
    assert table.snapshot().files == (whole,)


def test_a_replacement_is_committed_after_a_concurrent_append(tmp_path: Path) -> None:
    table, archiver = open_table(tmp_path), open_table(tmp_path)
    small = write_file(tmp_path, 0, 4)
    table.commit([small], progress={"samples/t/0": ProgressStep(None, 5)})
    archiver.commit([late := write_file(tmp_path, 5, 9)], progress={"samples/t/0": ProgressStep(5, 10)})
    table.commit(
        [whole := write_file(tmp_path, 0, 4, sealed=True)],
        [small],
        {"compact/2023-05-18/0": ProgressStep(None, 1)},
    )
    assert set(table.snapshot().files) == {whole, late}


def test_new_columns_are_added_once(tmp_path: Path) -> None:
    table, stale = open_table(tmp_path), open_table(tmp_path)
    column_types = {
        "ro__age": ColumnType("request", "float", "f4"),
        "nro__topics": ColumnType("candidate", "id", "i8", is_list=True),
    }
    assert table.widen(column_types) == []
    version = table.snapshot().version
    table.widen(column_types)
    assert stale.widen(column_types) == []
    assert table.snapshot().version == version, "existing columns must not be committed again"
    table.commit([write_file(tmp_path, 0, 9)], progress={"samples/t/0": ProgressStep(None, 10)})
    assert table.widen({"ro__age": ColumnType("request", "id", "i8", is_list=True)}) == ["ro__age"]
    names = json.loads((tmp_path / "samples/_delta_log" / f"{version:020}.json").read_text().split("\n")[1])
    assert "nro__topics" in json.dumps(names)


def test_progress_survives_many_commits_and_log_checkpoints(tmp_path: Path) -> None:
    table = open_table(tmp_path)
    table.commit([], progress={"samples/t/1": ProgressStep(None, 77)})
    for n in range(45):
        table.commit([], progress={"samples/t/0": ProgressStep(n or None, n + 1)})
    assert list((tmp_path / "samples/_delta_log").glob("*.checkpoint.parquet"))
    found = WarehouseTable(tmp_path, "samples").snapshot()
    assert (found.progress("samples/t/0"), found.progress("samples/t/1")) == (45, 77)


def test_the_vacuum_deletes_replaced_files_but_not_pinned_ones(tmp_path: Path) -> None:
    table, store = open_table(tmp_path), open_store(tmp_path)
    small, replaced = write_file(tmp_path, 0, 4), write_file(tmp_path, 5, 9)
    table.commit([small, replaced], progress={"samples/t/0": ProgressStep(None, 10)})
    read, whole = table.snapshot(), write_file(tmp_path, 0, 9, sealed=True)
    table.commit([whole], [small, replaced], {"compact/2023-05-18/0": ProgressStep(None, 1)})
    pin_version(store, "session-1", VersionPin("samples", read.version, until_ms=2_000))

    def existing_paths() -> set[str]:
        return {f.path for f in (small, replaced, whole) if (tmp_path / "samples" / f.path).exists()}

    table.vacuum(0, pinned_versions(store, "samples", now_ms=1_000))
    assert existing_paths() == {small.path, replaced.path, whole.path}
    assert pinned_versions(store, "corrections", now_ms=1_000) == set()
    assert table.vacuum(1) == [] and len(table.vacuum(0, dry_run=True)) == 2
    version = table.snapshot().version
    table.vacuum(0, pinned_versions(store, "samples", now_ms=2_000))
    assert existing_paths() == {whole.path} and store.list("pins") == []
    assert table.snapshot().version == version, "a vacuum must not write to the log"


def test_a_replaced_file_is_kept_for_longer_than_the_log_remembers_removals_by_itself(
    tmp_path: Path,
) -> None:
    table, old = open_table(tmp_path), write_file(tmp_path, 0, 4)
    os.utime(tmp_path / "samples" / old.path, (0, 0))
    table.commit([old], progress={"samples/t/0": ProgressStep(None, 5)})
    assert table.vacuum(720) == []
    table.commit([write_file(tmp_path, 0, 4)], [old], {"compact/2023-05-18/0": ProgressStep(None, 1)})
    log = tmp_path / f"samples/_delta_log/{table.snapshot().version:020}.json"
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    (removal,) = [entry["remove"] for entry in entries if "remove" in entry]
    removal["deletionTimestamp"] -= 10 * 86_400_000  # it was ten days ago
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    for n in range(25):  # more than an interval between two checkpoints of the log
        table.commit([], progress={"samples/t/1": ProgressStep(n or None, n + 1)})
    assert table.vacuum(720) == []
    assert table.vacuum(200) == [old.path]


def test_the_vacuum_keeps_files_that_wait_for_their_commit_and_foreign_files(tmp_path: Path) -> None:
    table = open_table(tmp_path)
    waiting, orphan = write_file(tmp_path, 0, 4), write_file(tmp_path, 5, 9)
    notes = tmp_path / "samples" / "NOTES.txt"
    notes.write_text("mine")
    day_ago_s = time.time() - 86_400
    os.utime(tmp_path / "samples" / waiting.path, (day_ago_s, day_ago_s))
    for path in (tmp_path / "samples" / orphan.path, notes):
        os.utime(path, (0, 0))
    assert table.vacuum(0) == [orphan.path]
    table.commit([waiting], progress={"samples/t/0": ProgressStep(None, 5)})
    assert notes.exists() and table.snapshot().files == (waiting,)


def test_a_commit_of_a_missing_file_is_refused_and_changes_nothing(location: str) -> None:
    table, file, missing_file = open_table(location), write_file(location, 0, 9), write_file(location, 10, 19)
    step = {"samples/t/0": ProgressStep(None, 20)}
    open_store(location).delete(f"samples/{missing_file.path}")
    version = table.snapshot().version
    with pytest.raises(MissingFilesError, match=missing_file.path):
        table.commit([file, missing_file], progress=step)
    assert table.snapshot().version == version
    table.commit([file], progress=step)


@pytest.mark.parametrize("version", [99, -3, 10**30])
def test_a_pin_of_a_version_that_does_not_exist_does_not_stop_the_vacuum(
    tmp_path: Path, version: int
) -> None:
    table, store = open_table(tmp_path), open_store(tmp_path)
    pin_version(store, "a", VersionPin("samples", version, 5_000))
    orphan = write_file(tmp_path, 0, 4)
    os.utime(tmp_path / "samples" / orphan.path, (0, 0))
    assert table.vacuum(1, pinned_versions(store, "samples", 1_000)) == [orphan.path]


def table_with_checkpoints(location: Path) -> WarehouseTable:
    """A table with an orphan, and checkpoints of its log at versions 19 and 39."""
    table = open_table(location)
    os.utime(location / "samples" / write_file(location, 0, 4).path, (0, 0))
    for n in range(45):
        table.commit([], progress={"samples/t/0": ProgressStep(n or None, n + 1)})
    return table


def test_a_pin_of_a_version_that_the_log_has_deleted_does_not_stop_the_vacuum(tmp_path: Path) -> None:
    table = table_with_checkpoints(tmp_path)
    for number in range(19):
        (tmp_path / f"samples/_delta_log/{number:020}.json").unlink()
    with pytest.raises(CheckpointError, match="version 5"):
        table.snapshot(5)
    assert len(table.vacuum(1, {5, 25})) == 1


@pytest.mark.parametrize("name", ["25.json", "19.checkpoint.parquet"])
def test_a_vacuum_deletes_nothing_while_a_pinned_version_cannot_be_read(tmp_path: Path, name: str) -> None:
    table = table_with_checkpoints(tmp_path)
    number, dot, suffix = name.partition(".")
    file = tmp_path / f"samples/_delta_log/{int(number):020}{dot}{suffix}"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        table.vacuum(1, {27})
    file.write_bytes(whole)
    assert len(table.vacuum(1, {27})) == 1


def test_a_deleted_or_unreadable_pin_has_no_effect(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    pin_version(store, "a", VersionPin("samples", 3, 5_000))
    pin_version(store, "b", VersionPin("samples", 4, 5_000))
    store.put("pins/samples.c", b"no pin")
    store.put("pins/samples.d", b'{"table": "samples", "version": 3, "until_ms": 1e400}')
    store.put("pins/samples.e", b'{"table": "samples", "version": 1e400, "until_ms": 9000}')
    store.delete("pins/samples.a")
    assert pinned_versions(store, "samples", 1_000) == {4}


def test_a_damaged_log_or_missing_version_is_reported_as_damage(tmp_path: Path) -> None:
    table = open_table(tmp_path)
    table.commit([write_file(tmp_path, 0, 9)], progress={"samples/t/0": ProgressStep(None, 10)})
    log = tmp_path / "samples/_delta_log/00000000000000000001.json"
    good = log.read_text()
    log.write_text(good[:-30])
    with pytest.raises(CheckpointError):
        table.snapshot()
    log.write_text(good)
    with pytest.raises(CheckpointError):
        table.snapshot(99)


def test_a_file_that_another_program_added_is_named(tmp_path: Path) -> None:
    table, foreign = open_table(tmp_path), "day=2023-05-18/part-0.parquet"
    table.commit([write_file(tmp_path, 0, 9)], progress={"samples/t/0": ProgressStep(None, 10)})
    log = tmp_path / "samples/_delta_log"
    entries = [json.loads(line) for line in (log / f"{1:020}.json").read_text().splitlines()]
    (entry,) = [entry for entry in entries if "add" in entry]
    entry["add"]["path"] = foreign
    (log / f"{2:020}.json").write_text(json.dumps(entry) + "\n")
    with pytest.raises(CheckpointError, match=foreign):
        _ = table.snapshot().files
    assert table.snapshot().progress("samples/t/0") == 10


@pytest.mark.parametrize("missing", [1, 3, 5, "first", "checkpoint"])
def test_a_log_with_missing_files_is_reported_as_damage(tmp_path: Path, missing: int | str) -> None:
    table, log = open_table(tmp_path), tmp_path / "samples/_delta_log"
    for n in range(25 if missing == "checkpoint" else 6):
        table.commit([], progress={"samples/t/0": ProgressStep(n or None, n + 1)})
    if missing == "checkpoint":
        missing_paths = [*log.glob("*.checkpoint.parquet"), *(log / f"{n:020}.json" for n in range(15))]
    else:
        missing_paths = [log / f"{0 if missing == 'first' else missing:020}.json"]
    for path in missing_paths:
        path.unlink()
    with pytest.raises(CheckpointError, match="restore"):
        table.snapshot()
    with pytest.raises(CheckpointError, match="restore"):
        table.commit([], progress={"samples/t/1": ProgressStep(None, 1)})


def test_a_store_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    table = WarehouseTable("s3://bucket/warehouse", "samples")
    with pytest.raises(UnavailableError):
        table.snapshot()


def test_another_kind_of_location_is_rejected() -> None:
    with pytest.raises(ConfigError):
        WarehouseTable("hdfs://x", "samples")
