"""The contract of key-value stores, for both implementations, and RocksDB's behavior with full disks and
damaged files."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from param_server.key_value_store import KeyValueStore, MemoryKeyValueStore, RocksDbStore, rocks_options
from roostream.errors import CheckpointError, SetupError, UnavailableError
from tests.runtime.full_disk import limited_file_size


@pytest.fixture(params=["memory", "rocks"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeyValueStore]:
    blobs: KeyValueStore = (
        MemoryKeyValueStore() if request.param == "memory" else RocksDbStore(tmp_path / "segments").open()
    )
    yield blobs
    blobs.close()


def test_values_round_trip(store: KeyValueStore) -> None:
    big = bytes(range(256)) * 4096
    store.write([(b"a/1", b""), (b"a/2", big)], sync=True)
    assert store.get(b"a/1") == b"" and store.get(b"a/2") == big and store.get(b"a/3") is None


def test_keys_of_a_prefix_are_listed_in_order(store: KeyValueStore) -> None:
    store.write([(key, b"x") for key in (b"b/2", b"a/9", b"b/1", b"b", b"c/0")])
    assert list(store.keys(b"b/")) == [b"b/1", b"b/2"]
    assert list(store.keys(b"d")) == []


def test_one_write_replaces_and_deletes(store: KeyValueStore) -> None:
    store.write([(b"a", b"1"), (b"b", b"2")])
    store.write([(b"a", b"3")], [b"b", b"absent"])
    assert store.get(b"a") == b"3" and store.get(b"b") is None


def test_rocksdb_keeps_everything_over_a_restart(tmp_path: Path) -> None:
    first = RocksDbStore(tmp_path).open()
    first.write([(b"a", b"1")], sync=True)
    first.close()
    reopened = RocksDbStore(tmp_path).open()
    assert reopened.get(b"a") == b"1"
    reopened.close()


def test_a_store_in_use_is_refused_in_one_sentence(tmp_path: Path) -> None:
    first = RocksDbStore(tmp_path).open()
    with pytest.raises(SetupError):
        RocksDbStore(tmp_path).open()
    first.close()


def test_a_path_that_is_a_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(SetupError):
        RocksDbStore(tmp_path / "x").open()


def test_a_failed_write_to_the_memory_store_changes_nothing() -> None:
    store = MemoryKeyValueStore()
    store.fail_at(2)
    store.write([(b"a", b"1")])
    with pytest.raises(UnavailableError):
        store.write([(b"a", b"2")])
    store.write([(b"b", b"3")])
    assert store.data == {b"a": b"1", b"b": b"3"}


def test_rocksdb_continues_after_a_full_disk(tmp_path: Path) -> None:
    store = RocksDbStore(tmp_path).open()
    store.write([(b"a", b"1" * 4096)], sync=True)
    with limited_file_size(1 << 16):
        for _ in range(3):  # the second write finds a closed database
            with pytest.raises(UnavailableError):
                store.write([(b"b", bytes(1 << 20))], sync=True)
    assert store.get(b"a") == b"1" * 4096 and store.get(b"b") is None
    store.write([(b"b", b"2")], sync=True)
    store.close()
    reopened = RocksDbStore(tmp_path).open()
    assert reopened.get(b"a") == b"1" * 4096 and reopened.get(b"b") == b"2"
    reopened.close()


def test_writes_that_do_not_fit_are_refused_while_rocksdb_can_still_delete_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = 40 << 20

    def disk(_: object) -> SimpleNamespace:
        used = 0
        for path in tmp_path.iterdir():
            with contextlib.suppress(FileNotFoundError):  # RocksDB deletes files in the background
                used += path.stat().st_size
        return SimpleNamespace(f_bavail=max(capacity - used, 0), f_frsize=1)

    monkeypatch.setattr(os, "statvfs", disk)
    store = RocksDbStore(tmp_path).open()
    store.write([(b"kept", bytes(4 << 20))], sync=True)
    keys = [b"%d" % n for n in range(40)]
    for _ in range(5):
        with pytest.raises(UnavailableError, match="MiB of free space"):
            for key in keys:
                store.write([(key, bytes(4 << 20))])
        store.write((), keys)
    with pytest.raises(UnavailableError, match="MiB of free space"):
        store.check_space(capacity)
    store.close()
    store.open()
    assert store.get(b"kept") == bytes(4 << 20) and list(store.keys(b"")) == [b"kept"]
    capacity = 80 << 20
    for key in keys[:8]:  # 32 MiB
        store.write([(key, bytes(4 << 20))])
    store.close()


def test_rocksdb_is_reopened_at_each_call_until_it_succeeds(tmp_path: Path) -> None:
    store = RocksDbStore(tmp_path / "home" / "segments").open()
    store.write([(b"a", b"1")], sync=True)
    with limited_file_size(1 << 12):
        with pytest.raises(UnavailableError):
            store.write([(b"b", bytes(1 << 20))], sync=True)
        (tmp_path / "home").rename(tmp_path / "gone")
        (tmp_path / "home").write_text("a file where the mount was")
        for call in (
            lambda: store.get(b"a"),
            lambda: store.write([(b"b", b"")]),
            lambda: list(store.keys(b"a")),
        ):
            with pytest.raises(UnavailableError):
                call()
    (tmp_path / "home").unlink()
    (tmp_path / "gone").rename(tmp_path / "home")
    assert store.get(b"a") == b"1" and list(store.keys(b"a")) == [b"a"]
    store.close()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def write_store(tmp_path: Path) -> Path:
    """A closed store whose large values are in a file of their own."""
    store = RocksDbStore(tmp_path).open()
    store.write([(b"a", bytes(100_000)), (b"b", b"small")], sync=True)
    store.close()
    return tmp_path


@pytest.mark.parametrize("suffix", ["sst", "blob"])
def test_rocksdb_errors_distinguish_damage_from_outage(tmp_path: Path, suffix: str) -> None:
    (path,) = write_store(tmp_path).glob(f"*.{suffix}")
    flip(path, 40)
    store = RocksDbStore(tmp_path).open()
    with pytest.raises(CheckpointError):
        store.get(b"a")
    store.close()


def test_a_missing_rocksdb_file_is_damage_if_its_directory_exists(tmp_path: Path) -> None:
    (path,) = write_store(tmp_path).glob("*.blob")
    store = RocksDbStore(tmp_path).open()
    path.unlink()
    with pytest.raises(CheckpointError):
        store.get(b"a")
    store.close()


def test_rocksdb_syncs_only_on_request(tmp_path: Path) -> None:
    options = rocks_options()
    options.enable_statistics()
    store = RocksDbStore(tmp_path, lambda: options).open()

    def syncs() -> int:
        counts = dict(
            line.split(" COUNT : ")
            for line in str(options.get_statistics()).splitlines()
            if " COUNT : " in line
        )
        return int(counts["rocksdb.wal.synced"].split()[0])

    before = syncs()
    store.write([(b"a", b"1")])
    assert syncs() == before
    store.write([(b"b", b"2")], sync=True)
    assert syncs() == before + 1
    store.close()


def test_rocksdb_keeps_few_files_open(tmp_path: Path) -> None:
    store, value = RocksDbStore(tmp_path).open(), bytes(20_000)
    for n in range(200):
        store.write([(b"%03d" % n, value)], sync=True)
        store.database().flush(True)
    store.close()
    assert len(list(tmp_path.iterdir())) > 400
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 300, limits[1]))
    try:
        store.open()
        assert all(store.get(b"%03d" % n) == value for n in range(200))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        store.close()


def test_rocksdb_bounds_its_write_memory(tmp_path: Path) -> None:
    store = RocksDbStore(tmp_path).open()
    max_bytes = 0
    for n in range(200):
        store.write([(b"k%d" % (n % 7), bytes(100_000))], sync=True)
        max_bytes = max(
            max_bytes, int(store.database().property_int_value("rocksdb.cur-size-all-mem-tables") or 0)
        )
    assert 1 << 20 < max_bytes < 8 << 20
    store.close()
