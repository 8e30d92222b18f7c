"""Damage of committed rows: found while memory has them, healed from there, and told by name where it is too
late (G5)."""

from __future__ import annotations

import pytest

from param_server.key_value_store import MemoryKeyValueStore
from param_server.segments import KEEP_COMMITS, Commit, SegmentDamage, Segments
from roostream.errors import CheckpointError, UnavailableError
from tests.param_server.segment_support import STACK, Writer, bucket_of, changes, make_segments, state


def damage(store: MemoryKeyValueStore, key: bytes) -> None:
    data = store.data[key]
    store.data[key] = data[:10] + bytes([data[10] ^ 1]) + data[11:]


@pytest.mark.parametrize("kind", ["block", "absent block", "directory", "residency"])
def test_g5_a_damaged_segment_is_found_and_rewritten_from_memory(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryKeyValueStore()
    writer = Writer(store)
    writer.commit({n: 1.0 for n in range(100)})
    match kind:
        case "block":
            damage(store, next(store.keys(b"b/1-1/")))
        case "absent block":
            del store.data[next(store.keys(b"b/1-1/"))]
        case "directory":
            damage(store, b"d/1-1")
        case "residency":
            writer.live = writer.segments.write(
                "1-2", changes({0: 1.0}), writer.live, {STACK: b"what a policy keeps"}
            )
            damage(store, next(store.keys(b"r/1-2/")))
            writer.segments.commit(Commit(1, 2, writer.live))
    for n in range(8 + 2):
        writer.commit({n: 2.0})
    assert (
        writer.segments.num_damaged == 1
        and not writer.segments.damaged
        and "is damaged; its rows are in memory" in caplog.text
    )
    assert state(make_segments(store), writer.live) == writer.rows
    assert writer.segments.check(writer.live, range(8)) == {}


def test_nothing_is_deleted_while_something_is_damaged() -> None:
    store = MemoryKeyValueStore()
    writer = Writer(store)
    writer.commit({n: 1.0 for n in range(100)})
    for key in list(store.keys(b"b/1-1/")):
        damage(store, key)
    names = set(store.keys(b"d/"))
    for n in range(KEEP_COMMITS + 3):
        writer.commit({n: 2.0})
        assert not writer.segments.damaged or names <= set(store.keys(b"d/"))
        names |= set(store.keys(b"d/"))
    while writer.segments.damaged:
        writer.commit({n: 3.0})
    assert state(make_segments(store), writer.live) == writer.rows


def test_a_segment_is_read_back_before_what_it_replaces_is_deleted() -> None:
    """Every row is written anew by commit 2; when commit 1 leaves the kept ones, commit 2's segment must be
    known to be good."""
    store = MemoryKeyValueStore()
    writer = Writer(store)
    first = writer.commit({n: 1.0 for n in range(100)})
    writer.segments.damaged["1-1"] = SegmentDamage(frozenset(range(8)), 100)
    writer.commit({0: 2.0})
    assert [s.name for s in writer.live] == ["2-1"] and state(writer.segments, first)
    for n in range(KEEP_COMMITS - 2):
        writer.commit({n: 2.0})
    damage(store, next(k for k in store.keys(b"b/2-1/") if bucket_of(0) != int(k[-5:])))
    writer.commit({0: 2.0})
    assert writer.segments.damaged and state(writer.segments, first), "the older state is still there"
    writer.commit({0: 3.0})
    assert not writer.segments.damaged and state(make_segments(store), writer.live) == writer.rows


def test_a_segment_is_read_back_whole_only_once() -> None:
    class Counting(MemoryKeyValueStore):
        reads = 0

        def get(self, key: bytes) -> bytes | None:
            self.reads += key.startswith(b"b/")
            return super().get(key)

    store = Counting()
    writer = Writer(store)
    writer.commit({n: 1.0 for n in range(100)})
    reads = []
    for _ in range(5):
        store.reads = 0
        writer.commit({})
        reads.append(store.reads)
    assert reads == [1] * 5, "one bucket with each commit"


def test_a_store_that_can_t_be_read_now_is_not_damaged() -> None:
    class Away(MemoryKeyValueStore):
        away = False

        def get(self, key: bytes) -> bytes | None:
            if self.away and key.startswith((b"b/", b"d/")):
                raise UnavailableError("the mount is gone")
            return super().get(key)

    store = Away()
    writer = Writer(store)
    writer.commit({n: 1.0 for n in range(100)})
    store.away = True
    with pytest.raises(UnavailableError):
        writer.segments.commit(Commit(2, 1, writer.live))
    with pytest.raises(UnavailableError):
        state(writer.segments, writer.live)
    store.away = False
    assert not writer.segments.damaged and state(writer.segments, writer.live) == writer.rows


# Rows that are lost, and accepted to be


def lossy(store: MemoryKeyValueStore) -> tuple[Writer, bytes]:
    """Commits, and a key of a block of the first one that is damaged by now."""
    writer = Writer(store)
    writer.commit({n: 1.0 for n in range(100)})
    writer.commit({n: 2.0 for n in range(100, 110)})
    key = next(store.keys(b"b/1-1/"))
    damage(store, key)
    return writer, key


def test_lost_rows_are_reported_with_the_setting_that_accepts_the_loss() -> None:
    store = MemoryKeyValueStore()
    writer, key = lossy(store)
    assert "restore again" in writer.segments.explain_damage(writer.live[1:])
    bucket = int(key[-5:])
    rows = sum(bucket_of(n) == bucket for n in range(100))
    said = writer.segments.explain_damage(writer.live)
    assert (
        f"1-1/{STACK}/{bucket} (about {rows} rows)" in said
        and f'accept_lost_rows = ["1-1/{STACK}/{bucket}"]' in said
    )
    assert "reset" not in said
    for other in store.keys(b"b/"):
        damage(store, other)
    damage(store, key)
    few = Segments(store, {STACK: (2, 2)}, 8).explain_damage(writer.live)
    assert "more parts" in few and 'accept_lost_rows = ["1-1", "2-1"]' in few


@pytest.mark.parametrize("accepted", ["1-1", f"1-1/{STACK}", f"1-1/{STACK}/BUCKET"])
def test_accepted_rows_begin_anew_and_the_next_commit_needs_no_acceptance(accepted: str) -> None:
    store = MemoryKeyValueStore()
    writer, key = lossy(store)
    bucket = int(key[-5:])
    with pytest.raises(CheckpointError):
        state(make_segments(store), writer.live)
    name = accepted.replace("BUCKET", str(bucket))
    writer.segments = Segments(store, {STACK: (2, 2)}, 8, accepted=[name])
    writer.rows = state(writer.segments, writer.live)
    assert writer.rows == {
        n: 1.0 if n < 100 else 2.0 for n in range(110) if n >= 100 or bucket_of(n) != bucket
    }
    assert writer.segments.lost == {f"1-1/{STACK}/{bucket}"}
    writer.commit({1: 5.0})
    assert state(make_segments(store), writer.live) == writer.rows


def test_the_loss_of_a_whole_segment_can_be_accepted() -> None:
    store = MemoryKeyValueStore()
    writer, _ = lossy(store)
    del store.data[b"d/1-1"]
    writer.segments = Segments(store, {STACK: (2, 2)}, 8, accepted=["1-1"])
    writer.rows = state(writer.segments, writer.live)
    assert sorted(writer.rows) == list(range(100, 110))
    writer.commit({1: 5.0})
    assert state(make_segments(store), writer.live) == writer.rows
