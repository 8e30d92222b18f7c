"""A shard's home belongs to one checkpoint store. Nothing in it is replaced or deleted for another store."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from param_server.key_value_store import MemoryKeyValueStore
from param_server.segments import STORE_KEY
from param_server.server import Shard
from roostream.errors import CheckpointError, ConfigError, RoostreamError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.store_identity import IDENTITY_NAME
from tests.param_server.shard_support import ITEM, commit, link_manifest, make_shard, state_of
from tests.param_server.shard_support import push_to as push
from tests.trainer.memory_store import MemoryStore

FIRST, OTHER = "a" * 32, "b" * 32


def store_with_identity(identity: str) -> MemoryStore:
    store = MemoryStore()
    store.objects[IDENTITY_NAME] = json.dumps({"store": identity}).encode()
    return store


class CommittedShard:
    """A shard's home, its store, and two commits."""

    def __init__(self) -> None:
        self.home, self.store = MemoryKeyValueStore(), store_with_identity(FIRST)
        shard = self.restore(self.store, 1, "", FIRST)
        push(shard, 1, ITEM, (1, 2))
        commit(shard, self.store, 1)
        push(shard, 2, ITEM, (2, 3))
        self.name = commit(shard, self.store, 2)
        self.rows = state_of(shard)
        self.before = self.content()

    def content(self) -> dict[bytes, bytes]:
        return {key: self.home.get(key) or b"" for key in self.home.keys(b"")}

    def restore(self, store: MemoryStore, incarnation: int, name: str, store_id: str) -> Shard:
        """Start a process of the shard and restore it as a controller does."""
        shard = make_shard(self.home, store)
        command = {"kind": "restore", "incarnation": incarnation, "manifest": name, "store": store_id}
        shard.execute(command)
        return shard

    def assert_unchanged(self) -> None:
        """Check that the home has not changed and that the first store's commit can still be restored."""
        assert self.content() == self.before
        assert state_of(self.restore(self.store, 9, self.name, FIRST)) == self.rows


@pytest.fixture
def shard() -> CommittedShard:
    return CommittedShard()


def test_a_shard_with_commits_does_not_start_anew_for_an_empty_store(shard: CommittedShard) -> None:
    with pytest.raises(ConfigError, match=rf"{FIRST}.*{OTHER}"):
        shard.restore(store_with_identity(OTHER), 1, "", OTHER)
    shard.assert_unchanged()


def test_a_shard_does_not_start_anew_for_its_own_store_without_manifests(shard: CommittedShard) -> None:
    with pytest.raises(ConfigError, match="up to commit 2"):
        shard.restore(store_with_identity(FIRST), 7, "", FIRST)
    shard.assert_unchanged()


def test_a_shard_refuses_the_manifests_of_another_store(shard: CommittedShard) -> None:
    other = store_with_identity(OTHER)
    other.objects |= {name: data for name, data in shard.store.objects.items() if "manifests" in name}
    with pytest.raises(ConfigError, match=rf"{FIRST}.*{OTHER}"):
        shard.restore(other, 7, shard.name, OTHER)
    shard.assert_unchanged()


@pytest.mark.parametrize("incarnation", [1, 2])
def test_a_shard_refuses_an_older_copy_of_its_store_until_it_is_accepted(
    shard: CommittedShard, incarnation: int
) -> None:
    """The copy may already have been used by a controller: then its incarnation is above the shard's."""
    older = store_with_identity(FIRST)
    older.objects |= {name: data for name, data in shard.store.objects.items() if name.endswith("1")}
    with pytest.raises(ConfigError, match="rollback 1 --incarnation 1"):
        shard.restore(older, incarnation, "manifests/00000001", FIRST)
    shard.assert_unchanged()
    manifests.discard_after(older, 1, above=1)
    assert shard.restore(older, 3, "manifests/00000001", FIRST).committed.seq == 1


def test_a_manifest_that_a_shard_does_not_see_is_not_damaged(shard: CommittedShard) -> None:
    """The controller has seen it. For a damaged one, all members would go back to the commit before it."""
    del shard.store.objects[shard.name]
    with pytest.raises(UnavailableError, match="which the controller has found"):
        shard.restore(shard.store, 2, shard.name, FIRST)
    shard.store.objects[shard.name] = b"damaged"
    with pytest.raises(CheckpointError):
        shard.restore(shard.store, 3, shard.name, FIRST)


def test_a_shard_goes_back_behind_a_damaged_manifest(shard: CommittedShard) -> None:
    shard.store.damage(shard.name)
    assert shard.restore(shard.store, 2, "manifests/00000001", FIRST).committed.seq == 1


@pytest.mark.parametrize("controllers_store", [FIRST, OTHER])
def test_a_shard_and_its_controller_must_see_the_same_store(
    shard: CommittedShard, controllers_store: str
) -> None:
    store = store_with_identity(OTHER if controllers_store == FIRST else FIRST)
    with pytest.raises(ConfigError):
        shard.restore(store, 7, "", controllers_store)
    shard.assert_unchanged()


def test_a_store_that_is_not_mounted_at_the_shard_is_unavailable(shard: CommittedShard) -> None:
    mount_point = MemoryStore()
    mount_point.objects.clear()
    with pytest.raises(UnavailableError):
        shard.restore(mount_point, 7, shard.name, FIRST)
    shard.assert_unchanged()


def test_the_store_is_recorded_before_the_first_commit() -> None:
    home, store = MemoryKeyValueStore(), store_with_identity(FIRST)
    killed = make_shard(home, store)
    killed.restore(1, "", FIRST)
    push(killed, 1, ITEM, (1, 2))
    killed.freeze(1, 0)
    killed.write(1)
    before = {key: home.get(key) for key in home.keys(b"")}
    with pytest.raises(ConfigError):
        make_shard(home, store_with_identity(OTHER)).restore(1, "", OTHER)
    assert {key: home.get(key) for key in home.keys(b"")} == before


def test_rows_of_a_commit_that_the_shard_did_not_learn_of_survive_a_store_that_lost_its_manifests() -> None:
    """The process was killed between the creation of the manifest and COMMIT, and the manifests were away
    when it came back. Another shard, which knows of the commit, puts training on hold until they are back."""
    home, store = MemoryKeyValueStore(), store_with_identity(FIRST)
    killed = make_shard(home, store)
    killed.restore(1, "", FIRST)
    push(killed, 1, ITEM, (1, 2))
    rows = state_of(killed)
    killed.freeze(1, 0)
    name = link_manifest(store, 1, 1, [killed.write(1)])
    manifest = store.objects.pop(name)
    make_shard(home, store).restore(2, "", FIRST)
    store.objects[name] = manifest
    repaired = make_shard(home, store)
    repaired.restore(3, name, FIRST)
    assert state_of(repaired) == rows


def without_identity(shard: CommittedShard) -> None:
    """Leave the home as an older version of Roostream did."""
    shard.home.write((), [STORE_KEY])
    shard.before = shard.content()


def test_a_home_of_an_older_version_joins_the_store_that_names_its_segments(shard: CommittedShard) -> None:
    without_identity(shard)
    restarted = shard.restore(shard.store, 2, shard.name, FIRST)
    assert state_of(restarted) == shard.rows
    push(restarted, 1, ITEM, (4,))
    commit(restarted, shard.store, 3)
    with pytest.raises(ConfigError):
        shard.restore(store_with_identity(OTHER), 9, "", OTHER)


REFUSED_STORES: dict[str, Callable[[], tuple[MemoryStore, str]]] = {
    "an empty store": lambda: (store_with_identity(OTHER), ""),
    "the store of another shard": lambda: _of_another_shard(),
}


def _of_another_shard() -> tuple[MemoryStore, str]:
    home, store = MemoryKeyValueStore(), store_with_identity(OTHER)
    other = make_shard(home, store)
    other.restore(8, "")
    return store, commit(other, store, 1)


@pytest.mark.parametrize("refused_store", list(REFUSED_STORES))
def test_a_home_of_an_older_version_refuses_a_store_that_does_not_name_its_segments(
    shard: CommittedShard, refused_store: str
) -> None:
    without_identity(shard)
    store, name = REFUSED_STORES[refused_store]()
    with pytest.raises(RoostreamError, match="up to commit 2"):
        shard.restore(store, 9, name, OTHER)
    shard.assert_unchanged()


def test_an_empty_home_is_unavailable_and_no_older_commit_is_tried(shard: CommittedShard) -> None:
    """Reporting damage instead would make the controller roll all shards back to an older commit."""
    elsewhere = make_shard(MemoryKeyValueStore(), shard.store)
    with pytest.raises(UnavailableError, match="mount its volume"):
        elsewhere.restore(7, shard.name, FIRST)
