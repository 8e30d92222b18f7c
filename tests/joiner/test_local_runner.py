"""The local runner over in-memory topics: kills, snapshots, damaged snapshots, idle partitions and
read-ahead."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
import xxhash
from prometheus_client import CollectorRegistry

from joiner.config import JoinerConfig
from joiner.flink_client import FetchOffsets
from joiner.local_engine import LocalEngine
from joiner.local_runner import KafkaSink, LocalRunner, SnapshotStore
from joiner.main import check_engine
from joiner.metrics import JoinerMetrics
from joiner.outputs import Output
from roostream.errors import CheckpointError, ConfigError, OtherVersionError, UnavailableError
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.clock import FakeClock
from roostream.runtime.health import Health
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.retention_loss import CommittedOffset
from roostream.runtime.kafka.topics import EVENTS, Partition, all_partitions
from roostream.runtime.thread_group import StopBudget
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.joiner import generated
from tests.joiner.cases import SCHEMA, SCHEMAS, impression, record

CONFIG = JoinerConfig(**generated.SETTINGS, checkpoint_interval_ms=100)  # type: ignore[arg-type]


COMMITTED: dict[Partition, int] = {}
"""What the runners of the current test have committed to Kafka."""


@pytest.fixture(autouse=True)
def forget_commits() -> None:
    COMMITTED.clear()


class Killed(BaseException):
    """Simulates a kill: the runner ends at once."""


class MemorySource:
    """Records of a topic from the given offsets. Raises `Killed` after `die_after` polls; sets `stop` at the
    end of the records."""

    def __init__(
        self, records: Sequence[Record], stop: threading.Event, clock: FakeClock, die_after: int = 1 << 30
    ) -> None:
        self.records, self.stop, self.clock, self.die_after = list(records), stop, clock, die_after
        self.paused: set[Partition] = set()
        self.num_lost = 0

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        self.records = [r for r in self.records if r.offset >= offsets.get((r.topic, r.partition), 0)]

    def poll(self, max_records: int, timeout_s: float) -> Sequence[Record]:
        self.clock.advance(0.03)
        self.die_after -= 1
        if self.die_after < 0:
            raise Killed
        taken = [r for r in self.records if (r.topic, r.partition) not in self.paused][:50]
        self.records = [r for r in self.records if r not in taken]
        if not self.records:
            self.stop.set()
        return taken

    def pause(self, partitions: Collection[Partition]) -> None:
        self.paused = set(partitions)


class MemorySink:
    def __init__(self, *, is_unavailable: bool = False) -> None:
        self.outputs: list[Output] = []
        self.is_unavailable = is_unavailable

    def write(self, outputs: Sequence[Output]) -> None:
        self.outputs += outputs

    def flush(self, stop: threading.Event) -> bool:
        return not self.is_unavailable


def make_runner(
    records: Sequence[Record],
    home: Path,
    sink: MemorySink,
    die_after: int = 1 << 30,
    config: JoinerConfig = CONFIG,
) -> LocalRunner:
    stop, clock = threading.Event(), FakeClock()
    engine = LocalEngine(config, SCHEMA, SCHEMAS.get)
    source = MemorySource(records, stop, clock, die_after)
    runner = LocalRunner(
        config,
        engine,
        source,
        sink,
        SnapshotStore(FileStore(home)),
        commit_offsets=COMMITTED.update,
        clock=clock,
        metrics=JoinerMetrics(CollectorRegistry()),
        health=Health(60, clock),
    )
    runner.stop = stop  # type: ignore[attr-defined]
    return runner


def run(runner: LocalRunner) -> None:
    runner.run(runner.stop)  # type: ignore[attr-defined]


def test_after_kills_and_restarts_the_same_records_are_written(tmp_path: Path) -> None:
    records = generated.with_offsets(generated.arrivals(5))
    undisturbed, killed = MemorySink(), MemorySink()
    run(make_runner(records, tmp_path / "a", undisturbed))
    for die_after in (3, 4, 7, 2, 9):
        with pytest.raises(Killed):
            run(make_runner(records, tmp_path / "b", killed, die_after))
    run(make_runner(records, tmp_path / "b", killed))
    assert len(killed.outputs) > len(undisturbed.outputs), "records after a snapshot must be written again"
    assert set(killed.outputs) == set(undisturbed.outputs)


def test_a_stop_ends_the_runner_while_kafka_is_away(tmp_path: Path) -> None:
    budgets: list[StopBudget] = []
    sink = KafkaSink(Broker("127.0.0.1:9"), "", gives_up=lambda: not budgets[0].left_s())
    config = dataclasses.replace(CONFIG, checkpoint_interval_ms=3_600_000)
    runner = make_runner(generated.with_offsets(generated.arrivals(5)), tmp_path, sink, config=config)
    budgets.append(StopBudget(runner.stop, 0.1))  # type: ignore[attr-defined]
    program = threading.Thread(target=run, args=(runner,), daemon=True)
    program.start()
    program.join(60)
    assert not program.is_alive()
    assert FileStore(tmp_path).list("snapshots") == [], "outputs that Kafka does not have are in no snapshot"


def test_a_sink_that_waits_for_kafka_does_not_make_the_joiner_look_stalled(tmp_path: Path) -> None:
    class SlowSink(MemorySink):
        def write(self, outputs: Sequence[Output]) -> None:
            super().write(outputs)
            runner.clock.sleep(3_600)
            dead.append(runner.health.dead())

    dead: list[str] = []
    runner = make_runner(generated.with_offsets(generated.arrivals(5)), tmp_path, SlowSink())
    run(runner)
    assert len(dead) > 1 and not any(dead)


def test_a_stop_writes_a_snapshot_after_which_nothing_is_read_again(tmp_path: Path) -> None:
    records = generated.with_offsets(generated.arrivals(5))
    run(make_runner(records, tmp_path, MemorySink()))
    second_sink = MemorySink()
    run(make_runner(records, tmp_path, second_sink))
    assert second_sink.outputs == []


def test_a_damaged_newest_snapshot_is_skipped_for_the_one_before(tmp_path: Path) -> None:
    records = generated.with_offsets(generated.arrivals(5))
    unfinished = tmp_path / "snapshots" / ".roostream-unfinished.x"  # left by a killed process
    unfinished.parent.mkdir()
    unfinished.write_bytes(b"half")
    os.utime(unfinished, (0, 0))
    run(make_runner(records, tmp_path, MemorySink()))
    store = FileStore(tmp_path)
    names = store.list("snapshots")
    assert len(names) == 2 == len(list(unfinished.parent.iterdir())), (
        "only the two newest snapshots may be kept"
    )
    store.put(names[-1], store.get(names[-1])[:-3])
    engine = LocalEngine(CONFIG, SCHEMA, SCHEMAS.get)
    assert SnapshotStore(store).restore(engine) == names[0]
    store.put(names[0], b"nothing")
    with pytest.raises(CheckpointError, match="none of 2 snapshots"):
        SnapshotStore(store).restore(engine)


def test_a_snapshot_of_another_version_is_not_skipped_for_the_one_before(tmp_path: Path) -> None:
    store, engine = FileStore(tmp_path), LocalEngine(CONFIG, SCHEMA, SCHEMAS.get)
    snapshots = SnapshotStore(store)
    snapshots.write(engine.snapshot())
    body = msgspec.msgpack.encode((99, None))
    snapshots.write(xxhash.xxh3_64_digest(body) + body)
    with pytest.raises(OtherVersionError, match="got 99"):
        snapshots.restore(engine)


def test_a_foreign_file_next_to_the_snapshots_neither_stops_the_joiner_nor_is_deleted(tmp_path: Path) -> None:
    store, engine = FileStore(tmp_path), LocalEngine(CONFIG, SCHEMA, SCHEMAS.get)
    store.put("snapshots/notes", b"not ours")
    assert SnapshotStore(store).restore(engine) == ""
    for _ in range(3):
        SnapshotStore(store).write(engine.snapshot())
    assert store.list("snapshots") == ["snapshots/00000002", "snapshots/00000003", "snapshots/notes"]


def test_no_snapshot_is_written_while_outputs_are_not_acknowledged(tmp_path: Path) -> None:
    run(make_runner([record(impression(1_000))], tmp_path, MemorySink(is_unavailable=True)))
    assert FileStore(tmp_path).list("snapshots") == []


class FullDisk(FileStore):
    """A directory that takes no files at its writes number `full`."""

    def __init__(self, root: Path, full: Collection[int]) -> None:
        super().__init__(root)
        self.full, self.num_writes = full, 0

    def put(self, name: str, data: bytes) -> None:
        self.num_writes += 1
        if self.num_writes in self.full:
            raise UnavailableError(f"{name} can't be written (No space left on device); free disk space")
        super().put(name, data)


def test_the_join_goes_on_while_the_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "roostream.joiner")
    records = generated.with_offsets(generated.arrivals(5))
    undisturbed, sink = MemorySink(), MemorySink()
    run(make_runner(records, tmp_path / "a", undisturbed))
    runner, store = make_runner(records, tmp_path / "b", sink), FullDisk(tmp_path / "b", {1, 2})
    runner.snapshots = SnapshotStore(store)
    run(runner)
    assert store.num_writes > 2 and sink.outputs == undisturbed.outputs, "nothing is joined twice"
    assert caplog.text.count("No space left") == 1 and "can be written again" in caplog.text
    after = MemorySink()
    run(make_runner(records, tmp_path / "b", after))
    assert after.outputs == [], "the last snapshot has all records"


def test_a_partition_far_ahead_waits_for_the_slowest(tmp_path: Path) -> None:
    config = JoinerConfig(window_ms=100, read_ahead_ms=1_000)
    heartbeats = [
        record(pb.Heartbeat(time_ms=ms), partition=p, offset=n)
        for n, (p, ms) in enumerate([(0, 5_000), (1, 3_000), (1, 4_500)])
    ]
    runner = make_runner(
        [*heartbeats, record(pb.Heartbeat(time_ms=9_000), partition=2, offset=9)],
        tmp_path,
        MemorySink(),
        config=config,
    )
    source = runner.consumer
    assert isinstance(source, MemorySource)
    waiting, source.records = source.records[2:], source.records[:2]
    runner.step()
    assert source.paused == {("impressions", 0)}
    source.records = waiting
    runner.step()
    assert source.paused == {("impressions", 2)}


def test_idle_partitions_stop_holding_the_watermark_and_never_in_a_replay(tmp_path: Path) -> None:
    for replay, joined in ((False, True), (True, False)):
        config = JoinerConfig(window_ms=100, engine="local", lateness_ms=0, idleness_ms=1_000, replay=replay)
        sink = MemorySink()
        runner = make_runner([], tmp_path / str(replay), sink, config=config)
        source = runner.consumer
        assert isinstance(source, MemorySource)
        source.records = [record(impression(1_000))]
        runner.step()
        for time_ms in range(1_100, 1_400, 100):
            source.clock.advance(0.5)
            source.records = [record(pb.Heartbeat(time_ms=time_ms))]
            runner.step()
        assert bool(sink.outputs) is joined


def step_through(runner: LocalRunner, records: Sequence[Record], seconds: float = 0.1) -> None:
    """Send one record per step, `seconds` apart. Records of paused partitions wait in the source."""
    source = runner.consumer
    assert isinstance(source, MemorySource)
    for r in records:
        source.clock.advance(seconds)
        source.records.append(r)
        runner.step()


def test_a_silent_partition_does_not_stop_the_others(tmp_path: Path) -> None:
    """One partition has one event and then none. The other partitions go on beyond what may be read ahead."""
    config = JoinerConfig(window_ms=100, engine="local", lateness_ms=0, idleness_ms=1_000, read_ahead_ms=600)
    sink = MemorySink()
    runner = make_runner([], tmp_path, sink, config=config)
    busy = [p for p in runner.engine.partitions if p != ("impressions", 0)]
    heartbeats = [
        record(pb.Heartbeat(time_ms=ms), partition=p, offset=ms)._replace(topic=topic)
        for ms in range(1_000, 6_000, 100)
        for topic, p in busy
    ]
    step_through(runner, [record(impression(1_000)), *heartbeats])
    source = runner.consumer
    assert isinstance(source, MemorySource)
    assert not source.paused and not source.records and [o.topic for o in sink.outputs] == ["samples"]
    assert runner.engine.watermark_ms == 5_899


def test_a_paused_partition_is_not_idle(tmp_path: Path) -> None:
    config = JoinerConfig(window_ms=100, engine="local", lateness_ms=0, idleness_ms=1_000, read_ahead_ms=600)
    runner = make_runner([], tmp_path, MemorySink(), config=config)
    first, *others = runner.engine.partitions
    heartbeat = {
        p: record(pb.Heartbeat(time_ms=1_000), partition=p[1])._replace(topic=p[0])
        for p in runner.engine.partitions
    }
    step_through(
        runner,
        [
            *heartbeat.values(),
            heartbeat[first]._replace(timestamp_ms=2_000, value=record(pb.Heartbeat(time_ms=2_000)).value),
        ],
    )
    assert isinstance(runner.consumer, MemorySource) and runner.consumer.paused == {first}
    step_through(runner, [heartbeat[others[0]]] * 30)
    assert first not in runner.engine.watermarks.idle and set(others[1:]) == runner.engine.watermarks.idle


FAR_MS = 10**13


@pytest.mark.parametrize(
    "far",
    [
        Record("impressions", 0, 0, FAR_MS, None, b"garbage"),
        record(impression(FAR_MS, request="far")),
        record(impression(FAR_MS))._replace(timestamp_ms=FAR_MS + 1),
        record(pb.Heartbeat(time_ms=2_000))._replace(timestamp_ms=FAR_MS),
    ],
    ids=[
        "garbage",
        "an event",
        "a timestamp that differs from the event's time",
        "a heartbeat with another timestamp",
    ],
)
def test_one_record_from_far_ahead_does_not_stop_the_join(tmp_path: Path, far: Record) -> None:
    sink = MemorySink()
    config = JoinerConfig(window_ms=100, lateness_ms=0, replay=True)
    runner = make_runner([], tmp_path, sink, config=config)
    partitions = runner.engine.partitions
    heartbeats = [
        record(pb.Heartbeat(time_ms=ms), partition=p, offset=ms)._replace(topic=topic)
        for ms in range(1_000, 3_000, 100)
        for topic, p in partitions
    ]
    step_through(runner, [*heartbeats[:8], far, record(impression(1_000)), *heartbeats[8:]])
    source = runner.consumer
    assert isinstance(source, MemorySource)
    assert not source.paused and not source.records and runner.engine.watermark_ms == 2_899
    assert "samples" in [o.topic for o in sink.outputs]


def test_a_record_waits_for_its_unreadable_schema_and_is_then_joined(tmp_path: Path) -> None:
    sink, tries = MemorySink(), []
    runner = make_runner([], tmp_path, sink, config=JoinerConfig(window_ms=100))

    def readable_at_the_third_try(fingerprint: int) -> object:
        tries.append(fingerprint)
        if len(tries) < 3:
            raise CheckpointError("the schema's file is damaged")
        return SCHEMA

    runner.engine.decoder.registry = readable_at_the_third_try  # type: ignore[assignment]
    step_through(runner, [record(impression(1_000))])
    assert len(tries) == 3 and sink.outputs == [] and runner.engine.num_keys == 1


def test_a_restart_remembers_the_heartbeats_of_producers(tmp_path: Path) -> None:
    config = JoinerConfig(window_ms=100, lateness_ms=0)
    runner = make_runner([], tmp_path, MemorySink(), config=config)
    step_through(
        runner, [record(pb.Heartbeat(time_ms=ms, producer=name)) for ms, name in ((1_000, "a"), (1_200, "b"))]
    )
    restored = LocalEngine(config, SCHEMA, SCHEMAS.get)
    restored.restore(runner.engine.snapshot())
    restored.process(record(pb.Heartbeat(time_ms=9_000, producer="b")))
    assert restored.watermarks.reached_ms["impressions", 0] == 1_000


@pytest.mark.parametrize("engine", ["flink", "local"])
def test_another_engine_does_not_join_everything_again(engine: str, tmp_path: Path) -> None:
    """Samples that are older than the dedupe horizon would be trained a second time."""

    def committed(offset: int) -> Callable[[], FetchOffsets]:
        return lambda: lambda: {("impressions", 0): CommittedOffset(0, offset)}

    config, stop = JoinerConfig(engine=engine, home=str(tmp_path)), threading.Event()
    check_engine(config, committed(-1), stop)
    if engine == "flink":
        check_engine(config, committed(7), stop)
        SnapshotStore(FileStore(tmp_path)).write(b"state")
        with pytest.raises(ConfigError, match="engine = 'local'"):
            check_engine(config, committed(-1), stop)
    else:
        with pytest.raises(UnavailableError, match="engine = 'flink'"):
            check_engine(config, committed(7), stop)
        SnapshotStore(FileStore(tmp_path)).write(b"state")
        check_engine(config, committed(7), stop)


def committed_offsets() -> FetchOffsets:
    return lambda: {
        p: CommittedOffset(0, COMMITTED.get(p, -1)) for p in all_partitions(EVENTS, CONFIG.partitions)
    }


def test_a_home_that_lost_its_snapshots_does_not_join_everything_again(tmp_path: Path) -> None:
    config, stop = JoinerConfig(engine="local", home=str(tmp_path)), threading.Event()
    check_engine(config, committed_offsets, stop)
    run(make_runner(generated.with_offsets(generated.arrivals(5)), tmp_path, MemorySink()))
    check_engine(config, committed_offsets, stop)
    (tmp_path / "snapshots").rename(tmp_path / "elsewhere")
    with pytest.raises(UnavailableError, match=f"expected a snapshot in {tmp_path}"):
        check_engine(config, committed_offsets, stop)


def test_a_joiner_that_has_read_nothing_may_lose_its_home(tmp_path: Path) -> None:
    runner = make_runner([], tmp_path, MemorySink())
    assert runner.checkpoint(threading.Event()) and not COMMITTED


def test_no_snapshot_is_written_in_the_place_of_a_disk_that_is_no_longer_mounted(tmp_path: Path) -> None:
    """The joiner would later continue from the snapshots of the disk, and join again what came since."""
    records = generated.with_offsets(generated.arrivals(5))
    runner = make_runner(records, tmp_path, MemorySink())
    assert runner.checkpoint(runner.stop)  # type: ignore[attr-defined]
    (tmp_path / "snapshots").rename(tmp_path / "elsewhere")
    COMMITTED.clear()
    assert not runner.checkpoint(runner.stop) and not COMMITTED  # type: ignore[attr-defined]
    assert SnapshotStore(FileStore(tmp_path)).names() == []
    (tmp_path / "elsewhere").rename(tmp_path / "snapshots")
    assert runner.checkpoint(runner.stop)  # type: ignore[attr-defined]
