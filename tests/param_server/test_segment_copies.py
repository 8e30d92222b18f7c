"""Copies of segments in the checkpoint store: bit-equal, verified, and never half of one."""

from __future__ import annotations

import logging
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from param_server.key_value_store import MemoryKeyValueStore
from param_server.segment_copies import SegmentCopies
from param_server.segment_parts import Segment, SegmentBucket
from param_server.segments import Segments, commit_of
from param_server.server import Shard
from roostream.errors import CheckpointError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.store_identity import IDENTITY_NAME
from tests.param_server.segment_support import STACK, bucket_of, changes, make_segments, state
from tests.param_server.shard_support import ITEM, TOPIC, USER, commit, make_shard, pull_from, state_of
from tests.param_server.shard_support import push_to as push
from tests.trainer.memory_store import MemoryStore

# Segments


def in_small_pieces(store: MemoryStore, piece_bytes: int = 100) -> SegmentCopies:
    return SegmentCopies(store, 0, piece_bytes=piece_bytes)


def content(segments: Segments) -> dict[bytes, bytes]:
    store = segments.store
    return {key: store.get(key) or b"" for key in store.keys(b"")}


def copied(store: MemoryStore, rows: int = 40) -> tuple[Segments, tuple[Segment, ...]]:
    """Two segments, the second with the state of a policy and a bucket of two blocks."""
    segments = make_segments()
    first = segments.write("1-1", changes({n: float(n) for n in range(rows)}), ())
    bucket = bucket_of(0)
    halves = [SegmentBucket(STACK, bucket, [changes({n: 7.0})[STACK]]) for n in same_bucket(2)]
    both = segments.write_parts("2-1", halves, first, {STACK: b"what a policy keeps"})
    return segments, segments.send(both, in_small_pieces(store))


def same_bucket(count: int) -> list[int]:
    return [n for n in range(1000) if bucket_of(n) == bucket_of(0)][:count]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.dictionaries(st.integers(0, 50), st.floats(-9, 9, width=32), min_size=1), min_size=1, max_size=4
    ),
    st.integers(1, 700),
)
def test_what_is_fetched_is_what_was_sent(commits: list[dict[int, float]], piece_bytes: int) -> None:
    store, segments, live = MemoryStore(), make_segments(), tuple[Segment, ...]()
    for seq, rows in enumerate(commits, 1):
        live = segments.write(f"{seq}-1", changes(rows), live)
    live = segments.send(live, in_small_pieces(store, piece_bytes))
    elsewhere = make_segments()
    copies = in_small_pieces(store, piece_bytes)
    assert elsewhere.absent(live) == list(live)
    assert elsewhere.fetch(live, copies) == [] and not elsewhere.absent(live)
    assert content(elsewhere) == content(segments) and state(elsewhere, live) == state(segments, live)
    assert [(s.copy.bytes, s.copy.checksum) for s in live if s.copy] == [
        (len(data), manifests.checksum_of(data))
        for name, data in sorted(store.objects.items())
        if name != IDENTITY_NAME
    ]


def test_a_segment_of_several_blocks_and_a_policy_comes_back() -> None:
    store = MemoryStore()
    segments, live = copied(store)
    elsewhere = make_segments()
    assert elsewhere.fetch(live, in_small_pieces(store)) == []
    assert content(elsewhere) == content(segments)
    assert elsewhere.policy_states(live) == {STACK: b"what a policy keeps"}


def test_a_manifest_names_the_copy_with_size_and_checksum() -> None:
    _, live = copied(MemoryStore())
    plain = [segment.plain() for segment in live]
    assert [Segment.from_plain(one) for one in plain] == list(live)
    assert [set(one["copy"]) for one in plain] == [{"name", "bytes", "checksum"}] * 2
    assert [one["copy"]["name"] for one in plain] == ["segments/0-1-1", "segments/0-2-1"]


@pytest.mark.parametrize("how", ["bit", "cut", "longer", "other", "absent"])
def test_a_damaged_copy_is_never_stored(how: str) -> None:
    store = MemoryStore()
    _, live = copied(store)
    name = "segments/0-1-1"
    good = store.objects[name]
    places = range(0, len(good), 61) if how in ("bit", "cut") else range(1)
    for place in places:
        match how:
            case "bit":
                store.objects[name] = good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :]
            case "cut":
                store.objects[name] = good[:place]
            case "longer":
                store.objects[name] = good + b"x"
            case "other":
                store.objects[name] = store.objects["segments/0-2-1"]
            case "absent":
                store.objects.pop(name, None)
        elsewhere = make_segments()
        problems = elsewhere.fetch(live, in_small_pieces(store))
        if how == "longer":  # no more than the named size is read
            assert problems == []
            continue
        assert len(problems) == 1 and name in problems[0]
        assert [segment.name for segment in elsewhere.absent(live)] == ["1-1"]
        with pytest.raises(CheckpointError):
            list(elsewhere.read(live))


def test_parts_that_are_in_order_stay_when_the_copy_is_damaged() -> None:
    store = MemoryStore()
    segments, live = copied(store)
    keys = list(segments.store.keys(b"b/1-1/"))
    segments.store.write([(keys[0], b"damaged")])
    good = content(segments)
    store.damage("segments/0-1-1")
    assert segments.fetch(live[:1], in_small_pieces(store))
    assert content(segments) == good


def test_a_segment_that_is_damaged_here_is_not_sent_and_all_its_rows_are_rewritten() -> None:
    store, segments = MemoryStore(), make_segments()
    live = segments.write("1-1", changes({n: 1.0 for n in range(40)}), ())
    segments.store.write([(next(segments.store.keys(b"b/1-1/")), b"damaged")])
    with pytest.raises(CheckpointError):
        segments.send(live, in_small_pieces(store))
    assert store.list("segments") == []
    assert segments.buckets_to_rewrite(live, 0.1) == frozenset(range(8))


def test_sending_again_continues_with_the_segment_that_failed() -> None:
    store, segments, live = MemoryStore(), make_segments(), tuple[Segment, ...]()
    for seq in (1, 2, 3):
        live = segments.write(f"{seq}-1", changes({n: float(seq) for n in range(seq, seq + 30)}), live)
    sent: list[str] = []
    store.before_part = lambda name, part: sent.append(name) if part == 0 else None

    def fail(name: str, part: int) -> None:
        sent.append(name)
        if name == "segments/0-2-1" and part == 3:
            store.before_part = lambda name, part: sent.append(name)
            raise UnavailableError("the store is away")

    store.before_part = fail
    with pytest.raises(UnavailableError):
        segments.send(live, in_small_pieces(store))
    assert store.list("segments") == ["segments/0-1-1"]
    live = segments.send(live, in_small_pieces(store))
    assert list(dict.fromkeys(sent)) == [f"segments/0-{n}-1" for n in (1, 2, 3)]
    assert sent.index("segments/0-2-1") > max(n for n, name in enumerate(sent) if name == "segments/0-1-1")
    elsewhere = make_segments()
    assert elsewhere.fetch(live, in_small_pieces(store)) == [] and content(elsewhere) == content(segments)


# A shard


class Committed:
    """A shard that copies its segments, with three commits; `restored` is a new process of it."""

    def __init__(self, uploads: bool = True) -> None:
        self.home, self.store = MemoryKeyValueStore(), MemoryStore()
        shard = make_shard(self.home, self.store, uploads=uploads)  # type: ignore[arg-type]
        self.store_id, self.incarnation = "0" * 32, 1
        shard.restore(1, "", self.store_id)
        for seq in (1, 2, 3):
            push(shard, 3 * seq - 2, ITEM, tuple(range(seq, seq + 20)))
            push(shard, 3 * seq - 1, USER, (seq, 7))
            push(shard, 3 * seq, TOPIC, (seq,))
            self.name = commit(shard, self.store, seq)  # type: ignore[arg-type]
        self.shard, self.rows = shard, state_of(shard)
        push(shard, 10, ITEM, (1, 2))

    @property
    def segments(self) -> tuple[Segment, ...]:
        return commit_of(manifests.load(self.store, self.name).manifest, 0).segments

    def restored(self, home: MemoryKeyValueStore | None = None) -> Shard:
        self.incarnation += 1
        there = self.home if home is None else home
        shard = make_shard(there, self.store, uploads=True)  # type: ignore[arg-type]
        shard.restore(self.incarnation, self.name, self.store_id)
        return shard


def test_a_shard_without_its_home_comes_back_bit_equal(caplog: pytest.LogCaptureFixture) -> None:
    it, home = Committed(), MemoryKeyValueStore()
    with caplog.at_level(logging.INFO):
        again = it.restored(home)
    assert state_of(again) == it.rows
    (line,) = (r.message for r in caplog.records if "fetched" in r.message)
    rows, num_bytes = sum(s.rows for s in it.segments), sum(s.copy.bytes for s in it.segments if s.copy)
    assert re.search(rf"fetched 3 segments .* {rows} rows, {num_bytes} bytes in [\d.]+ s$", line)
    assert again.stats()["fetched_bytes"] == num_bytes
    push(again, 1, ITEM, (1, 2))
    it.name = commit(again, it.store, 4)  # type: ignore[arg-type]
    rows_now = state_of(again)
    assert state_of(it.restored(home)) == rows_now == state_of(it.restored(MemoryKeyValueStore()))


@pytest.mark.parametrize("what", ["directory", "segment", "block", "absent block", "everything"])
def test_exactly_what_is_damaged_is_fetched(what: str) -> None:
    it = Committed()
    match what:
        case "directory":
            it.home.write([(b"d/2-1", b"damaged")])
        case "segment":
            it.home.write((), [*list(it.home.keys(b"b/2-1/")), b"d/2-1"])
        case "block":
            it.home.write([(next(it.home.keys(b"b/2-1/")), b"damaged")])
        case "absent block":
            it.home.write((), [next(it.home.keys(b"b/2-1/"))])
        case "everything":
            it.home.write((), list(it.home.keys(b"")))
    again = it.restored()
    assert state_of(again) == it.rows
    wanted = ("1-1", "2-1", "3-1") if what == "everything" else ("2-1",)
    assert again.stats()["fetched_bytes"] == sum(
        s.copy.bytes for s in it.segments if s.name in wanted and s.copy
    )
    assert again.segments.check(it.segments, range(64)) == {}


def test_a_restore_of_a_home_in_order_fetches_nothing() -> None:
    it = Committed()
    assert state_of(it.restored()) == it.rows
    it.shard.restore(5, it.name, it.store_id)
    assert state_of(it.shard) == it.rows and it.shard.stats()["fetched_bytes"] == 0


def test_a_kept_commit_is_restored_after_the_home_has_deleted_its_segments() -> None:
    it = Committed()
    first, rows = it.name, it.rows
    for seq in range(4, 40):
        push(it.shard, seq + 7, ITEM, tuple(range(seq % 5, 40)))
        commit(it.shard, it.store, seq)  # type: ignore[arg-type]
    assert "2-1" not in {key.split(b"/")[1].decode() for key in it.home.keys(b"d/")}
    it.name = first
    assert state_of(it.restored()) == rows


def test_a_running_shard_whose_disk_is_emptied_rolls_back_bit_equal() -> None:
    it = Committed()
    it.home.write((), list(it.home.keys(b"")))
    it.shard.restore(5, it.name, it.store_id)
    assert state_of(it.shard) == it.rows


@pytest.mark.parametrize("how", ["damaged", "absent"])
def test_rows_that_are_lost_here_and_in_the_store_are_damage(how: str) -> None:
    """The controller then tries the commit before, whose segments are in order."""
    it = Committed()
    if how == "damaged":
        it.store.damage("segments/0-3-1")
    else:
        it.store.delete("segments/0-3-1")
    home = MemoryKeyValueStore()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"copy segments/0-3-1 in the checkpoint store"):
            it.restored(home)
    it.name = "manifests/00000002"
    assert it.restored(home).committed.seq == 2


def test_an_unavailable_store_is_waited_for_and_what_was_fetched_stays() -> None:
    it, home = Committed(), MemoryKeyValueStore()
    shard = make_shard(home, it.store, uploads=True)  # type: ignore[arg-type]
    reads, get_range = 0, it.store.get_range

    def fails_once(name: str, start: int, size: int) -> bytes:
        nonlocal reads
        reads += 1
        if name == "segments/0-2-1" and reads:
            it.store.get_range = get_range  # type: ignore[method-assign]
            raise UnavailableError("the store is away")
        return get_range(name, start, size)

    it.store.get_range = fails_once  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="away"):
        shard.restore(2, it.name, it.store_id)
    with pytest.raises(UnavailableError):
        pull_from(shard, ITEM, 1)
    first = shard.stats()["fetched_bytes"]
    shard.restore(3, it.name, it.store_id)
    assert state_of(shard) == it.rows and first > 0
    assert shard.stats()["fetched_bytes"] == sum(s.copy.bytes for s in it.segments if s.copy)


def test_an_empty_home_is_waited_for_as_long_as_a_segment_has_no_copy() -> None:
    it, home = Committed(uploads=False), MemoryKeyValueStore()
    for _ in range(2):
        with pytest.raises(UnavailableError, match="mount its volume"):
            it.restored(home)
    assert not list(home.keys(b""))


def test_a_deployment_that_begins_to_copy_copies_what_it_has() -> None:
    it = Committed(uploads=False)
    again = it.restored()
    push(again, 1, ITEM, (5,))
    it.name = commit(again, it.store, 4)  # type: ignore[arg-type]
    assert all(segment.copy for segment in it.segments)
    assert state_of(it.restored(MemoryKeyValueStore())) == state_of(again)


@pytest.mark.parametrize("part", range(4))
def test_a_failed_upload_is_reported_as_unavailable_and_the_next_commit_has_everything(part: int) -> None:
    it = Committed()
    it.store.before_part = lambda name, n: failing() if n == part else None

    def failing() -> None:
        raise UnavailableError("the store is away")

    it.shard.freeze(4, 0)
    push(it.shard, 11, ITEM, (30,))
    with pytest.raises(UnavailableError, match="away"):
        it.shard.write(4)
    it.shard.abort(4)
    assert it.store.list("segments") == [f"segments/0-{n}-1" for n in (1, 2, 3)]
    it.store.before_part = lambda name, n: None
    it.name = commit(it.shard, it.store, 5)  # type: ignore[arg-type]
    assert state_of(it.restored(MemoryKeyValueStore())) == state_of(it.shard)


def test_an_upload_reports_progress() -> None:
    it = Committed()
    it.shard.freeze(4, 0)
    seen: list[int] = []
    it.store.before_part = lambda name, n: seen.append(it.shard.progress)
    it.shard.write(4)
    assert len(seen) > 2 and seen == sorted(set(seen))


def test_a_restore_reports_progress_while_it_looks_for_damage() -> None:
    it, seen = Committed(), list[int]()

    class Watched(MemoryKeyValueStore):
        """Notes the shard's progress at each read of a damaged block."""

        def get(self, key: bytes) -> bytes | None:
            if key in damaged:
                seen.append(shard.progress)
            return super().get(key)

    home, damaged = Watched(), frozenset[bytes]()
    for key in it.home.keys(b""):
        home.write([(key, it.home.get(key) or b"")])
    blocks = sorted(home.keys(b"b/"))
    damaged = frozenset({blocks[0], blocks[-1]})
    home.write([(key, b"damaged") for key in damaged])
    for name in it.store.list(manifests.SEGMENTS):
        it.store.damage(name)
    shard = make_shard(home, it.store, uploads=True)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        shard.restore(2, it.name, it.store_id)
    assert len(seen) > 3, "damaged blocks are read by the restore and by both searches for damage"
    assert seen == sorted(set(seen)), "between two of these reads there is progress"
