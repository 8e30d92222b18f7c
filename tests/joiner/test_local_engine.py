"""The local engine: watermarks over partitions, timers, snapshots, and outputs equal to the oracle's over a
whole stream."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping

import msgspec
import pytest
import xxhash

from joiner.config import JoinerConfig
from joiner.local_engine import LocalEngine, PartitionTime, Watermarks
from joiner.outputs import Output
from roostream.errors import CheckpointError, ConfigError
from roostream.runtime.event_time import START
from roostream.schema.ids import key_bytes
from roostream.wire import roo_pb2 as pb
from roostream.wire.event_checks import MAX_TIME_MS
from roostream.wire.records import Record
from tests.joiner import generated
from tests.joiner.cases import SCHEMA, SCHEMAS, impression, record, samples, view_of
from tests.joiner.oracle import join_all

CONFIG = JoinerConfig(**generated.SETTINGS)  # type: ignore[arg-type]


def engine(config: JoinerConfig = CONFIG, topics: Mapping[str, str] | None = None) -> LocalEngine:
    return LocalEngine(config, SCHEMA, SCHEMAS.get, topics or {})


def outputs_of(records: list[Record], engine_: LocalEngine | None = None) -> list[Output]:
    engine_ = engine_ or engine()
    return [o for r in records for o in engine_.process(r)]


def unordered(outputs: list[Output]) -> Counter[Output]:
    """Count outputs regardless of order. Dead letters are compared without their value, because it names the
    copy of an event that arrived first."""
    return Counter(o._replace(value=b"") if o.topic == "dead_letters" else o for o in outputs)


def test_the_watermark_waits_for_all_partitions_and_equals_the_slowest() -> None:
    join_engine = engine()
    for r in generated.on_every_partition(pb.Heartbeat(time_ms=5_000))[:-1]:
        join_engine.process(r)
    assert join_engine.watermark_ms == START
    join_engine.process(record(pb.Heartbeat(time_ms=9_000), partition=3)._replace(topic="engagements"))
    assert join_engine.watermark_ms == 5_000 - 1_000 - 1


@pytest.mark.parametrize("time_ms", [0, -5, MAX_TIME_MS + 1, (1 << 63) - 1])
def test_heartbeats_and_end_markers_with_impossible_times_are_ignored_as_in_flink(time_ms: int) -> None:
    join_engine = engine()
    for mark in (pb.Heartbeat(time_ms=time_ms), pb.EndMarker(time_ms=time_ms)):
        assert outputs_of(generated.on_every_partition(mark), join_engine) == []
    assert join_engine.watermark_ms == START


def test_a_record_is_joined_before_it_moves_the_watermark() -> None:
    join_engine = engine(JoinerConfig(window_ms=10, lateness_ms=0))
    for r in generated.on_every_partition(pb.Heartbeat(time_ms=100)):
        join_engine.process(r)
    outputs = outputs_of([record(impression(100))], join_engine)
    assert outputs == [] and join_engine.num_keys == 1
    outputs = outputs_of(generated.on_every_partition(pb.Heartbeat(time_ms=111)), join_engine)
    assert [s.message.close_ms for s in samples(outputs)] == [110]
    assert outputs[0].timestamp_ms == 110


@pytest.mark.parametrize("seed", [1, 2])
def test_a_whole_stream_equals_the_oracle(seed: int) -> None:
    outputs = outputs_of(generated.with_offsets(generated.arrivals(seed)))
    by_key = defaultdict(list)
    for m in generated.messages(seed):
        by_key[key_bytes(m.header.user_id, m.header.session_id, m.header.request_id)].append(m)
    dead: Counter[str] = Counter()
    expected_samples, expected_corrections = {}, {}
    for messages in by_key.values():
        result = join_all(messages, CONFIG.rules, SCHEMAS)
        dead += _by_reason(result.dead)
        expected_samples |= {
            r: (s["close"], s["labels"], s["num_duplicates"]) for r, s in result.samples.items()
        }
        expected_corrections |= {i: (c["before"], c["after"]) for i, c in result.corrections.items()}
    found = {}
    for s in samples(outputs):
        m = s.message
        close = (m.close_ms, pb.CloseReason.Name(m.close_reason))
        found[m.header.request_id] = (close, s.labels, m.num_duplicates)
    corrections = [view_of(o) for o in outputs if o.topic == "corrections"]
    assert found == expected_samples
    assert {c.events[0]: (c.labels_before, c.labels) for c in corrections} == expected_corrections
    from_decoding = {"undecodable": 2, "unknown_type": 1, "unknown_schema": 1, "non_finite": 1}
    assert Counter(o.reason for o in outputs if o.topic == "dead_letters") == dead + Counter(from_decoding)
    assert len({close[1] for close, _, _ in found.values()}) == 3, (
        "the stream must contain all three close reasons"
    )
    assert corrections and {"no_request", "item_not_shown", "after_close", "too_late"} <= set(dead)


def _by_reason(dead: Counter[tuple[object, str]]) -> Counter[str]:
    out: Counter[str] = Counter()
    for (_, reason), n in dead.items():
        out[reason] += n
    return out


def test_another_interleaving_of_the_partitions_gives_the_same_outputs() -> None:
    records = generated.with_offsets(generated.arrivals(3))
    queues: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for r in reversed(records):
        queues[r.topic, r.partition].append(r)
    rng, mixed = random.Random(0), []
    while queues:
        partition_ = rng.choice(sorted(queues))
        mixed += [
            queues[partition_].pop() for _ in range(min(rng.randrange(1, 200), len(queues[partition_])))
        ]
        if not queues[partition_]:
            del queues[partition_]
    assert unordered(outputs_of(records)) == unordered(outputs_of(mixed))


def test_a_snapshot_at_any_moment_continues_with_equal_outputs() -> None:
    records = generated.with_offsets(generated.arrivals(4))
    uninterrupted, first = engine(), engine()
    expected = outputs_of(records, uninterrupted)
    cut = len(records) // 2
    outputs = outputs_of(records[:cut], first)
    second = engine()
    second.restore(first.snapshot())
    assert second.next_offsets == first.next_offsets and second.watermark_ms == first.watermark_ms
    assert outputs + outputs_of(records[cut:], second) == expected


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:20] + b"\xff" + b[21:], lambda b: b""])
def test_a_damaged_snapshot_is_refused_by_its_checksum(damage) -> None:  # type: ignore[no-untyped-def]
    join_engine = engine()
    join_engine.process(record(impression(100)))
    with pytest.raises(CheckpointError, match=r"checksum|can't be read"):
        engine().restore(damage(join_engine.snapshot()))


def test_a_snapshot_of_another_format_is_refused() -> None:
    body = engine().snapshot()[8:]
    version, state = msgspec.msgpack.decode(body)
    assert version == 3, "when the format changes, raise its version and either read the old one or refuse it"
    other = msgspec.msgpack.encode((2, state))
    with pytest.raises(CheckpointError, match="expected a snapshot of format 3, got 2"):
        engine().restore(xxhash.xxh3_64_digest(other) + other)


MAX_MS, SILENT_MS = 1_000, 5_000


def partition_after(*times_ms: int) -> PartitionTime:
    partition_time = PartitionTime()
    for time_ms in times_ms:
        partition_time.event(time_ms, MAX_MS)
    return partition_time


def test_an_event_moves_the_time_of_its_partition_and_an_older_one_does_not() -> None:
    assert partition_after(100, 300, 200).newest_ms == 300


def test_one_event_from_far_ahead_never_moves_the_time() -> None:
    assert partition_after(100, 10**10).newest_ms == 100
    assert partition_after(100, 10**10, 200).newest_ms == 200
    assert partition_after(100, 10**10, 200, 10**10, 300).newest_ms == 300, (
        "the second jump does not confirm the first, because an ordinary event lies between"
    )


def test_a_step_of_exactly_the_bound_is_no_jump() -> None:
    assert (
        partition_after(100, 100 + MAX_MS).newest_ms == 1_100
        and partition_after(100, 101 + MAX_MS).newest_ms == 100
    )


def test_a_pause_of_a_partition_needs_two_events_to_be_confirmed() -> None:
    assert partition_after(100, 50_000, 50_007).newest_ms == 50_000
    assert partition_after(100, 50_000, 50_007, 50_008).newest_ms == 50_008
    assert partition_after(100, 10**10, 50_000, 50_001).newest_ms == 50_001, (
        "the smaller of the two jumps counts"
    )


def test_of_several_producers_the_slowest_holds_the_partition() -> None:
    partition_time = PartitionTime()
    partition_time.heartbeat(1_000, "a", SILENT_MS)
    partition_time.heartbeat(1_100, "b", SILENT_MS)
    partition_time.heartbeat(4_000, "a", SILENT_MS)
    partition_time.event(4_100, MAX_MS)
    assert partition_time.reached_ms(SILENT_MS) == 1_100
    partition_time.heartbeat(900, "b", SILENT_MS)
    assert partition_time.reached_ms(SILENT_MS) == 1_100, "a repeated older heartbeat must change nothing"
    partition_time.heartbeat(4_050, "b", SILENT_MS)
    assert partition_time.reached_ms(SILENT_MS) == 4_000


def test_a_producer_that_is_silent_for_too_long_no_longer_holds_the_partition() -> None:
    partition_time = PartitionTime()
    for producer in "ab":
        partition_time.heartbeat(1_000, producer, SILENT_MS)
    partition_time.heartbeat(6_000, "a", SILENT_MS)
    assert partition_time.reached_ms(SILENT_MS) == 1_000, "exactly the limit is not too long"
    partition_time.event(6_001, MAX_MS)
    assert partition_time.reached_ms(SILENT_MS) == 6_001
    partition_time.heartbeat(6_001, "a", SILENT_MS)
    assert set(partition_time.heartbeats) == {"a"}


def test_unnamed_heartbeats_and_end_markers_belong_to_no_producer() -> None:
    partition_time = PartitionTime()
    partition_time.heartbeat(1_000, "", SILENT_MS)
    partition_time.heartbeat(1_100, "a", SILENT_MS)
    assert partition_time.reached_ms(SILENT_MS) == 1_100
    partition_time.heartbeat(1_050, "b", SILENT_MS)
    partition_time.end_marker(1_200)
    assert partition_time.reached_ms(SILENT_MS) == 1_200, "an end marker ends all earlier producers"


ONE, TWO, THREE = ("impressions", 0), ("impressions", 1), ("impressions", 2)


def test_the_watermark_follows_the_slowest_busy_partition_and_never_goes_back() -> None:
    marks = Watermarks([ONE, TWO], 10)
    assert marks.observe(ONE, 500) == START
    assert [marks.observe(TWO, 300), marks.observe(ONE, 600), marks.observe(TWO, 550)] == [289, 289, 539]
    assert marks.observe(TWO, 200) == 539
    assert [marks.observe(TWO, 560), marks.observe(TWO, 700), marks.observe(ONE, 900)] == [549, 589, 689]


def test_an_idle_partition_holds_the_watermark_again_after_a_record() -> None:
    marks = Watermarks([ONE, TWO], 0)
    marks.observe(ONE, 500)
    marks.observe(TWO, 500)
    marks.set_idle(TWO)
    assert marks.observe(ONE, 1_000) == 999
    assert marks.observe(TWO, 600) == 999
    assert marks.observe(ONE, 5_000) == 999, "the slow partition counts again"
    assert marks.observe(TWO, 5_000) == 4_999


def test_idle_partitions_do_not_limit_reading_ahead() -> None:
    marks = Watermarks([ONE, TWO, THREE], 0)
    for partition, reached_ms in ((ONE, 100), (TWO, 7_000), (THREE, 5_000)):
        marks.observe(partition, reached_ms)
    assert marks.ahead_ms(TWO) == 6_900
    marks.set_idle(ONE)
    assert (marks.ahead_ms(TWO), marks.ahead_ms(THREE)) == (2_000, 0)


def test_a_window_halved_at_a_restore_leaves_no_request_behind() -> None:
    before = engine(JoinerConfig(window_ms=100, lateness_ms=0))

    def beats(at_ms: int) -> list[Record]:
        return generated.on_every_partition(pb.Heartbeat(time_ms=at_ms))

    outputs_of([*beats(900), record(impression(1_000)), *beats(1_101)], before)
    restored = engine(JoinerConfig(window_ms=50, lateness_ms=0))
    restored.restore(before.snapshot())
    assert restored.num_requests == before.num_requests == [0, 0, 1, 0], "the request must be closed"
    outputs_of(beats(2_101), restored)
    assert restored.num_requests == [0, 0, 0, 0]
    assert restored.num_keys == 0


@pytest.mark.parametrize(("window_ms", "changed"), [(100, False), (50, True)])
def test_changed_rules_are_detected_at_a_restore(
    window_ms: int, changed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = engine(JoinerConfig(window_ms=100, lateness_ms=0))
    restored = engine(JoinerConfig(window_ms=window_ms, lateness_ms=0))
    restored.restore(before.snapshot())
    assert restored.rules_changed is changed
    assert ['"window_ms": 50' in r.getMessage() for r in caplog.records] == [True] * changed


def test_a_snapshot_whose_offsets_are_of_deleted_topics_is_refused() -> None:
    before = engine(topics={"impressions": "A", "engagements": "B"})
    outputs_of([record(impression(1_000))], before)
    other = engine(topics={"impressions": "A", "engagements": "C"})
    with pytest.raises(ConfigError, match="created again"):
        other.restore(before.snapshot())
    assert other.num_keys == 0, "the engine must be unchanged"
    same = engine(topics={"impressions": "A", "engagements": "B"})
    same.restore(before.snapshot())
    assert same.num_keys == 1
    engine().restore(before.snapshot())  # a replay in one process has no topics


def test_a_snapshot_that_names_no_topics_is_accepted() -> None:
    before = engine()
    outputs_of([record(impression(1_000))], before)
    restored = engine(topics={"impressions": "A", "engagements": "B"})
    restored.restore(before.snapshot())
    assert restored.num_keys == 1
