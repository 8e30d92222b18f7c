"""Training from files is training from the topic: the same batches, the same bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from roostream.warehouse.sessions.sample_table import SampleTable
from tests.trainer import samples
from tests.trainer.loops import PARTITIONS, Built, build
from tests.warehouse.sessions.test_sample_table import TOPICS, WANTED, archive
from trainer.loop import LoopDependencies
from trainer.sessions.phased_source import PhasedSource
from trainer.sessions.session_source import open_session

RECORDS = samples.records(list(range(1, 41)))


def from_files(place: Path) -> Built:
    archive(place, RECORDS)
    told = SampleTable(str(place)).newest(WANTED, TOPICS)
    assert told is not None

    def rewire(wiring: LoopDependencies) -> LoopDependencies:
        def opened(told: object) -> object:
            return open_session(told, samples.schema(), PARTITIONS, 3_600_000, wiring.clock)  # type: ignore[arg-type]

        return dataclasses.replace(wiring, source=PhasedSource(wiring.source, opened))  # type: ignore[arg-type]

    built = build([], exact=True, rewire=rewire)
    built.loop.assign([0, 1], told)
    built.loop.reset()
    return built


def test_g11_training_from_files_equals_training_from_the_topic(tmp_path: Path) -> None:
    files, topic = from_files(tmp_path).train_all(), build(RECORDS, exact=True).train_all()
    assert files.loop.counts.requests == topic.loop.counts.requests == 40
    a, b = files.loop.snapshot(), topic.loop.snapshot()
    assert a.shared.keys() == b.shared.keys()
    assert all(np.array_equal(a.shared[k], b.shared[k], equal_nan=True) for k in a.shared)
    assert files.pushes() == topic.pushes()
    assert [p.SerializeToString() for p in files.predicted] == [
        p.SerializeToString() for p in topic.predicted
    ]


def test_after_the_session_the_worker_reads_the_stream(tmp_path: Path) -> None:
    built = from_files(tmp_path).train_all()
    assert built.offsets() == [20, 20]
    built.loop.assign([0, 1])
    built.loop.reset()
    assert built.offsets() == [0, 0] and not built.loop.step()
