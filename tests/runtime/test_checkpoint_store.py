"""The directory that is a checkpoint store: whole or absent, exclusive, durable."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from roo.errors import CheckpointError, ConfigError
from runtime.checkpoint_store import FileStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


@pytest.mark.parametrize("url", ["{path}", "file://{path}"])
def test_a_store_is_opened_by_its_path_or_url(tmp_path: Path, url: str) -> None:
    open_store(url.format(path=tmp_path / "store")).put("dense/1", b"x")
    assert (tmp_path / "store" / "dense" / "1").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/store", "expected a store that is a path or begins with file://, got 's3://bucket/store'"),
        ("fiel:///a", "did you mean 'file'"),
        ("file://a/b", "expected a store like file:///a/directory, got 'file://a/b'; add the third slash"),
    ],
)
def test_a_store_of_an_unknown_kind_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert said in str(caught.value)


def files(store: FileStore) -> list[str]:
    return sorted(str(p.relative_to(store.root)) for p in store.root.rglob("*") if p.is_file())


def test_gives_back_what_was_put_and_replaces_it(store: FileStore) -> None:
    store.put("dense/1-1.safetensors", b"a")
    store.put("dense/1-1.safetensors", b"b" * 100_000)
    assert store.get("dense/1-1.safetensors") == b"b" * 100_000
    assert files(store) == ["dense/1-1.safetensors"]


def test_creates_once(store: FileStore) -> None:
    assert store.create("manifests/00000001", b"first") is True
    assert store.create("manifests/00000001", b"second") is False
    assert store.get("manifests/00000001") == b"first" and files(store) == ["manifests/00000001"]


def test_of_many_that_create_one_name_exactly_one_does(store: FileStore) -> None:
    begin, won = threading.Barrier(8), []

    def create(n: int) -> None:
        begin.wait(10)
        if store.create("incarnations/00000001", bytes([n])):
            won.append(n)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(won) == 1 and store.get("incarnations/00000001") == bytes(won)


def test_what_is_absent_is_told(store: FileStore) -> None:
    with pytest.raises(CheckpointError, match="manifests/00000009 is absent"):
        store.get("manifests/00000009")


def test_lists_a_prefix_in_order_without_what_is_unfinished(store: FileStore) -> None:
    for name in ("manifests/00000002", "manifests/00000010", "dense/1"):
        store.put(name, b"")
    (store.root / "manifests" / ".unfinished").write_bytes(b"")
    assert store.list("manifests") == ["manifests/00000002", "manifests/00000010"]
    assert store.list("schemas") == []


def test_deleting_twice_is_fine(store: FileStore) -> None:
    store.put("dense/1", b"")
    store.delete("dense/1")
    store.delete("dense/1")
    assert store.list("dense") == []


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "A", "a b", ".hidden", "a/.b", "x" * 65, "a/", "a\n", "-a"]
)
def test_names_that_could_lead_elsewhere_are_refused(store: FileStore, name: str) -> None:
    for do in (store.get, store.delete, store.list, lambda n: store.put(n, b""), lambda n: store.create(n, b"")):
        with pytest.raises(CheckpointError, match="expected a name like"):
            do(name)


@contextlib.contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond `num_bytes`: writes fail in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_leaves_the_old_object_and_no_half_one(store: FileStore) -> None:
    store.put("dense/1", b"old")
    too_much = bytes(1 << 20)
    with room_for(1 << 16):
        for do in (store.put, store.create):
            with pytest.raises(OSError, match="File too large"):
                do("dense/1", too_much)
        with pytest.raises(OSError, match="File too large"):
            store.create("manifests/00000001", too_much)
    assert store.get("dense/1") == b"old" and files(store) == ["dense/1"]
