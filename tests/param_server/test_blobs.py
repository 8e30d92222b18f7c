"""Both blob stores keep the same promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from param_server.blobs import Blobs, MemoryBlobs, RocksBlobs
from roo.errors import CheckpointError, SetupError


@pytest.fixture(params=["memory", "rocks"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Blobs]:
    blobs: Blobs = MemoryBlobs() if request.param == "memory" else RocksBlobs(tmp_path / "segments").open()
    yield blobs
    blobs.close()


def test_gives_back_what_was_put(store: Blobs) -> None:
    big = bytes(range(256)) * 4096
    store.write([(b"a/1", b""), (b"a/2", big)], sync=True)
    assert store.get(b"a/1") == b"" and store.get(b"a/2") == big and store.get(b"a/3") is None


def test_lists_keys_of_a_prefix_in_order(store: Blobs) -> None:
    store.write([(key, b"x") for key in (b"b/2", b"a/9", b"b/1", b"b", b"c/0")])
    assert list(store.keys(b"b/")) == [b"b/1", b"b/2"]
    assert list(store.keys(b"d")) == []


def test_replaces_and_deletes_in_one_write(store: Blobs) -> None:
    store.write([(b"a", b"1"), (b"b", b"2")])
    store.write([(b"a", b"3")], [b"b", b"absent"])
    assert store.get(b"a") == b"3" and store.get(b"b") is None


def test_closing_twice_is_fine(store: Blobs) -> None:
    store.close()
    store.close()


def test_rocks_keeps_everything_over_a_restart(tmp_path: Path) -> None:
    first = RocksBlobs(tmp_path).open()
    first.write([(b"a", b"1")], sync=True)
    first.close()
    again = RocksBlobs(tmp_path).open()
    assert again.get(b"a") == b"1"
    again.close()


def test_a_second_process_is_told_in_one_sentence(tmp_path: Path) -> None:
    first = RocksBlobs(tmp_path).open()
    with pytest.raises(SetupError, match="stop the other shard that uses them"):
        RocksBlobs(tmp_path).open()
    first.close()


def test_a_place_that_is_a_file_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(SetupError, match="can't be opened"):
        RocksBlobs(tmp_path / "x").open()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = RocksBlobs(tmp_path).open()
    store.close()
    with pytest.raises(CheckpointError, match="closed"):
        store.get(b"a")
    with pytest.raises(CheckpointError, match="can't be written"):
        store.write([(b"a", b"1")])
    store.close()


def test_a_failed_write_of_memory_changes_nothing() -> None:
    store = MemoryBlobs()
    store.fail_at(2)
    store.write([(b"a", b"1")])
    with pytest.raises(CheckpointError, match="free disk space"):
        store.write([(b"a", b"2")])
    store.write([(b"b", b"3")])
    assert store.data == {b"a": b"1", b"b": b"3"}
