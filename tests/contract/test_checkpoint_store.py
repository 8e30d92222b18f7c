"""What every checkpoint store promises; `create` is the commit of everything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roostream.errors import CheckpointError
from roostream.runtime.checkpoint_store import STORES as SCHEMES
from roostream.runtime.checkpoint_store import CheckpointStore, FileStore, open_store
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


def test_every_kind_of_store_that_can_be_opened_is_held_to_the_contract() -> None:
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


def test_create_is_exclusive_and_changes_nothing_where_the_name_exists(store: CheckpointStore) -> None:
    assert store.create("manifests/00000001", b"first")
    assert not store.create("manifests/00000001", b"second")
    assert store.get("manifests/00000001") == b"first"


def test_of_many_that_create_one_name_exactly_one_wins(store: CheckpointStore) -> None:
    if isinstance(store, MemoryStore):
        pytest.skip("it stands in for a store within one thread")
    won: list[int] = []
    ready = threading.Barrier(8)

    def claim(n: int) -> None:
        ready.wait()
        if store.create("incarnations/00000001", b"%d" % n):
            won.append(n)

    threads = [threading.Thread(target=claim, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and store.get("incarnations/00000001") == b"%d" % won[0]


def test_put_replaces(store: CheckpointStore) -> None:
    store.put("dense/1", b"a")
    store.put("dense/1", b"b")
    assert store.get("dense/1") == b"b"


def test_names_are_listed_below_their_prefix_sorted(store: CheckpointStore) -> None:
    for name in ("manifests/2", "manifests/1", "dense/1"):
        store.put(name, b"")
    assert store.list("manifests") == ["manifests/1", "manifests/2"]
    assert store.list("incarnations") == []


def test_a_part_of_an_object_is_read_alone(store: CheckpointStore) -> None:
    store.put("files/1", bytes(range(100)))
    assert store.get_range("files/1", 10, 5) == bytes(range(10, 15))
    assert store.get_range("files/1", 100, 0) == b""
    with pytest.raises(CheckpointError, match="expected 20 bytes from 90 on, got 10"):
        store.get_range("files/1", 90, 20)
    with pytest.raises(CheckpointError, match="files/2"):
        store.get_range("files/2", 0, 1)


def test_what_is_absent_is_told_and_deleting_it_is_nothing(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="dense/9 is absent"):
        store.get("dense/9")
    store.delete("dense/9")
    store.put("dense/9", b"x")
    store.delete("dense/9")
    assert store.list("dense") == []


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../up", "manifests/../../up", "Manifests/1", "a//b", ".hidden"]
)
def test_names_that_could_leave_the_store_are_refused(store: CheckpointStore, name: str) -> None:
    if isinstance(store, MemoryStore):
        pytest.skip("it has nowhere to leave to")
    for call in (lambda: store.put(name, b""), lambda: store.create(name, b""), lambda: store.get(name)):
        with pytest.raises(CheckpointError, match="expected a name like"):
            call()


def test_unfinished_files_are_never_listed_and_nothing_is_left_behind(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.create("manifests/1", b"x")
    store.create("manifests/1", b"y")
    (tmp_path / "manifests" / ".unfinished").write_bytes(b"half")
    assert store.list("manifests") == ["manifests/1"]
    assert sorted(p.name for p in (tmp_path / "manifests").iterdir()) == [".unfinished", "1"]
