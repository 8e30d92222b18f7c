"""Kafka → local engine → Kafka over in-memory topics: kills, snapshots, damaged snapshots, idle partitions, read-ahead."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from joiner.build import Output
from joiner.config import JoinerConfig
from joiner.local_engine import LocalEngine
from joiner.local_pump import Pump, Snapshots
from joiner.meters import Meters
from roo import roo_pb2 as pb
from roo.errors import CheckpointError
from roo.wire import Record
from runtime.checkpoint_store import FileStore
from runtime.clock import FakeClock
from runtime.health import Health
from runtime.kafka.topics import Partition
from tests.joiner import generated
from tests.joiner.cases import SCHEMA, SCHEMAS, impression, record

CONFIG = JoinerConfig(**generated.SETTINGS, checkpoint_interval_ms=100)  # type: ignore[arg-type]


class Killed(BaseException):
    """The process ends here and now."""


class MemorySource:
    """Records of a topic, from offsets on. Dies after `die_after` polls; stops the pump at the end."""

    def __init__(self, records: Sequence[Record], stop: threading.Event, clock: FakeClock, die_after: int = 1 << 30) -> None:
        self.records, self.stop, self.clock, self.die_after = list(records), stop, clock, die_after
        self.held: set[Partition] = set()

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        self.records = [r for r in self.records if r.offset >= offsets.get((r.topic, r.partition), 0)]

    def poll(self, max_records: int, timeout_s: float) -> Sequence[Record]:
        self.clock.advance(0.03)
        self.die_after -= 1
        if self.die_after < 0:
            raise Killed
        taken = [r for r in self.records if (r.topic, r.partition) not in self.held][:50]
        self.records = [r for r in self.records if r not in taken]
        if not self.records:
            self.stop.set()
        return taken

    def hold(self, partitions: Collection[Partition]) -> None:
        self.held = set(partitions)


class MemorySink:
    def __init__(self, *, away: bool = False) -> None:
        self.outputs: list[Output] = []
        self.away = away

    def write(self, outputs: Sequence[Output]) -> None:
        self.outputs += outputs

    def flush(self, stop: threading.Event) -> bool:
        return not self.away


def pump(
    records: Sequence[Record], home: Path, sink: MemorySink, die_after: int = 1 << 30, config: JoinerConfig = CONFIG
) -> Pump:
    stop, clock = threading.Event(), FakeClock()
    engine = LocalEngine(config, SCHEMA, SCHEMAS.get)
    source = MemorySource(records, stop, clock, die_after)
    made = Pump(
        config,
        engine,
        source,
        sink,
        Snapshots(FileStore(home)),
        clock=clock,
        meters=Meters(CollectorRegistry()),
        health=Health(60, clock),
    )
    made.stop = stop  # type: ignore[attr-defined]
    return made


def run(made: Pump) -> None:
    made.run(made.stop)  # type: ignore[attr-defined]


def test_killed_anywhere_and_started_again_it_writes_the_same_records(tmp_path: Path) -> None:
    records = generated.placed(generated.arrivals(5))
    undisturbed, killed = MemorySink(), MemorySink()
    run(pump(records, tmp_path / "a", undisturbed))
    for die_after in (3, 4, 7, 2, 9):
        with pytest.raises(Killed):
            run(pump(records, tmp_path / "b", killed, die_after))
    run(pump(records, tmp_path / "b", killed))
    assert len(killed.outputs) > len(undisturbed.outputs), "what came after a snapshot was written again"
    assert set(killed.outputs) == set(undisturbed.outputs)


def test_a_stop_writes_a_last_snapshot_from_which_nothing_is_read_again(tmp_path: Path) -> None:
    records = generated.placed(generated.arrivals(5))
    run(pump(records, tmp_path, MemorySink()))
    again = MemorySink()
    run(pump(records, tmp_path, again))
    assert again.outputs == []


def test_a_damaged_newest_snapshot_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    records = generated.placed(generated.arrivals(5))
    run(pump(records, tmp_path, MemorySink()))
    store = FileStore(tmp_path)
    names = store.list("snapshots")
    assert len(names) == 2, "older ones are deleted"
    store.put(names[-1], store.get(names[-1])[:-3])
    engine = LocalEngine(CONFIG, SCHEMA, SCHEMAS.get)
    assert Snapshots(store).restore(engine) == names[0]
    store.put(names[0], b"nothing")
    with pytest.raises(CheckpointError, match="none of 2 snapshots can be read"):
        Snapshots(store).restore(engine)


def test_no_snapshot_is_written_while_outputs_are_not_acknowledged(tmp_path: Path) -> None:
    run(pump([record(impression(1_000))], tmp_path, MemorySink(away=True)))
    assert FileStore(tmp_path).list("snapshots") == []


def test_a_partition_far_ahead_of_the_slowest_is_held_until_that_catches_up(tmp_path: Path) -> None:
    config = JoinerConfig(window_ms=100, read_ahead_ms=1_000)
    beats = [
        record(pb.Heartbeat(time_ms=ms), partition=p, offset=n) for n, (p, ms) in enumerate([(0, 5_000), (1, 3_000), (1, 4_500)])
    ]
    made = pump([*beats, record(pb.Heartbeat(time_ms=9_000), partition=2, offset=9)], tmp_path, MemorySink(), config=config)
    source = made.source
    assert isinstance(source, MemorySource)
    waiting, source.records = source.records[2:], source.records[:2]
    made.step()
    assert source.held == {("impressions", 0)}
    source.records = waiting
    made.step()
    assert source.held == {("impressions", 2)}


def test_idle_partitions_stop_holding_the_watermark_and_never_in_a_replay(tmp_path: Path) -> None:
    for replay, joined in ((False, True), (True, False)):
        config = JoinerConfig(window_ms=100, lateness_ms=0, idleness_ms=1_000, replay=replay)
        sink = MemorySink()
        made = pump([], tmp_path / str(replay), sink, config=config)
        made._heard_s = dict.fromkeys(made.engine.watermarks.newest_ms, 0.0)
        source = made.source
        assert isinstance(source, MemorySource)
        source.records = [record(impression(1_000))]
        made.step()
        for time_ms in range(1_100, 1_400, 100):
            source.clock.advance(0.5)
            source.records = [record(pb.Heartbeat(time_ms=time_ms))]
            made.step()
        assert bool(sink.outputs) is joined
