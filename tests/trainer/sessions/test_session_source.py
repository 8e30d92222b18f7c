"""Chunks of a session: the same for the same positions, sizes and bounds, however slowly its rows come."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.topics import Progress
from roostream.warehouse.sessions.sample_table import SampleTable
from roostream.warehouse.sessions.session import TableSplit
from roostream.warehouse.sessions.session_rows import LocalSessionRows, OpenSession, Piece, recent_sample_ids
from tests.trainer import samples
from tests.trainer.loops import PARTITIONS, Built, build
from tests.warehouse.memory_table import MemoryTable, table_of
from tests.warehouse.sessions.test_sample_table import SPEC, TOPICS, archive
from trainer.batch_source import NewestIds
from trainer.chunks import Chunk
from trainer.loop import LoopDependencies
from trainer.sessions.session_source import PhasedSource, SessionSource, open_session

EVEN, ODD = PARTITIONS
NUMBERS = [*range(1, 40), 3, 8, 41]


class SlowRows(LocalSessionRows):
    """Often not there yet."""

    def __init__(self, session: OpenSession, rows: MemoryTable, seed: int) -> None:
        super().__init__(session, rows)
        self.random, self.expected = random.Random(seed), list[Sequence[TableSplit]]()

    def expect(self, splits: Sequence[TableSplit], positions: Mapping[int, int], at_once: int) -> None:
        self.expected.append(splits)

    def piece(self, split: TableSplit, position: int, timeout_s: float = 0.0) -> Piece:
        return None if self.random.random() < 0.5 else super().piece(split, position)  # type: ignore[return-value]


def source(
    rows: int = 6, seed: int | None = None, slow: int | None = None, numbers: Sequence[int] = NUMBERS
) -> SessionSource:
    table = table_of(samples.records(list(numbers)), rows_of_file=rows, seed=seed)
    session = table.session(shuffle_seed=None)
    empty = table.empty()
    its = LocalSessionRows(session, table) if slow is None else SlowRows(session, table, slow)
    newest = lambda partition: NewestIds(*recent_sample_ids(session, table, partition, 10_000))
    made = SessionSource(
        session.order, its, empty, FakeClock(samples.T0), partitions=PARTITIONS, newest=newest
    )
    made.seek({})
    return made


def ids(chunk: Chunk | None) -> list[int]:
    assert chunk is not None
    return chunk.batch.sample_id_R.tolist()


def all_of(it: SessionSource, size: int = 5) -> list[list[int]]:
    found, nothing = [], 0
    while nothing < 20:
        chunk = it.poll(size, 0.0)
        nothing = 0 if chunk else nothing + 1
        found += [ids(chunk)] if chunk else []
    return found


def test_all_samples_come_once_in_full_chunks_plus_a_rest() -> None:
    chunks = all_of(source())
    assert sorted(n for chunk in chunks for n in chunk) == sorted(set(NUMBERS))
    assert {len(chunk) for chunk in chunks[:-1]} == {5}
    assert source().positions() == {EVEN: 0, ODD: 0}


@pytest.mark.parametrize("slow", range(3))
def test_chunks_do_not_depend_on_arrival_times(slow: int) -> None:
    assert all_of(source(seed=3, slow=slow)) == all_of(source(seed=3))


@pytest.mark.parametrize("seed", range(5))
def test_a_seek_to_any_chunk_repeats_the_same_chunks(seed: int) -> None:
    draw, it = random.Random(seed), source(seed=1)
    undisturbed, at, found = all_of(source(seed=1)), [it.positions()], list[list[int]]()
    while (chunk := it.poll(5, 0.0)) is not None:
        found.append(ids(chunk))
        at.append(at[-1] | chunk.after)
        assert it.positions() == at[-1]
        if draw.random() < 0.3:
            back = draw.randint(0, len(found))
            it.poll(draw.randint(1, 7), 0.0)  # read ahead, and forgotten
            it.seek(at[back])
            del found[back:], at[back + 1 :]
    assert found == undisturbed


def test_a_requested_partition_does_not_wait_for_others() -> None:
    it = source()
    assert all(n % 2 for n in ids(it.poll(4, 0.0, ODD)))
    assert not any(n % 2 for n in ids(it.poll(4, 0.0, EVEN)))
    assert all(n % 2 for n in ids(it.poll(4, 0.0, ODD)))


def test_a_worker_reads_only_its_partitions() -> None:
    it = source()
    it.assign([1])
    it.seek({ODD: 2, EVEN: 5})
    assert it.positions() == {ODD: 2}
    assert sorted(n for chunk in all_of(it) for n in chunk) == sorted({n for n in NUMBERS if n % 2})[2:]


def bounded(ends: Progress) -> SessionSource:
    it = source()
    it.bound(ends)
    return it


def test_chunks_are_cut_at_bounds_and_continue_after_them() -> None:
    it = bounded({EVEN: 3, ODD: 2})
    assert len(ids(it.poll(9, 0.0))) == 5 and not it.ended
    assert it.positions() == {EVEN: 3, ODD: 2}
    assert it.poll(9, 0.0) is None and it.ended
    it.bound({EVEN: 4, ODD: 4})
    assert not it.ended
    assert len(ids(it.poll(9, 0.0))) == 3


def test_a_partition_at_its_bound_gives_an_empty_chunk() -> None:
    it = bounded({EVEN: 3, ODD: 8})
    assert len(ids(it.poll(4, 0.0, EVEN))) == 3
    chunk = it.poll(4, 0.0, EVEN)
    assert ids(chunk) == [] and chunk is not None and chunk.after == {EVEN: 3}
    it.poll(8, 0.0, ODD)
    assert it.poll(4, 0.0, EVEN) is None and it.ended


def test_trailing_skipped_rows_end_the_session() -> None:
    it = source(rows=4, numbers=[2, 4, 6, 8, 4, 2])
    it.bound({EVEN: 6, ODD: 0})
    assert all_of(it, 2) == [[2, 4], [6, 8]]
    assert it.ended and it.positions() == {EVEN: 4, ODD: 0}, "behind what was given"


def test_newest_ids_are_known_once_the_session_is_trained() -> None:
    it = source()
    all_of(it)
    assert it.newest_ids({EVEN: 20, ODD: 21}) == {}
    found = it.newest_ids({EVEN: 20, ODD: 22})
    assert found.keys() == set(PARTITIONS) and 41 in found[ODD].sample_id.tolist()
    assert 1 not in found[ODD].sample_id.tolist()


def test_readers_get_the_next_splits_to_prefetch() -> None:
    it = source(slow=1)
    all_of(it)
    told = [[split.number for split in splits] for splits in it.rows.expected]  # type: ignore[attr-defined]
    assert told[0] == sorted(told[0]) and told[0][0] == 0 and told[-1] == []


def test_lag_is_counted_in_rows() -> None:
    it = source(slow=3)
    while (chunk := it.poll_remaining(9)) is None:
        it.poll(9, 0.0)
    assert 0 < len(ids(chunk)) <= 9
    lag = it.lag()
    assert lag[EVEN].records + lag[ODD].records == 42 - sum(it.positions().values())
    assert it.num_lost == 0
    it.close()


# Training from files is training from the topic: the same batches, the same bits


RECORDS = samples.records(list(range(1, 41)))


def from_files(place: Path) -> Built:
    archive(place, RECORDS)
    told = SampleTable(str(place)).newest(SPEC, TOPICS)
    assert told is not None

    def rewire(dependencies: LoopDependencies) -> LoopDependencies:
        def opened(told: object) -> object:
            return open_session(told, samples.schema(), PARTITIONS, 3_600_000, dependencies.clock)  # type: ignore[arg-type]

        return dataclasses.replace(dependencies, source=PhasedSource(dependencies.source, opened))  # type: ignore[arg-type]

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
