"""A shard's home follows one checkpoint store: nothing in it is replaced or deleted for another one."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from param_server.key_value_store import MemoryKeyValueStore
from param_server.segments import STORE_KEY
from param_server.server import Shard
from roostream.errors import ConfigError, RoostreamError, UnavailableError
from roostream.runtime.store_identity import IDENTITY_NAME
from tests.param_server.shard_support import ITEM, commit, make_shard, state_of
from tests.param_server.shard_support import push_to as push
from tests.trainer.memory_store import MemoryStore

FIRST, OTHER = "a" * 32, "b" * 32


def a_store(identity: str) -> MemoryStore:
    store = MemoryStore()
    store.objects[IDENTITY_NAME] = json.dumps({"store": identity}).encode()
    return store


class Committed:
    """A shard with two commits in a store, and its home."""

    def __init__(self) -> None:
        self.home, self.store = MemoryKeyValueStore(), a_store(FIRST)
        shard = self.restored(self.store, 1, "", FIRST)
        push(shard, 1, ITEM, (1, 2))
        commit(shard, self.store, 1)
        push(shard, 2, ITEM, (2, 3))
        self.name = commit(shard, self.store, 2)
        self.rows = state_of(shard)
        self.before = self.content()

    def content(self) -> dict[bytes, bytes]:
        return {key: self.home.get(key) or b"" for key in self.home.keys(b"")}

    def restored(self, store: MemoryStore, incarnation: int, name: str, store_id: str) -> Shard:
        """A process of the shard at its start, restored as a controller asks for it."""
        shard = make_shard(self.home, store)
        command = {"kind": "restore", "incarnation": incarnation, "manifest": name, "store": store_id}
        shard.execute(command)
        return shard

    def assert_unchanged(self) -> None:
        """The home has every byte that it had, and the first store's commit can be restored."""
        assert self.content() == self.before
        assert state_of(self.restored(self.store, 9, self.name, FIRST)) == self.rows


@pytest.fixture
def shard() -> Committed:
    return Committed()


def test_a_shard_with_commits_does_not_begin_anew_for_an_empty_store(shard: Committed) -> None:
    with pytest.raises(ConfigError, match=rf"{FIRST}.*{OTHER}"):
        shard.restored(a_store(OTHER), 1, "", OTHER)
    shard.assert_unchanged()


def test_a_shard_does_not_begin_anew_for_its_own_store_without_manifests(shard: Committed) -> None:
    with pytest.raises(ConfigError, match="up to commit 2"):
        shard.restored(a_store(FIRST), 7, "", FIRST)
    shard.assert_unchanged()


def test_a_shard_refuses_the_manifests_of_another_store(shard: Committed) -> None:
    other = a_store(OTHER)
    other.objects |= {name: data for name, data in shard.store.objects.items() if "manifests" in name}
    with pytest.raises(ConfigError, match=rf"{FIRST}.*{OTHER}"):
        shard.restored(other, 7, shard.name, OTHER)
    shard.assert_unchanged()


def test_a_shard_refuses_an_older_copy_of_its_store_until_it_is_accepted(shard: Committed) -> None:
    older = a_store(FIRST)
    older.objects |= {name: data for name, data in shard.store.objects.items() if name.endswith("1")}
    with pytest.raises(ConfigError, match="--incarnation 1"):
        shard.restored(older, 1, "manifests/00000001", FIRST)
    shard.assert_unchanged()
    assert shard.restored(older, 2, "manifests/00000001", FIRST).committed.seq == 1


@pytest.mark.parametrize("stated", [FIRST, OTHER])
def test_a_shard_and_its_controller_must_see_the_same_store(shard: Committed, stated: str) -> None:
    store = a_store(OTHER if stated == FIRST else FIRST)
    with pytest.raises(ConfigError):
        shard.restored(store, 7, "", stated)
    shard.assert_unchanged()


def test_a_store_that_is_not_mounted_at_the_shard_is_waited_for(shard: Committed) -> None:
    mount_point = MemoryStore()
    mount_point.objects.clear()
    with pytest.raises(UnavailableError):
        shard.restored(mount_point, 7, shard.name, FIRST)
    shard.assert_unchanged()


def test_the_store_is_remembered_before_a_first_commit_that_the_shard_does_not_learn_of() -> None:
    home, store = MemoryKeyValueStore(), a_store(FIRST)
    killed = make_shard(home, store)
    killed.restore(1, "", FIRST)
    push(killed, 1, ITEM, (1, 2))
    killed.freeze(1, 0)
    killed.write(1)
    before = {key: home.get(key) for key in home.keys(b"")}
    with pytest.raises(ConfigError):
        make_shard(home, a_store(OTHER)).restore(1, "", OTHER)
    assert {key: home.get(key) for key in home.keys(b"")} == before


def without_identity(shard: Committed) -> None:
    """As an older version of Roostream left the home."""
    shard.home.write((), [STORE_KEY])
    shard.before = shard.content()


def test_a_home_of_an_older_version_joins_the_store_that_names_its_segments(shard: Committed) -> None:
    without_identity(shard)
    again = shard.restored(shard.store, 2, shard.name, FIRST)
    assert state_of(again) == shard.rows
    push(again, 1, ITEM, (4,))
    commit(again, shard.store, 3)
    with pytest.raises(ConfigError):
        shard.restored(a_store(OTHER), 9, "", OTHER)


REFUSED: dict[str, Callable[[], tuple[MemoryStore, str]]] = {
    "an empty store": lambda: (a_store(OTHER), ""),
    "the store of another shard": lambda: _of_another_shard(),
}


def _of_another_shard() -> tuple[MemoryStore, str]:
    home, store = MemoryKeyValueStore(), a_store(OTHER)
    other = make_shard(home, store)
    other.restore(8, "")
    return store, commit(other, store, 1)


@pytest.mark.parametrize("which", list(REFUSED))
def test_a_home_of_an_older_version_refuses_a_store_that_does_not_name_its_segments(
    shard: Committed, which: str
) -> None:
    without_identity(shard)
    store, name = REFUSED[which]()
    with pytest.raises(RoostreamError, match="up to commit 2"):
        shard.restored(store, 9, name, OTHER)
    shard.assert_unchanged()


def test_an_empty_home_is_waited_for_and_no_older_commit_is_tried(shard: Committed) -> None:
    """As the controller takes it: `damaged` would make it go back to an older commit of all shards."""
    elsewhere = make_shard(MemoryKeyValueStore(), shard.store)
    with pytest.raises(UnavailableError, match="mount its volume"):
        elsewhere.restore(7, shard.name, FIRST)
