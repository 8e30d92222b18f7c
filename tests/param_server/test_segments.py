"""Segments: a state can be read back whole, and a damaged one is never loaded (guarantee G5,
docs/architecture.md)."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import pytest

from param_server.key_value_store import MemoryKeyValueStore
from param_server.segments import FEW_SEGMENTS, KEEP_COMMITS, MANY_SEGMENTS, Commit, SegmentDamage, Segments
from roostream.errors import CheckpointError, OtherVersionError, UnavailableError
from tests.param_server.segment_support import STACK, Writer, bucket_of, changes, make_segments, state


def test_a_state_has_the_newest_entry_of_each_key() -> None:
    segments = make_segments()
    first = segments.write("1-1", changes({1: 1.0, 2: 2.0, 3: 3.0}), ())
    second = segments.write("2-1", changes({2: 20.0, 4: 4.0}, deleted=[1]), first)
    assert state(segments, first) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert state(segments, second) == {2: 20.0, 3: 3.0, 4: 4.0}
    assert [s.name for s in second] == ["1-1", "2-1"] and second[1].rows == 3


def test_a_commit_without_changes_has_the_segments_of_the_one_before() -> None:
    writer = Writer()
    for n in range(2 * FEW_SEGMENTS):
        writer.commit({n: 1.0})
    assert writer.segments.buckets_to_rewrite(writer.live, 0.0) == frozenset()
    assert writer.commit({}) == writer.live


def test_a_long_segment_list_is_rewritten_bucket_by_bucket_and_nothing_is_lost() -> None:
    writer, rng = Writer(), np.random.default_rng(0)
    sizes, written = [], []
    for seq in range(1, 150):
        rows = {int(i): float(seq) for i in rng.integers(0, 400, 6)}
        deleted = [i for i in range(400, 404) if seq % 3 == 0]
        rows |= {i: float(seq) for i in range(400, 404) if seq % 3 == 1}
        live = writer.commit(rows, deleted)
        assert state(writer.segments, live) == writer.rows
        sizes.append(len(live))
        written.append(live[-1].rows)
    assert max(sizes) <= FEW_SEGMENTS + 8 + 1, (
        "after one commit per bucket, the first segment must not be needed any more"
    )
    assert max(written[20:]) <= 0.4 * len(writer.rows), "no commit may rewrite everything"


def test_a_segment_list_of_few_changes_is_bounded_too() -> None:
    writer = Writer()
    writer.commit({n: 1.0 for n in range(300)})
    sizes = [len(writer.commit({n % 3: float(n)})) for n in range(120)]
    assert max(sizes) <= FEW_SEGMENTS + MANY_SEGMENTS and state(writer.segments, writer.live) == writer.rows


def test_deleted_rows_of_a_bucket_do_not_return_from_older_segments() -> None:
    segments = make_segments()
    live = segments.write("1-1", changes({n: 1.0 for n in range(50)}), ())
    live = segments.write("2-1", changes({1: 2.0}), live, complete=frozenset(range(8)))
    assert state(segments, live) == {1: 2.0} and [s.name for s in live] == ["2-1"]
    live = segments.write("3-1", changes({}), live, complete=frozenset(range(8)))
    assert state(segments, live) == {}


def test_deleted_rows_stay_deleted_when_their_segment_is_dropped() -> None:
    """Another bucket still needs the segment with the row. The segment with the row's tombstone is not needed
    any more."""
    first, other = (next(n for n in range(100) if bucket_of(n) == bucket) for bucket in (1, 2))
    segments = make_segments()
    live = segments.write("1-1", changes({first: 1.0, other: 1.0}), ())
    live = segments.write("2-1", changes({}, deleted=[first]), live)
    live = segments.write("3-1", changes({}), live, complete=frozenset({1}))
    assert [s.name for s in live] == ["1-1", "3-1"] and state(segments, live) == {other: 1.0}


def test_only_the_marks_of_the_newest_segment_count() -> None:
    segments = make_segments()
    live = segments.write("1-1", changes({1: 1.0}, unpublished=True), ())
    live = segments.write("2-1", changes({2: 1.0}, unpublished=True), live)
    marked = {
        i
        for p in segments.read(live)
        for b in p.blocks
        for i in b.keys.take(b.unpublished_K != 0).id_U.tolist()
    }
    assert marked == {2}


def test_the_newest_commits_can_be_read_and_older_ones_are_deleted() -> None:
    store = MemoryKeyValueStore()
    segments, live = make_segments(store), ()
    states = []
    for seq in range(1, 40):
        live = segments.write(f"{seq}-1", changes({n % 7: float(seq) for n in range(seq, seq + 5)}), live)
        segments.commit(Commit(seq, 1, live))
        states.append((live, state(segments, live)))
        for old, expected in states[-KEEP_COMMITS:] if seq % 8 == 7 else ():
            assert state(segments, old) == expected
    kept = {s.name for past in segments.history() for s in past.segments}
    assert {k.split(b"/")[1].decode() for k in store.data if b"/" in k} == kept
    assert [c.seq for c in segments.history()] == list(range(40 - KEEP_COMMITS, 40))


def test_an_uncommitted_segment_is_deleted_at_a_restore_or_with_the_next_commit() -> None:
    store = MemoryKeyValueStore()
    live = make_segments(store).write("1-1", changes({1: 1.0}), ())
    make_segments(store).commit(Commit(1, 1, live))
    for name in ("2-1", "2-2", "3-2"):
        make_segments(store).write(name, changes({2: 1.0}), live)
    segments = make_segments(store)
    segments.note_restored(Commit(1, 1, live))
    assert len(list(store.keys(b"d/"))) == 4, (
        "nothing may be deleted while the existing manifests are unknown"
    )
    segments.note_restored(Commit(1, 1, live), {1, 3})
    assert list(store.keys(b"d/")) == [b"d/1-1", b"d/3-2"] and not list(store.keys(b"b/2-1/"))
    live = segments.write("3-3", changes({2: 3.0}), live)
    segments.commit(Commit(3, 3, live))
    assert list(store.keys(b"d/")) == [b"d/1-1", b"d/3-3"]


def test_a_discarded_segment_leaves_nothing_and_a_full_disk_only_delays_its_deletion(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryKeyValueStore()
    segments = make_segments(store)
    live = segments.write("1-1", changes({1: 1.0}), ())
    before = dict(store.data)
    segments.write("2-1", changes({2: 1.0}), live)
    store.fail_at(1)
    segments.discard("2-1")
    assert "could not be deleted" in caplog.text and store.data != before
    segments.discard("2-1")
    assert store.data == before


def test_a_rollback_drops_the_later_commits() -> None:
    segments, live = make_segments(), ()
    commits = []
    for seq in (1, 2, 3):
        live = segments.write(f"{seq}-1", changes({seq: 1.0}), live)
        commits.append(Commit(seq, 1, live))
        segments.commit(commits[-1])
    segments.note_restored(commits[1])
    assert segments.history() == commits, "only the next commit forgets them"
    assert state(segments, commits[1].segments) == {1: 1.0, 2: 1.0}
    live = segments.write("3-2", changes({9: 1.0}), commits[1].segments)
    segments.commit(Commit(3, 2, live))
    assert segments.history() == [*commits[:2], Commit(3, 2, live)]


def test_a_commit_known_only_by_its_manifest_is_kept() -> None:
    """The process that wrote the commit was killed before it learned that the manifest was linked."""
    store = MemoryKeyValueStore()
    live = make_segments(store).write("1-1", changes({1: 1.0}), ())
    restarted = make_segments(store)
    restarted.note_restored(Commit(1, 1, live))
    assert make_segments(store).history() == [Commit(1, 1, live)], "it is known if the manifest goes away"
    second = restarted.write("2-2", changes({n: 1.0 for n in range(50)}), live)
    restarted.commit(Commit(2, 2, second))
    assert [c.seq for c in restarted.history()] == [1, 2] and state(restarted, live) == {1: 1.0}


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_full_disk_leaves_the_committed_state_only(nth: int) -> None:
    store = MemoryKeyValueStore()
    segments = make_segments(store)
    live = segments.write("1-1", changes({1: 1.0}), ())
    before = dict(store.data)
    store.fail_at(nth)
    with pytest.raises(UnavailableError):
        segments.write("2-1", changes({1: 2.0}), live)
    assert state(segments, live) == {1: 1.0} and store.data == before
    assert state(segments, segments.write("2-1", changes({1: 2.0}), live)) == {1: 2.0}


def test_segments_are_synced_before_a_manifest_names_them() -> None:
    class RecordingStore(MemoryKeyValueStore):
        def write(
            self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
        ) -> None:
            puts_ = list(puts)
            super().write(puts_, deletes, sync=sync)
            writes.append((sync, [key for key, _ in puts_]))

    writes: list[tuple[bool, list[bytes]]] = []
    segments = make_segments(RecordingStore())
    live = segments.write("1-1", changes({n: 1.0 for n in range(30)}), (), {STACK: b"known"})
    assert writes[-1][0] and writes[-1][1][-1] == b"d/1-1", (
        "the directory must come with the last write, which must be synced"
    )
    writes.clear()
    segments.commit(Commit(1, 1, live))
    assert (True, [b"history"]) in writes


def test_g5_any_flipped_absent_or_exchanged_part_of_a_segment_is_detected() -> None:
    store = MemoryKeyValueStore()
    segments = make_segments(store)
    live = segments.write("1-1", changes({n: float(n) for n in range(20)}, deleted=[99]), ())
    segments.write("2-1", changes({1: 2.0}), live)
    (other,) = store.keys(b"b/2-1/")
    for key in [*store.keys(b"b/1-1/"), b"d/1-1"]:
        good = store.data.pop(key)
        with pytest.raises(CheckpointError, match="absent"):
            state(segments, live)
        store.data[key] = store.data[other]
        with pytest.raises(CheckpointError):
            state(segments, live)
        for at in range(0, len(good), 11):
            store.data[key] = good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :]
            with pytest.raises(CheckpointError):
                state(segments, live)
        store.data[key] = good
    assert len(state(segments, live)) == 20


def test_a_future_format_is_refused() -> None:
    store = MemoryKeyValueStore()
    segments = make_segments(store)
    (segment,) = segments.write("1-1", changes({1: 1.0}), ())
    data = json.dumps(json.loads(store.data[b"d/1-1"]) | {"format": 4}).encode()
    store.data[b"d/1-1"] = data
    from param_server.row_block import checksum

    with pytest.raises(OtherVersionError):
        state(segments, (segment._replace(checksum=f"{checksum(data):016x}"),))


def test_removed_stacks_are_still_readable_by_name() -> None:
    store = MemoryKeyValueStore()
    live = make_segments(store).write("1-1", changes({1: 1.0}), ())
    current = Segments(store, {"d3-adagrad": (3, 3)}, 8)
    assert [part.stack for part in current.read(live)] == [STACK] and state(current, live) == {1: 1.0}
    assert list(current.read(live, {"d3-adagrad": range(8)})) == [], (
        "a read of certain stacks must not return other ones"
    )
    assert current.check(live, range(8)) == {}
    store.data[key] = store.data[key := next(k for k in store.data if k.startswith(b"b/"))][:-1] + b"x"
    assert list(current.check(live, range(8))) == [key[2:].decode().replace("0000", "")]


def test_a_damaged_list_of_commits_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryKeyValueStore()
    segments = make_segments(store)
    live = segments.write("1-1", changes({1: 1.0}), ())
    store.data[b"history"] = b"[[1"
    segments.commit(Commit(1, 1, live))
    assert segments.history() == [Commit(1, 1, live)] and "damaged" in caplog.text


def test_as_many_commits_are_kept_as_the_settings_say() -> None:
    writer = Writer()
    writer.segments = Segments(writer.segments.store, {STACK: (2, 2)}, 8, keep=2)
    for n in range(4):
        writer.commit({n: float(n)})
    assert [commit.seq for commit in writer.segments.history()] == [3, 4]


# Damage of committed rows (G5): found and repaired while memory has the rows, and otherwise reported by name


def damage(store: MemoryKeyValueStore, key: bytes) -> None:
    data = store.data[key]
    store.data[key] = data[:10] + bytes([data[10] ^ 1]) + data[11:]


@pytest.mark.parametrize("damaged_part", ["block", "absent block", "directory", "residency"])
def test_g5_a_damaged_segment_is_found_and_rewritten_from_memory(
    damaged_part: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryKeyValueStore()
    writer = Writer(store)
    writer.commit({n: 1.0 for n in range(100)})
    match damaged_part:
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


def test_nothing_is_deleted_while_a_segment_is_damaged() -> None:
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


def test_a_segment_is_verified_before_those_it_replaces_are_deleted() -> None:
    """Commit 2 rewrites every row. Its segment must be known to be intact before commit 1 is dropped."""
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
    assert writer.segments.damaged and state(writer.segments, first), "the older state must be kept"
    writer.commit({0: 3.0})
    assert not writer.segments.damaged and state(make_segments(store), writer.live) == writer.rows


def test_a_new_segment_is_verified_whole_only_once() -> None:
    class CountingStore(MemoryKeyValueStore):
        reads = 0

        def get(self, key: bytes) -> bytes | None:
            self.reads += key.startswith(b"b/")
            return super().get(key)

    store = CountingStore()
    writer = Writer(store)
    writer.commit({n: 1.0 for n in range(100)})
    reads = []
    for _ in range(5):
        store.reads = 0
        writer.commit({})
        reads.append(store.reads)
    assert reads == [1] * 5, "every later commit must verify one bucket"


def test_an_unreadable_store_is_unavailable_and_not_damaged() -> None:
    class UnavailableStore(MemoryKeyValueStore):
        is_unavailable = False

        def get(self, key: bytes) -> bytes | None:
            if self.is_unavailable and key.startswith((b"b/", b"d/")):
                raise UnavailableError("the mount is gone")
            return super().get(key)

    store = UnavailableStore()
    writer = Writer(store)
    writer.commit({n: 1.0 for n in range(100)})
    store.is_unavailable = True
    with pytest.raises(UnavailableError):
        writer.segments.commit(Commit(2, 1, writer.live))
    with pytest.raises(UnavailableError):
        state(writer.segments, writer.live)
    store.is_unavailable = False
    assert not writer.segments.damaged and state(writer.segments, writer.live) == writer.rows


# Accepted losses


def writer_with_damage(store: MemoryKeyValueStore) -> tuple[Writer, bytes]:
    """A writer with two commits, and the key of a damaged block of the first one."""
    writer = Writer(store)
    writer.commit({n: 1.0 for n in range(100)})
    writer.commit({n: 2.0 for n in range(100, 110)})
    key = next(store.keys(b"b/1-1/"))
    damage(store, key)
    return writer, key


def test_lost_rows_are_reported_with_the_setting_that_accepts_the_loss() -> None:
    store = MemoryKeyValueStore()
    writer, key = writer_with_damage(store)
    assert "restore again" in writer.segments.explain_damage(writer.live[1:])
    bucket = int(key[-5:])
    rows = sum(bucket_of(n) == bucket for n in range(100))
    message = writer.segments.explain_damage(writer.live)
    assert (
        f"1-1/{STACK}/{bucket} (about {rows} rows)" in message
        and f'accept_lost_rows = ["1-1/{STACK}/{bucket}"]' in message
    )
    assert "reset" not in message
    for other in store.keys(b"b/"):
        damage(store, other)
    damage(store, key)
    shortened = Segments(store, {STACK: (2, 2)}, 8).explain_damage(writer.live)
    assert "more parts" in shortened and 'accept_lost_rows = ["1-1", "2-1"]' in shortened


@pytest.mark.parametrize("accepted", ["1-1", f"1-1/{STACK}", f"1-1/{STACK}/BUCKET", "the directory"])
def test_rows_accepted_as_lost_start_anew_and_the_next_commit_needs_no_acceptance(accepted: str) -> None:
    store = MemoryKeyValueStore()
    writer, key = writer_with_damage(store)
    bucket = int(key[-5:])
    lost = {n for n in range(100) if bucket_of(n) == bucket}
    if accepted == "the directory":
        accepted, lost = "1-1", set(range(100))
        del store.data[b"d/1-1"]
    with pytest.raises(CheckpointError):
        state(make_segments(store), writer.live)
    name = accepted.replace("BUCKET", str(bucket))
    writer.segments = Segments(store, {STACK: (2, 2)}, 8, accepted=[name])
    writer.rows = state(writer.segments, writer.live)
    assert writer.rows == {n: 1.0 if n < 100 else 2.0 for n in range(110) if n not in lost}
    writer.commit({1: 5.0})
    assert state(make_segments(store), writer.live) == writer.rows
