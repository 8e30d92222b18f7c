"""Copies of segments are deleted only where no kept manifest can need them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roostream.errors import UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.manifest import segment_copy_name
from roostream.runtime.store_identity import IDENTITY_NAME, IdentifiedStore
from tests.runtime.manifest_cases import a_manifest
from tests.trainer.memory_store import MemoryStore


def with_commit(store: Any, seq: int, segments: dict[int, list[str]]) -> None:
    """Write the copies of these segments (shard → names), then the manifest."""
    for index, names in segments.items():
        for name in names:
            store.put(segment_copy_name(index, name), name.encode())
    shards = {i: {"segments": [{"name": name} for name in names]} for i, names in segments.items()}
    manifest = a_manifest(seq, shards=shards, num_shards=len(shards))
    assert store.create(manifest.name, manifest.encode())


def copies(store: Any) -> set[str]:
    return set(store.list(manifests.SEGMENTS))


@given(st.data())
def test_a_kept_commit_has_its_copies_and_nothing_else_below_it_is_left(data: st.DataObject) -> None:
    """Each commit keeps some older segments; some commits are aborted after their upload."""
    store, live = MemoryStore(), {0: list[str](), 1: list[str]()}
    for seq in range(1, 12):
        for index in live:
            live[index] = [n for n in live[index] if data.draw(st.booleans())] + [f"{seq}-1"]
        if data.draw(st.booleans()):
            with_commit(store, seq, live)
        else:
            for index in live:
                store.put(segment_copy_name(index, f"{seq}-1"), b"")
                live[index] = live[index][:-1]
        manifests.retire(store, keep=3)
        kept = [manifests.load(store, manifests.manifest_name(n)).manifest for n in manifests.numbers(store)]
        needed = set[str]().union(*(one.segment_copies for one in kept))
        newest = max((one.seq for one in kept), default=0)
        assert needed <= copies(store)
        assert {manifests.segment_copy_seq(name) >= newest for name in copies(store) - needed} <= {True}


def test_the_upload_of_a_commit_that_is_being_made_stays_until_a_later_commit() -> None:
    store = MemoryStore()
    with_commit(store, 1, {0: ["1-1"]})
    store.put(segment_copy_name(0, "2-1"), b"")
    manifests.retire(store, keep=2)
    assert copies(store) == {"segments/0-1-1", "segments/0-2-1"}
    with_commit(store, 3, {0: ["1-1", "3-1"]})
    manifests.retire(store, keep=2)
    assert copies(store) == {"segments/0-1-1", "segments/0-3-1"}


def test_a_segment_that_is_copied_later_than_its_commit_was_made_is_not_deleted() -> None:
    """A deployment that begins to copy its segments sends older ones, while manifests name them without a
    copy."""
    store = MemoryStore()
    for seq in (1, 2):
        with_commit(store, seq, {0: ["1-1"]})
        manifests.retire(store, keep=2)
    assert copies(store) == {"segments/0-1-1"}


def test_nothing_that_a_damaged_manifest_may_name_is_deleted() -> None:
    store = MemoryStore()
    for seq in (1, 2, 3, 4):
        with_commit(store, seq, {0: [f"{seq}-1"]})
    store.put(segment_copy_name(0, "1-2"), b"")
    store.damage(manifests.manifest_name(3))
    manifests.retire(store, keep=2)
    assert copies(store) == {f"segments/0-{name}" for name in ("1-1", "1-2", "2-1", "3-1", "4-1")}
    with_commit(store, 5, {0: ["5-1"]})
    with_commit(store, 6, {0: ["6-1"]})
    manifests.retire(store, keep=2)
    assert copies(store) == {"segments/0-5-1", "segments/0-6-1"}


def test_copies_of_a_shard_that_the_deployment_has_no_more_are_deleted() -> None:
    store = MemoryStore()
    with_commit(store, 1, {0: ["1-1"], 1: ["1-1"]})
    for seq in (2, 3):
        with_commit(store, seq, {0: ["1-1", f"{seq}-1"]})
    manifests.retire(store, keep=2)
    assert copies(store) == {"segments/0-1-1", "segments/0-2-1", "segments/0-3-1"}


def test_nothing_is_deleted_in_another_store_that_took_this_one_s_place() -> None:
    inner = MemoryStore()
    store = IdentifiedStore(inner, "the store")
    for seq in (1, 2, 3):
        with_commit(store, seq, {0: [f"{seq}-1"]})
    before, swapped = dict(inner.objects), json.dumps({"store": "f" * 32}).encode()
    listed = inner.list

    def swap(prefix: str) -> list[str]:
        """The other store is mounted after the manifests were read."""
        if prefix == manifests.DENSE:
            inner.objects[IDENTITY_NAME] = swapped
        return listed(prefix)

    inner.list = swap  # type: ignore[method-assign]
    with pytest.raises(UnavailableError):
        manifests.retire(store, keep=2)
    assert {n for n in before if n.startswith("segments/")} <= inner.objects.keys()


@pytest.mark.parametrize("name", ["segments/x", "segments/0-x-1", "segments/readme", "segments/0"])
def test_an_object_with_another_name_is_left_alone(name: str) -> None:
    store = MemoryStore()
    store.put(name, b"")
    for seq in (1, 2, 3):
        with_commit(store, seq, {0: [f"{seq}-1"]})
    manifests.retire(store, keep=2)
    assert name in copies(store)
