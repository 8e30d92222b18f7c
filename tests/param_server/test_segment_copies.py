"""Copies of segments in the checkpoint store: bit-equal, verified, and never incomplete."""

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


def copies_in(store: MemoryStore, piece_bytes: int = 100) -> SegmentCopies:
    return SegmentCopies(store, 0, piece_bytes=piece_bytes)


def content(segments: Segments) -> dict[bytes, bytes]:
    store = segments.store
    return {key: store.get(key) or b"" for key in store.keys(b"")}


def two_copied_segments(store: MemoryStore, rows: int = 40) -> tuple[Segments, tuple[Segment, ...]]:
    """Two segments and their copies. The second has the state of a policy and a bucket of two blocks."""
    segments = make_segments()
    first = segments.write("1-1", changes({n: float(n) for n in range(rows)}), ())
    bucket = bucket_of(0)
    halves = [SegmentBucket(STACK, bucket, [changes({n: 7.0})[STACK]]) for n in ids_of_one_bucket(2)]
    segment_list = segments.write_parts("2-1", halves, first, {STACK: b"what a policy keeps"})
    return segments, segments.send(segment_list, copies_in(store))


def ids_of_one_bucket(count: int) -> list[int]:
    return [n for n in range(1000) if bucket_of(n) == bucket_of(0)][:count]


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.dictionaries(st.integers(0, 50), st.floats(-9, 9, width=32), min_size=1), min_size=1, max_size=4
    ),
    st.integers(1, 700),
)
def test_fetched_segments_equal_the_sent_ones(commits: list[dict[int, float]], piece_bytes: int) -> None:
    store, segments, live = MemoryStore(), make_segments(), tuple[Segment, ...]()
    for seq, rows in enumerate(commits, 1):
        live = segments.write(f"{seq}-1", changes(rows), live)
    live = segments.send(live, copies_in(store, piece_bytes))
    other_home = make_segments()
    copies = copies_in(store, piece_bytes)
    assert other_home.absent(live) == list(live)
    assert other_home.fetch(live, copies) == [] and not other_home.absent(live)
    assert content(other_home) == content(segments) and state(other_home, live) == state(segments, live)
    assert [(s.copy.bytes, s.copy.checksum) for s in live if s.copy] == [
        (len(data), manifests.checksum_of(data))
        for name, data in sorted(store.objects.items())
        if name != IDENTITY_NAME
    ]


def test_a_segment_of_several_blocks_and_a_policy_state_is_restored() -> None:
    store = MemoryStore()
    segments, live = two_copied_segments(store)
    other_home = make_segments()
    assert other_home.fetch(live, copies_in(store)) == []
    assert content(other_home) == content(segments)
    assert other_home.policy_states(live) == {STACK: b"what a policy keeps"}


def test_a_manifest_names_the_copy_with_size_and_checksum() -> None:
    _, live = two_copied_segments(MemoryStore())
    plain = [segment.plain() for segment in live]
    assert [Segment.from_plain(encoded) for encoded in plain] == list(live)
    assert [set(encoded["copy"]) for encoded in plain] == [{"name", "bytes", "checksum"}] * 2
    assert [encoded["copy"]["name"] for encoded in plain] == ["segments/0-1-1", "segments/0-2-1"]


@pytest.mark.parametrize("damage", ["bit", "cut", "longer", "other", "absent"])
def test_a_damaged_copy_is_never_stored(damage: str) -> None:
    store = MemoryStore()
    _, live = two_copied_segments(store)
    name = "segments/0-1-1"
    good = store.objects[name]
    positions = range(0, len(good), 61) if damage in ("bit", "cut") else range(1)
    for position in positions:
        match damage:
            case "bit":
                store.objects[name] = good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :]
            case "cut":
                store.objects[name] = good[:position]
            case "longer":
                store.objects[name] = good + b"x"
            case "other":
                store.objects[name] = store.objects["segments/0-2-1"]
            case "absent":
                store.objects.pop(name, None)
        other_home = make_segments()
        problems = other_home.fetch(live, copies_in(store))
        if damage == "longer":  # a fetch reads no more than the named size
            assert problems == []
            continue
        assert len(problems) == 1 and name in problems[0]
        assert [segment.name for segment in other_home.absent(live)] == ["1-1"]
        with pytest.raises(CheckpointError):
            list(other_home.read(live))


def test_intact_parts_stay_when_the_copy_is_damaged() -> None:
    store = MemoryStore()
    segments, live = two_copied_segments(store)
    keys = list(segments.store.keys(b"b/1-1/"))
    segments.store.write([(keys[0], b"damaged")])
    good = content(segments)
    store.damage("segments/0-1-1")
    assert segments.fetch(live[:1], copies_in(store))
    assert content(segments) == good


def test_a_locally_damaged_segment_is_not_sent_and_all_its_rows_are_rewritten() -> None:
    store, segments = MemoryStore(), make_segments()
    live = segments.write("1-1", changes({n: 1.0 for n in range(40)}), ())
    segments.store.write([(next(segments.store.keys(b"b/1-1/")), b"damaged")])
    with pytest.raises(CheckpointError):
        segments.send(live, copies_in(store))
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
        segments.send(live, copies_in(store))
    assert store.list("segments") == ["segments/0-1-1"]
    live = segments.send(live, copies_in(store))
    assert list(dict.fromkeys(sent)) == [f"segments/0-{n}-1" for n in (1, 2, 3)]
    assert sent.index("segments/0-2-1") > max(n for n, name in enumerate(sent) if name == "segments/0-1-1")
    other_home = make_segments()
    assert other_home.fetch(live, copies_in(store)) == [] and content(other_home) == content(segments)


# A shard


class CommittedShard:
    """A shard that copies its segments, with three commits. `restore` starts a new process of it."""

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

    def restore(self, home: MemoryKeyValueStore | None = None) -> Shard:
        self.incarnation += 1
        segment_store = self.home if home is None else home
        shard = make_shard(segment_store, self.store, uploads=True)  # type: ignore[arg-type]
        shard.restore(self.incarnation, self.name, self.store_id)
        return shard


def test_a_shard_without_its_home_comes_back_bit_equal(caplog: pytest.LogCaptureFixture) -> None:
    case, home = CommittedShard(), MemoryKeyValueStore()
    with caplog.at_level(logging.INFO):
        restored = case.restore(home)
    assert state_of(restored) == case.rows
    (line,) = (r.message for r in caplog.records if "fetched" in r.message)
    rows, num_bytes = sum(s.rows for s in case.segments), sum(s.copy.bytes for s in case.segments if s.copy)
    assert re.search(rf"fetched 3 segments .* {rows} rows, {num_bytes} bytes in [\d.]+ s$", line)
    assert restored.stats()["fetched_bytes"] == num_bytes
    push(restored, 1, ITEM, (1, 2))
    case.name = commit(restored, case.store, 4)  # type: ignore[arg-type]
    rows_now = state_of(restored)
    assert state_of(case.restore(home)) == rows_now == state_of(case.restore(MemoryKeyValueStore()))


@pytest.mark.parametrize("damage", ["directory", "segment", "block", "absent block", "everything"])
def test_exactly_what_is_damaged_is_fetched(damage: str) -> None:
    case = CommittedShard()
    match damage:
        case "directory":
            case.home.write([(b"d/2-1", b"damaged")])
        case "segment":
            case.home.write((), [*list(case.home.keys(b"b/2-1/")), b"d/2-1"])
        case "block":
            case.home.write([(next(case.home.keys(b"b/2-1/")), b"damaged")])
        case "absent block":
            case.home.write((), [next(case.home.keys(b"b/2-1/"))])
        case "everything":
            case.home.write((), list(case.home.keys(b"")))
    restored = case.restore()
    assert state_of(restored) == case.rows
    fetched_names = ("1-1", "2-1", "3-1") if damage == "everything" else ("2-1",)
    assert restored.stats()["fetched_bytes"] == sum(
        s.copy.bytes for s in case.segments if s.name in fetched_names and s.copy
    )
    assert restored.segments.check(case.segments, range(64)) == {}


def test_a_restore_of_an_intact_home_fetches_nothing() -> None:
    case = CommittedShard()
    assert state_of(case.restore()) == case.rows
    case.shard.restore(5, case.name, case.store_id)
    assert state_of(case.shard) == case.rows and case.shard.stats()["fetched_bytes"] == 0


def test_a_kept_commit_is_restored_after_the_home_has_deleted_its_segments() -> None:
    case = CommittedShard()
    first, rows = case.name, case.rows
    for seq in range(4, 40):
        push(case.shard, seq + 7, ITEM, tuple(range(seq % 5, 40)))
        commit(case.shard, case.store, seq)  # type: ignore[arg-type]
    assert "2-1" not in {key.split(b"/")[1].decode() for key in case.home.keys(b"d/")}
    case.name = first
    assert state_of(case.restore()) == rows


def test_a_running_shard_whose_disk_is_emptied_rolls_back_bit_equal() -> None:
    case = CommittedShard()
    case.home.write((), list(case.home.keys(b"")))
    case.shard.restore(5, case.name, case.store_id)
    assert state_of(case.shard) == case.rows


@pytest.mark.parametrize("loss", ["damaged", "absent"])
def test_rows_lost_at_home_and_in_the_store_are_reported_as_damage(loss: str) -> None:
    """The controller then tries the previous commit, whose segments are intact."""
    case = CommittedShard()
    if loss == "damaged":
        case.store.damage("segments/0-3-1")
    else:
        case.store.delete("segments/0-3-1")
    home = MemoryKeyValueStore()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"copy segments/0-3-1 in the checkpoint store"):
            case.restore(home)
    case.name = "manifests/00000002"
    assert case.restore(home).committed.seq == 2


def test_a_restore_waits_for_an_unavailable_store_and_keeps_fetched_segments() -> None:
    case, home = CommittedShard(), MemoryKeyValueStore()
    shard = make_shard(home, case.store, uploads=True)  # type: ignore[arg-type]
    reads, get_range = 0, case.store.get_range

    def fails_once(name: str, start: int, size: int) -> bytes:
        nonlocal reads
        reads += 1
        if name == "segments/0-2-1" and reads:
            case.store.get_range = get_range  # type: ignore[method-assign]
            raise UnavailableError("the store is away")
        return get_range(name, start, size)

    case.store.get_range = fails_once  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="away"):
        shard.restore(2, case.name, case.store_id)
    with pytest.raises(UnavailableError):
        pull_from(shard, ITEM, 1)
    first = shard.stats()["fetched_bytes"]
    shard.restore(3, case.name, case.store_id)
    assert state_of(shard) == case.rows and first > 0
    assert shard.stats()["fetched_bytes"] == sum(s.copy.bytes for s in case.segments if s.copy)


def test_an_empty_home_is_unavailable_as_long_as_a_segment_has_no_copy() -> None:
    case, home = CommittedShard(uploads=False), MemoryKeyValueStore()
    for _ in range(2):
        with pytest.raises(UnavailableError, match="mount its volume"):
            case.restore(home)
    assert not list(home.keys(b""))


def test_switching_copies_on_also_copies_older_segments() -> None:
    case = CommittedShard(uploads=False)
    restored = case.restore()
    push(restored, 1, ITEM, (5,))
    case.name = commit(restored, case.store, 4)  # type: ignore[arg-type]
    assert all(segment.copy for segment in case.segments)
    assert state_of(case.restore(MemoryKeyValueStore())) == state_of(restored)


@pytest.mark.parametrize("part", range(4))
def test_a_failed_upload_is_reported_as_unavailable_and_the_next_commit_has_everything(part: int) -> None:
    case = CommittedShard()
    case.store.before_part = lambda name, n: fail_upload() if n == part else None

    def fail_upload() -> None:
        raise UnavailableError("the store is away")

    case.shard.freeze(4, 0)
    push(case.shard, 11, ITEM, (30,))
    with pytest.raises(UnavailableError, match="away"):
        case.shard.write(4)
    case.shard.abort(4)
    assert case.store.list("segments") == [f"segments/0-{n}-1" for n in (1, 2, 3)]
    case.store.before_part = lambda name, n: None
    case.name = commit(case.shard, case.store, 5)  # type: ignore[arg-type]
    assert state_of(case.restore(MemoryKeyValueStore())) == state_of(case.shard)


def test_an_upload_reports_progress() -> None:
    case = CommittedShard()
    case.shard.freeze(4, 0)
    progress_values: list[int] = []
    case.store.before_part = lambda name, n: progress_values.append(case.shard.progress)
    case.shard.write(4)
    assert len(progress_values) > 2 and progress_values == sorted(set(progress_values))


def test_a_restore_reports_progress_while_it_searches_for_damage() -> None:
    case, progress_values = CommittedShard(), list[int]()

    class WatchedStore(MemoryKeyValueStore):
        """Records the shard's progress at each read of a damaged block."""

        def get(self, key: bytes) -> bytes | None:
            if key in damaged:
                progress_values.append(shard.progress)
            return super().get(key)

    home, damaged = WatchedStore(), frozenset[bytes]()
    for key in case.home.keys(b""):
        home.write([(key, case.home.get(key) or b"")])
    blocks = sorted(home.keys(b"b/"))
    damaged = frozenset({blocks[0], blocks[-1]})
    home.write([(key, b"damaged") for key in damaged])
    for name in case.store.list(manifests.SEGMENTS):
        case.store.damage(name)
    shard = make_shard(home, case.store, uploads=True)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        shard.restore(2, case.name, case.store_id)
    assert len(progress_values) > 3, "the restore and both searches for damage must read damaged blocks"
    assert progress_values == sorted(set(progress_values)), "progress must grow between two of these reads"
