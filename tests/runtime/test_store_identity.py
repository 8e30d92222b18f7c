"""The identity of a checkpoint store, in a directory and in a bucket. A store that is not mounted is never
taken for an empty one."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roostream.errors import CheckpointError, ConfigError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import FileStore, open_store
from roostream.runtime.clock import FakeClock
from roostream.runtime.health import Health
from roostream.runtime.retention import StoreCleaner
from roostream.runtime.store_identity import (
    IDENTITY_NAME,
    IdentifiedStore,
    check_same_store,
    ensure_identity,
    find_identity,
    init_store,
    open_checkpoint_store,
    wait_for_store,
)
from roostream.schema.registry import open_registry
from tests.runtime import s3_server
from tests.runtime.manifest_cases import a_manifest
from tests.trainer.memory_store import MemoryStore


class Volume:
    """A place for a store that can be taken away: a directory to unmount, or a prefix of a bucket to
    empty."""

    def __init__(self, url: str, path: Path | None) -> None:
        self.url, self.path = url, path
        self._saved: dict[str, bytes] = {}

    def unmount(self, *, keep_mount_point: bool = True) -> None:
        if self.path:
            self.path.rename(self.path.with_name("volume"))
            if keep_mount_point:
                self.path.mkdir()
            return
        store = open_store(self.url)
        for name in self._names():
            self._saved[name] = store.get(name)
            store.delete(name)

    def mount(self) -> None:
        if self.path:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.with_name("volume").rename(self.path)
            return
        for name in self._names():
            open_store(self.url).delete(name)
        for name, data in self._saved.items():
            open_store(self.url).put(name, data)

    def is_empty(self) -> bool:
        return not any(self.path.rglob("*")) if self.path else not self._names()

    def _names(self) -> list[str]:
        store = open_store(self.url)
        folders = ("manifests", "incarnations", "dense", "schemas", "discarded")
        names = [name for folder in folders for name in store.list(folder)]
        return names if find_identity(store) is None else [*names, IDENTITY_NAME]


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    with s3_server.running():
        yield


@pytest.fixture(params=["directory", "s3"])
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Volume:
    if request.param == "directory":
        return Volume(str(tmp_path / "store"), tmp_path / "store")
    request.getfixturevalue("s3")
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[-60:].strip("-")
    return Volume(f"s3://{s3_server.BUCKET}/{name}", None)


@pytest.fixture
def store(volume: Volume) -> IdentifiedStore:
    """A store with one commit, opened by a program that has already used it."""
    init_store(volume.url)
    opened = open_checkpoint_store(volume.url)
    manifests.claim_incarnation(opened, 0)
    opened.create(manifests.manifest_name(1), a_manifest(1).encode())
    return opened


def test_the_identity_is_written_once(volume: Volume) -> None:
    first = init_store(volume.url)
    assert init_store(volume.url) == first == open_checkpoint_store(volume.url).verify()
    assert len(first) == 32


def test_a_program_waits_for_the_store_and_its_readiness_probe_says_so(volume: Volume) -> None:
    init_store(volume.url)
    volume.unmount()
    clock, store, reasons = FakeClock(), open_checkpoint_store(volume.url), []
    health = Health(60, clock)

    def mounted_at_the_third_call() -> str:
        clock.advance(10)
        reasons.append(health.unready())
        if len(reasons) == 3:
            volume.mount()
        return store.verify()

    assert wait_for_store(mounted_at_the_third_call, health=health) == store.identity
    assert reasons == ["it waits for the checkpoint store"] * 3
    assert health.unready() == "it is starting"


def test_a_wait_for_the_store_ends(volume: Volume) -> None:
    store, stop = open_checkpoint_store(volume.url), threading.Event()
    with pytest.raises(UnavailableError, match=r"has not answered for .* no object 'identity'"):
        wait_for_store(store.verify, timeout_s=0.1)
    stop.set()
    with pytest.raises(UnavailableError, match="stopped while waiting"):
        wait_for_store(store.verify, stop)


CALLS: dict[str, Callable[[IdentifiedStore], object]] = {
    "list": lambda store: store.list("manifests"),
    "get": lambda store: store.get("manifests/00000001"),
    "get_range": lambda store: store.get_range("manifests/00000001", 0, 1),
    "create": lambda store: store.create("manifests/00000002", b"x"),
    "put": lambda store: store.put("dense/1", b"x"),
    "put_stream": lambda store: store.put_stream("segments/0-1-1", [b"x"], 1),
    "delete": lambda store: store.delete("dense/1"),
    "sweep": lambda store: store.sweep(),
    "newest": manifests.newest,
    "claim": lambda store: manifests.claim_incarnation(store, 0),
    "clean": lambda store: StoreCleaner(store).clean(),
    "rollback": lambda store: manifests.discard_after(store, 1),
    "schema": lambda store: open_registry(store)(5),
}


@pytest.mark.parametrize("is_new_program", [False, True])
def test_a_store_that_is_not_mounted_is_unavailable_and_left_empty(
    volume: Volume, store: IdentifiedStore, is_new_program: bool
) -> None:
    volume.unmount()
    program = open_checkpoint_store(volume.url) if is_new_program else store
    for call in CALLS.values():
        with pytest.raises(UnavailableError, match="not mounted"):
            call(program)
    assert volume.is_empty()
    volume.mount()
    newest = manifests.newest(program)
    assert newest is not None and newest.manifest.seq == 1
    assert manifests.claim_incarnation(program, 0) == 2


def test_no_program_creates_a_store(tmp_path: Path) -> None:
    program = open_checkpoint_store(tmp_path / "missing" / "store")
    for call in CALLS.values():
        with pytest.raises(UnavailableError, match="checkpoint init"):
            call(program)
    assert not any(tmp_path.iterdir())


def test_another_store_in_the_same_place_is_unavailable(volume: Volume, store: IdentifiedStore) -> None:
    first = store.identity
    volume.unmount()
    second = init_store(volume.url)
    for call in (CALLS["list"], CALLS["create"], CALLS["delete"], CALLS["claim"]):
        with pytest.raises(UnavailableError, match=rf"{first}.*{second}"):
            call(store)
    assert manifests.numbers(open_store(volume.url)) == []
    volume.mount()
    assert manifests.numbers(store) == [1]


def test_a_volume_that_is_unmounted_during_a_write_makes_the_outcome_unknown(tmp_path: Path) -> None:
    class StoreUnmountedBeforeWrite(FileStore):
        """A store whose volume is unmounted after the identity check and before the write."""

        def create(self, name: str, data: bytes) -> bool:
            self.root.rename(tmp_path / "volume")
            self.root.mkdir()
            return super().create(name, data)

    init_store(tmp_path / "store")
    with pytest.raises(UnavailableError, match="not mounted"):
        IdentifiedStore(StoreUnmountedBeforeWrite(tmp_path / "store"), "the store").create(
            "manifests/00000001", b"x"
        )


def test_a_used_store_of_an_older_version_gets_an_identity(volume: Volume, store: IdentifiedStore) -> None:
    open_store(volume.url).delete(IDENTITY_NAME)
    program = open_checkpoint_store(volume.url)
    assert manifests.numbers(program) == [1] and program.identity == find_identity(open_store(volume.url))


def test_a_lost_identity_is_not_replaced_under_a_running_program(
    volume: Volume, store: IdentifiedStore
) -> None:
    open_store(volume.url).delete(IDENTITY_NAME)
    with pytest.raises(UnavailableError):
        manifests.claim_incarnation(store, 0)
    assert find_identity(open_store(volume.url)) is None
    assert init_store(volume.url, store.identity) == store.identity
    assert manifests.claim_incarnation(store, 0) == 2


def test_a_damaged_identity_is_neither_used_nor_replaced() -> None:
    store = MemoryStore()
    store.objects[IDENTITY_NAME] = b"{"
    with pytest.raises(UnavailableError, match="damaged"):
        ensure_identity(store, first_use=True)
    assert store.objects[IDENTITY_NAME] == b"{"


def test_an_identity_that_differs_from_the_wanted_one_is_refused(tmp_path: Path) -> None:
    found = init_store(tmp_path / "store")
    with pytest.raises(ConfigError, match=found):
        init_store(tmp_path / "store", "5" * 32)
    with pytest.raises(ConfigError, match="hexadecimal"):
        init_store(tmp_path / "other", "mine")


def test_a_program_with_another_store_than_the_controller_is_refused() -> None:
    store = MemoryStore()
    check_same_store(store, "0" * 32)
    check_same_store(store, "")
    with pytest.raises(ConfigError, match="same setting `store`"):
        check_same_store(store, "1" * 32)


def test_an_absent_object_of_a_mounted_store_is_reported_as_absent(store: IdentifiedStore) -> None:
    with pytest.raises(CheckpointError):
        store.get("dense/9")
    assert store.list("dense") == [] and open_registry(store)(5) is None
