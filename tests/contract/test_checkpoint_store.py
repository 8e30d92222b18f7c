"""The contract of every checkpoint store. Commits rest on `create`, which must be exclusive."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roostream.errors import CheckpointError
from roostream.runtime.checkpoint_store import PART_BYTES, CheckpointStore, FileStore, open_store
from roostream.runtime.checkpoint_store import STORES as SCHEMES
from tests.runtime import s3_server
from tests.trainer.memory_store import MemoryStore

STORES: dict[str, Callable[[Path], CheckpointStore]] = {
    "path": open_store,
    "file": lambda path: open_store(f"file://{path}"),
    "memory": lambda path: MemoryStore(),
    "s3": lambda path: open_store(
        f"s3://{s3_server.BUCKET}/{path.name.lower().replace('_', '-').strip('-')}"
    ),
}


def test_every_scheme_of_stores_is_tested() -> None:
    assert set(SCHEMES) <= set(STORES)


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    with s3_server.running():
        yield


@pytest.fixture(params=list(STORES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    if request.param == "s3":
        request.getfixturevalue("s3")
    return STORES[request.param](tmp_path)


def test_create_is_exclusive_and_keeps_an_existing_object(store: CheckpointStore) -> None:
    assert store.create("manifests/00000001", b"first")
    assert not store.create("manifests/00000001", b"second")
    assert store.get("manifests/00000001") == b"first"


def test_exactly_one_of_many_concurrent_creates_succeeds(store: CheckpointStore) -> None:
    if isinstance(store, MemoryStore):
        pytest.skip("the memory store is used by one thread only")
    winners: list[int] = []
    ready = threading.Barrier(8)

    def claim(n: int) -> None:
        ready.wait()
        if store.create("incarnations/00000001", b"%d" % n):
            winners.append(n)

    threads = [threading.Thread(target=claim, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1 and store.get("incarnations/00000001") == b"%d" % winners[0]


def test_put_replaces_an_existing_object(store: CheckpointStore) -> None:
    store.put("dense/1", b"a")
    store.put("dense/1", b"b")
    assert store.get("dense/1") == b"b"


@pytest.mark.parametrize("num_bytes", [0, 1000, PART_BYTES, 2 * PART_BYTES + 5])
def test_an_object_is_written_from_chunks(store: CheckpointStore, num_bytes: int) -> None:
    data = random.Random(1).randbytes(num_bytes)
    chunks = (data[at : at + 1_000_000] for at in range(0, len(data), 1_000_000))
    store.put_stream("segments/0-1-1", chunks, len(data))
    assert store.get("segments/0-1-1") == data and store.list("segments") == ["segments/0-1-1"]


@pytest.mark.parametrize("num_chunks", [1, 9])
def test_an_error_of_the_chunks_is_raised_and_nothing_is_written(
    store: CheckpointStore, num_chunks: int
) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(num_chunks):
            yield bytes(2 << 20)
        raise CheckpointError("a chunk is damaged")

    store.put("segments/0-1-1", b"before")
    with pytest.raises(CheckpointError, match="a chunk is damaged"):
        store.put_stream("segments/0-1-1", chunks(), (num_chunks + 1) << 21)
    assert store.get("segments/0-1-1") == b"before" and store.list("segments") == ["segments/0-1-1"]


def test_names_are_listed_by_prefix_in_order(store: CheckpointStore) -> None:
    for name in ("manifests/2", "manifests/1", "dense/1"):
        store.put(name, b"")
    assert store.list("manifests") == ["manifests/1", "manifests/2"]
    assert store.list("incarnations") == []


def test_a_range_of_an_object_is_read(store: CheckpointStore) -> None:
    store.put("files/1", bytes(range(100)))
    assert store.get_range("files/1", 10, 5) == bytes(range(10, 15))
    assert store.get_range("files/1", 100, 0) == b""
    with pytest.raises(CheckpointError, match="expected 20 bytes"):
        store.get_range("files/1", 90, 20)
    with pytest.raises(CheckpointError, match="files/2"):
        store.get_range("files/2", 0, 1)


def test_an_absent_object_is_an_error_to_read_but_not_to_delete(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="dense/9"):
        store.get("dense/9")
    store.delete("dense/9")
    store.put("dense/9", b"x")
    store.delete("dense/9")
    assert store.list("dense") == []


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../up", "manifests/../../up", "Manifests/1", "a//b", ".hidden"]
)
def test_names_outside_of_the_store_are_rejected(store: CheckpointStore, name: str) -> None:
    if isinstance(store, MemoryStore):
        pytest.skip("the memory store has no paths")
    for call in (lambda: store.put(name, b""), lambda: store.create(name, b""), lambda: store.get(name)):
        with pytest.raises(CheckpointError, match="expected a name"):
            call()


def test_unfinished_files_are_not_listed_and_creates_leave_none(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.create("manifests/1", b"x")
    store.create("manifests/1", b"y")
    (tmp_path / "manifests" / ".unfinished").write_bytes(b"half")
    assert store.list("manifests") == ["manifests/1"]
    assert sorted(p.name for p in (tmp_path / "manifests").iterdir()) == [".unfinished", "1"]
