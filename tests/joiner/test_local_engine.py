"""The local engine: watermark over partitions, timers, snapshots, and the same outputs as the oracle on a
whole stream."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import msgspec
import pytest
import xxhash

from joiner.config import JoinerConfig
from joiner.local_engine import LocalEngine, PartitionTime, Watermarks
from joiner.outputs import Output
from roostream.errors import CheckpointError
from roostream.runtime.event_time import START
from roostream.schema.ids import key_bytes
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.joiner import generated
from tests.joiner.cases import SCHEMA, SCHEMAS, impression, record, samples, seen
from tests.joiner.oracle import join_all

CONFIG = JoinerConfig(**generated.SETTINGS)  # type: ignore[arg-type]


def engine(config: JoinerConfig = CONFIG) -> LocalEngine:
    return LocalEngine(config, SCHEMA, SCHEMAS.get)


def outputs_of(records: list[Record], through: LocalEngine | None = None) -> list[Output]:
    through = through or engine()
    return [o for r in records for o in through.process(r)]


def unordered(outputs: list[Output]) -> Counter[Output]:
    """Dead letters name the copy of an event that came first, and a tie may be broken by arrival: left
    out."""
    return Counter(o._replace(value=b"") if o.topic == "dead_letters" else o for o in outputs)


def test_the_watermark_waits_for_every_partition_of_both_topics_and_is_the_slowest_ones() -> None:
    joined = engine()
    for r in generated.everywhere(pb.Heartbeat(time_ms=5_000))[:-1]:
        joined.process(r)
    assert joined.watermark_ms == START
    joined.process(record(pb.Heartbeat(time_ms=9_000), partition=3)._replace(topic="engagements"))
    assert joined.watermark_ms == 5_000 - 1_000 - 1


def test_a_record_is_joined_before_it_moves_the_watermark() -> None:
    joined = engine(JoinerConfig(window_ms=10, lateness_ms=0))
    for r in generated.everywhere(pb.Heartbeat(time_ms=100)):
        joined.process(r)
    outputs = outputs_of([record(impression(100))], joined)
    assert outputs == [] and joined.num_keys == 1
    outputs = outputs_of(generated.everywhere(pb.Heartbeat(time_ms=111)), joined)
    assert [s.message.close_ms for s in samples(outputs)] == [110]
    assert outputs[0].timestamp_ms == 110


@pytest.mark.parametrize("seed", [1, 2])
def test_a_whole_stream_equals_the_oracle(seed: int) -> None:
    outputs = outputs_of(generated.placed(generated.arrivals(seed)))
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
    got = {}
    for s in samples(outputs):
        m = s.message
        close = (m.close_ms, pb.CloseReason.Name(m.close_reason))
        got[m.header.request_id] = (close, s.labels, m.num_duplicates)
    corrections = [seen(o) for o in outputs if o.topic == "corrections"]
    assert got == expected_samples
    assert {c.events[0]: (c.labels_before, c.labels) for c in corrections} == expected_corrections
    from_decoding = {"undecodable": 2, "unknown_type": 1, "unknown_schema": 1, "non_finite": 1}
    assert Counter(o.reason for o in outputs if o.topic == "dead_letters") == dead + Counter(from_decoding)
    assert len({close[1] for close, _, _ in got.values()}) == 3, "all three triggers took part"
    assert corrections and {"no_request", "item_not_shown", "after_close", "too_late"} <= set(dead)


def _by_reason(dead: Counter[tuple[object, str]]) -> Counter[str]:
    out: Counter[str] = Counter()
    for (_, reason), n in dead.items():
        out[reason] += n
    return out


def test_another_interleaving_of_the_partitions_gives_the_same_outputs() -> None:
    records = generated.placed(generated.arrivals(3))
    queues: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for r in reversed(records):
        queues[r.topic, r.partition].append(r)
    rng, mixed = random.Random(0), []
    while queues:
        split = rng.choice(sorted(queues))
        mixed += [queues[split].pop() for _ in range(min(rng.randrange(1, 200), len(queues[split])))]
        if not queues[split]:
            del queues[split]
    assert unordered(outputs_of(records)) == unordered(outputs_of(mixed))


def test_a_snapshot_at_any_moment_continues_with_equal_outputs() -> None:
    records = generated.placed(generated.arrivals(4))
    whole, first = engine(), engine()
    expected = outputs_of(records, whole)
    cut = len(records) // 2
    outputs = outputs_of(records[:cut], first)
    second = engine()
    second.restore(first.snapshot())
    assert second.next_offsets == first.next_offsets and second.watermark_ms == first.watermark_ms
    assert outputs + outputs_of(records[cut:], second) == expected


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:20] + b"\xff" + b[21:], lambda b: b""])
def test_a_damaged_snapshot_is_refused_by_its_checksum(damage) -> None:  # type: ignore[no-untyped-def]
    joined = engine()
    joined.process(record(impression(100)))
    with pytest.raises(CheckpointError, match=r"checksum|can't be read"):
        engine().restore(damage(joined.snapshot()))


def test_a_snapshot_of_another_format_is_refused() -> None:
    body = engine().snapshot()[8:]
    version, state = msgspec.msgpack.decode(body)
    assert version == 3, (
        "the number in the bytes is a promise: raise it with the form, and read the old one or say why not"
    )
    other = msgspec.msgpack.encode((2, state))
    with pytest.raises(CheckpointError, match="expected a snapshot of format 3, got 2"):
        engine().restore(xxhash.xxh3_64_digest(other) + other)


MAX_MS, SILENT_MS = 1_000, 5_000


def after(*times_ms: int) -> PartitionTime:
    split = PartitionTime()
    for time_ms in times_ms:
        split.event(time_ms, MAX_MS)
    return split


def test_an_event_moves_the_time_of_its_partition_and_an_older_one_does_not() -> None:
    assert after(100, 300, 200).newest_ms == 300


def test_one_event_from_far_ahead_moves_nothing_whatever_follows() -> None:
    assert after(100, 10**10).newest_ms == 100
    assert after(100, 10**10, 200).newest_ms == 200
    assert after(100, 10**10, 200, 10**10, 300).newest_ms == 300, "the one before it was an ordinary one"


def test_a_step_of_the_bound_is_no_jump() -> None:
    assert after(100, 100 + MAX_MS).newest_ms == 1_100 and after(100, 101 + MAX_MS).newest_ms == 100


def test_a_pause_of_a_partition_needs_two_events_to_be_confirmed() -> None:
    assert after(100, 50_000, 50_007).newest_ms == 50_000
    assert after(100, 50_000, 50_007, 50_008).newest_ms == 50_008
    assert after(100, 10**10, 50_000, 50_001).newest_ms == 50_001, "the smaller of the two"


def test_of_several_producers_the_slowest_holds_the_partition() -> None:
    split = PartitionTime()
    split.heartbeat(1_000, "a", SILENT_MS)
    split.heartbeat(1_100, "b", SILENT_MS)
    split.heartbeat(4_000, "a", SILENT_MS)
    split.event(4_100, MAX_MS)
    assert split.reached_ms(SILENT_MS) == 1_100
    split.heartbeat(900, "b", SILENT_MS)
    assert split.reached_ms(SILENT_MS) == 1_100, "a heartbeat that comes again says nothing new"
    split.heartbeat(4_050, "b", SILENT_MS)
    assert split.reached_ms(SILENT_MS) == 4_000


def test_a_producer_that_is_silent_for_too_long_holds_nothing_and_is_forgotten() -> None:
    split = PartitionTime()
    for producer in "ab":
        split.heartbeat(1_000, producer, SILENT_MS)
    split.heartbeat(6_000, "a", SILENT_MS)
    assert split.reached_ms(SILENT_MS) == 1_000, "just not too long"
    split.event(6_001, MAX_MS)
    assert split.reached_ms(SILENT_MS) == 6_001
    split.heartbeat(6_001, "a", SILENT_MS)
    assert set(split.heartbeats) == {"a"}


def test_unnamed_heartbeats_and_end_markers_belong_to_no_producer() -> None:
    split = PartitionTime()
    split.heartbeat(1_000, "", SILENT_MS)
    split.heartbeat(1_100, "a", SILENT_MS)
    assert split.reached_ms(SILENT_MS) == 1_100
    split.heartbeat(1_050, "b", SILENT_MS)
    split.end_marker(1_200)
    assert split.reached_ms(SILENT_MS) == 1_200, "whoever beat before has ended too"


ONE, TWO, THREE = ("impressions", 0), ("impressions", 1), ("impressions", 2)


def test_the_watermark_is_the_slowest_busy_partition_s_and_never_goes_back() -> None:
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
    assert marks.observe(ONE, 5_000) == 999, "the slow one is back"
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
        return generated.everywhere(pb.Heartbeat(time_ms=at_ms))

    outputs_of([*beats(900), record(impression(1_000)), *beats(1_101)], before)
    after = engine(JoinerConfig(window_ms=50, lateness_ms=0))
    after.restore(before.snapshot())
    assert after.num_requests == before.num_requests == [0, 0, 1, 0], "it is closed"
    outputs_of(beats(2_101), after)
    assert after.num_requests == [0, 0, 0, 0]
    assert after.num_keys == 0


@pytest.mark.parametrize(("window_ms", "changed"), [(100, False), (50, True)])
def test_changed_rules_are_noticed_at_a_restore(
    window_ms: int, changed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = engine(JoinerConfig(window_ms=100, lateness_ms=0))
    after = engine(JoinerConfig(window_ms=window_ms, lateness_ms=0))
    after.restore(before.snapshot())
    assert after.rules_changed is changed
    assert ['"window_ms": 50' in r.getMessage() for r in caplog.records] == [True] * changed
