"""Retention of commits by tiers. Copies of segments are deleted only if no kept manifest can need them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roostream.errors import UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.manifest import segment_copy_name
from roostream.runtime.retention import Retention, StoreCleaner, read_retention, write_retention
from roostream.runtime.store_identity import IDENTITY_NAME, IdentifiedStore
from tests.runtime.manifest_cases import a_manifest
from tests.trainer.memory_store import MemoryStore


def write_commit(store: Any, seq: int, segments: dict[int, list[str]]) -> None:
    """Write the copies of these segments (shard → segment names), then the manifest."""
    for index, names in segments.items():
        for name in names:
            store.put(segment_copy_name(index, name), name.encode())
    shards = {i: {"segments": [{"name": name} for name in names]} for i, names in segments.items()}
    manifest = a_manifest(seq, shards=shards, num_shards=len(shards))
    assert store.create(manifest.name, manifest.encode())


MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000


def write_commit_at(store: Any, seq: int, time_ms: int, is_copied: bool = True) -> None:
    copy = {"copy": {"name": "segments/0-1-1", "bytes": 0, "checksum": ""}} if is_copied else {}
    manifest = a_manifest(seq, time_ms=time_ms, shards={0: {"segments": [{"name": "1-1", **copy}]}})
    assert store.create(manifest.name, manifest.encode())


def copies(store: Any) -> set[str]:
    return set(store.list(manifests.SEGMENTS))


@given(st.data())
def test_a_kept_commit_has_its_copies_and_nothing_else_below_it_is_left(data: st.DataObject) -> None:
    """Each commit keeps a random part of the older segments; some commits are aborted after their upload."""
    store, live = MemoryStore(), {0: list[str](), 1: list[str]()}
    for seq in range(1, 12):
        for index in live:
            live[index] = [n for n in live[index] if data.draw(st.booleans())] + [f"{seq}-1"]
        if data.draw(st.booleans()):
            write_commit(store, seq, live)
        else:
            for index in live:
                store.put(segment_copy_name(index, f"{seq}-1"), b"")
                live[index] = live[index][:-1]
        StoreCleaner(store, Retention(3)).clean()
        kept = [manifests.load(store, manifests.manifest_name(n)).manifest for n in manifests.numbers(store)]
        needed = set[str]().union(*(manifest.segment_copies for manifest in kept))
        newest = max((manifest.seq for manifest in kept), default=0)
        assert needed <= copies(store)
        assert {manifests.segment_copy_seq(name) >= newest for name in copies(store) - needed} <= {True}


def test_the_upload_of_a_commit_that_is_being_made_stays_until_a_later_commit() -> None:
    store = MemoryStore()
    write_commit(store, 1, {0: ["1-1"]})
    store.put(segment_copy_name(0, "2-1"), b"")
    StoreCleaner(store, Retention(2)).clean()
    assert copies(store) == {"segments/0-1-1", "segments/0-2-1"}
    write_commit(store, 3, {0: ["1-1", "3-1"]})
    StoreCleaner(store, Retention(2)).clean()
    assert copies(store) == {"segments/0-1-1", "segments/0-3-1"}


def test_a_segment_that_is_copied_later_than_its_commit_was_made_is_not_deleted() -> None:
    """When copying is switched on, older segments are uploaded while manifests still name them without a
    copy."""
    store = MemoryStore()
    for seq in (1, 2):
        write_commit(store, seq, {0: ["1-1"]})
        StoreCleaner(store, Retention(2)).clean()
    assert copies(store) == {"segments/0-1-1"}


def test_nothing_that_a_damaged_manifest_may_name_is_deleted() -> None:
    store = MemoryStore()
    for seq in (1, 2, 3, 4):
        write_commit(store, seq, {0: [f"{seq}-1"]})
    store.put(segment_copy_name(0, "1-2"), b"")
    store.damage(manifests.manifest_name(3))
    StoreCleaner(store, Retention(2)).clean()
    assert copies(store) == {f"segments/0-{name}" for name in ("1-1", "1-2", "2-1", "3-1", "4-1")}
    write_commit(store, 5, {0: ["5-1"]})
    write_commit(store, 6, {0: ["6-1"]})
    StoreCleaner(store, Retention(2)).clean()
    assert copies(store) == {"segments/0-5-1", "segments/0-6-1"}


def test_copies_of_a_shard_that_the_deployment_has_no_more_are_deleted() -> None:
    store = MemoryStore()
    write_commit(store, 1, {0: ["1-1"], 1: ["1-1"]})
    for seq in (2, 3):
        write_commit(store, seq, {0: ["1-1", f"{seq}-1"]})
    StoreCleaner(store, Retention(2)).clean()
    assert copies(store) == {"segments/0-1-1", "segments/0-2-1", "segments/0-3-1"}


def test_nothing_is_deleted_in_another_store_mounted_in_its_place() -> None:
    inner = MemoryStore()
    store = IdentifiedStore(inner, "the store")
    for seq in (1, 2, 3):
        write_commit(store, seq, {0: [f"{seq}-1"]})
    before, swapped = dict(inner.objects), json.dumps({"store": "f" * 32}).encode()
    original_list = inner.list

    def swap(prefix: str) -> list[str]:
        """Mount the other store after the manifests were read."""
        if prefix == manifests.DENSE:
            inner.objects[IDENTITY_NAME] = swapped
        return original_list(prefix)

    inner.list = swap  # type: ignore[method-assign]
    with pytest.raises(UnavailableError):
        StoreCleaner(store, Retention(2)).clean()
    assert {n for n in before if n.startswith("segments/")} <= inner.objects.keys()


@pytest.mark.parametrize("name", ["segments/x", "segments/0-x-1", "segments/readme", "segments/0"])
def test_an_object_with_another_name_is_left_alone(name: str) -> None:
    store = MemoryStore()
    store.put(name, b"")
    for seq in (1, 2, 3):
        write_commit(store, seq, {0: [f"{seq}-1"]})
    StoreCleaner(store, Retention(2)).clean()
    assert name in copies(store)


@given(
    st.lists(st.integers(1, 4 * HOUR_MS), min_size=1, max_size=60),
    st.builds(Retention, st.integers(2, 4), st.integers(0, 5), st.integers(0, 4), st.integers(0, 3)),
)
def test_the_tiers_after_many_commits_are_those_of_all_commits_at_once(
    gaps_ms: list[int], retention: Retention
) -> None:
    """A commit that was deleted early is never needed for a later tier."""
    store, times = MemoryStore(), list(itertools.accumulate(gaps_ms))
    cleaner = StoreCleaner(store, retention)
    for seq, time_ms in enumerate(times, 1):
        write_commit_at(store, seq, time_ms)
        cleaner.clean()
    at_once = retention.tiers(
        range(max(len(times) - retention.newest, 0) + 1, len(times) + 1), list(enumerate(times, 1))
    )
    assert manifests.numbers(store) == sorted(at_once)
    assert StoreCleaner(store, retention).tiers() == at_once


def test_a_week_of_commits_every_ten_minutes_keeps_one_a_minute_an_hour_and_a_day() -> None:
    store = MemoryStore()
    cleaner = StoreCleaner(store)
    for seq in range(1, 9 * 144 + 1):
        write_commit_at(store, seq, 10 * seq * MINUTE_MS)
        cleaner.clean()
    by_tier = Counter(cleaner.tiers().values())
    assert by_tier == {"newest": 10, "minute": 50, "hour": 13, "day": 5}
    ages_h = [(9 * 144 - seq) / 6 for seq in manifests.numbers(store)]
    assert 5 * 24 < ages_h[0] < 6 * 24 and len(ages_h) == 78


def test_commits_whose_rows_are_only_in_homes_are_kept_among_the_newest_only() -> None:
    store = MemoryStore()
    for seq in range(1, 31):
        write_commit_at(store, seq, seq * HOUR_MS, is_copied=seq % 2 == 0)
    StoreCleaner(store, Retention(3, 0, 8, 0)).clean()
    assert manifests.numbers(store) == [16, 18, 20, 22, 24, 26, 28, 29, 30]


def test_the_retention_of_the_controller_can_be_read_by_others() -> None:
    store = MemoryStore()
    assert read_retention(store) == Retention()
    write_retention(store, Retention(3, 1, 2, 0))
    assert read_retention(store) == Retention(3, 1, 2, 0)
