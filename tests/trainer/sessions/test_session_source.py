"""The chunks of a session depend only on positions, sizes and bounds, and not on how fast its rows arrive."""

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
    """Rows that are often not available yet."""

    def __init__(self, session: OpenSession, rows: MemoryTable, seed: int) -> None:
        super().__init__(session, rows)
        self.random, self.expected = random.Random(seed), list[Sequence[TableSplit]]()

    def expect(self, splits: Sequence[TableSplit], positions: Mapping[int, int], at_once: int) -> None:
        self.expected.append(splits)

    def piece(self, split: TableSplit, position: int, timeout_s: float = 0.0) -> Piece:
        return None if self.random.random() < 0.5 else super().piece(split, position)  # type: ignore[return-value]


def make_source(
    rows: int = 6, seed: int | None = None, slow: int | None = None, numbers: Sequence[int] = NUMBERS
) -> SessionSource:
    table = table_of(samples.records(list(numbers)), rows_of_file=rows, seed=seed)
    session = table.session(shuffle_seed=None)
    empty = table.empty()
    session_rows = LocalSessionRows(session, table) if slow is None else SlowRows(session, table, slow)
    newest = lambda partition: NewestIds(*recent_sample_ids(session, table, partition, 10_000))
    source = SessionSource(
        session.order, session_rows, empty, FakeClock(samples.T0), partitions=PARTITIONS, newest=newest
    )
    source.seek({})
    return source


def ids(chunk: Chunk | None) -> list[int]:
    assert chunk is not None
    return chunk.batch.sample_id_R.tolist()


def all_chunks(source: SessionSource, size: int = 5) -> list[list[int]]:
    """Poll until 20 polls in a row return nothing."""
    chunks, num_empty = [], 0
    while num_empty < 20:
        chunk = source.poll(size, 0.0)
        num_empty = 0 if chunk else num_empty + 1
        chunks += [ids(chunk)] if chunk else []
    return chunks


def test_all_samples_come_once_in_full_chunks_plus_a_rest() -> None:
    chunks = all_chunks(make_source())
    assert sorted(n for chunk in chunks for n in chunk) == sorted(set(NUMBERS))
    assert {len(chunk) for chunk in chunks[:-1]} == {5}
    assert make_source().positions() == {EVEN: 0, ODD: 0}


@pytest.mark.parametrize("slow", range(3))
def test_chunks_do_not_depend_on_arrival_times(slow: int) -> None:
    assert all_chunks(make_source(seed=3, slow=slow)) == all_chunks(make_source(seed=3))


@pytest.mark.parametrize("seed", range(5))
def test_a_seek_to_any_chunk_repeats_the_same_chunks(seed: int) -> None:
    draw, source = random.Random(seed), make_source(seed=1)
    undisturbed, at, found = all_chunks(make_source(seed=1)), [source.positions()], list[list[int]]()
    while (chunk := source.poll(5, 0.0)) is not None:
        found.append(ids(chunk))
        at.append(at[-1] | chunk.after)
        assert source.positions() == at[-1]
        if draw.random() < 0.3:
            num_kept = draw.randint(0, len(found))
            source.poll(draw.randint(1, 7), 0.0)  # a chunk that was read ahead, and that the seek discards
            source.seek(at[num_kept])
            del found[num_kept:], at[num_kept + 1 :]
    assert found == undisturbed


def test_a_requested_partition_does_not_wait_for_others() -> None:
    source = make_source()
    assert all(n % 2 for n in ids(source.poll(4, 0.0, ODD)))
    assert not any(n % 2 for n in ids(source.poll(4, 0.0, EVEN)))
    assert all(n % 2 for n in ids(source.poll(4, 0.0, ODD)))


def test_a_worker_reads_only_its_partitions() -> None:
    source = make_source()
    source.assign([1])
    source.seek({ODD: 2, EVEN: 5})
    assert source.positions() == {ODD: 2}
    assert (
        sorted(n for chunk in all_chunks(source) for n in chunk) == sorted({n for n in NUMBERS if n % 2})[2:]
    )


def source_with_bounds(ends: Progress) -> SessionSource:
    source = make_source()
    source.bound(ends)
    return source


def test_chunks_are_cut_at_bounds_and_continue_after_them() -> None:
    source = source_with_bounds({EVEN: 3, ODD: 2})
    assert len(ids(source.poll(9, 0.0))) == 5 and not source.ended
    assert source.positions() == {EVEN: 3, ODD: 2}
    assert source.poll(9, 0.0) is None and source.ended
    source.bound({EVEN: 4, ODD: 4})
    assert not source.ended
    assert len(ids(source.poll(9, 0.0))) == 3


def test_a_partition_at_its_bound_gives_an_empty_chunk() -> None:
    source = source_with_bounds({EVEN: 3, ODD: 8})
    assert len(ids(source.poll(4, 0.0, EVEN))) == 3
    chunk = source.poll(4, 0.0, EVEN)
    assert ids(chunk) == [] and chunk is not None and chunk.after == {EVEN: 3}
    source.poll(8, 0.0, ODD)
    assert source.poll(4, 0.0, EVEN) is None and source.ended


def test_trailing_skipped_rows_end_the_session() -> None:
    source = make_source(rows=4, numbers=[2, 4, 6, 8, 4, 2])
    source.bound({EVEN: 6, ODD: 0})
    assert all_chunks(source, 2) == [[2, 4], [6, 8]]
    assert source.ended and source.positions() == {EVEN: 4, ODD: 0}, (
        "positions must not move past the skipped rows"
    )


def test_newest_ids_are_known_once_the_session_is_trained() -> None:
    source = make_source()
    all_chunks(source)
    assert source.newest_ids({EVEN: 20, ODD: 21}) == {}
    found = source.newest_ids({EVEN: 20, ODD: 22})
    assert found.keys() == set(PARTITIONS) and 41 in found[ODD].sample_id.tolist()
    assert 1 not in found[ODD].sample_id.tolist()


def test_readers_get_the_next_splits_to_prefetch() -> None:
    source = make_source(slow=1)
    all_chunks(source)
    numbers = [[split.number for split in splits] for splits in source.rows.expected]  # type: ignore[attr-defined]
    assert numbers[0] == sorted(numbers[0]) and numbers[0][0] == 0 and numbers[-1] == []


def test_lag_is_counted_in_rows() -> None:
    source = make_source(slow=3)
    while (chunk := source.poll_remaining(9)) is None:
        source.poll(9, 0.0)
    assert 0 < len(ids(chunk)) <= 9
    lag = source.lag()
    assert lag[EVEN].records + lag[ODD].records == 42 - sum(source.positions().values())
    assert source.num_lost == 0
    source.close()


# Training from archived files gives the same batches and the same bits as training from the topic


RECORDS = samples.records(list(range(1, 41)))


def build_on_files(folder: Path) -> Built:
    archive(folder, RECORDS)
    newest = SampleTable(str(folder)).newest(SPEC, TOPICS)
    assert newest is not None

    def rewire(dependencies: LoopDependencies) -> LoopDependencies:
        def opened(table_input: object) -> object:
            return open_session(table_input, samples.schema(), PARTITIONS, 3_600_000, dependencies.clock)  # type: ignore[arg-type]

        return dataclasses.replace(dependencies, source=PhasedSource(dependencies.source, opened))  # type: ignore[arg-type]

    built = build([], exact=True, rewire=rewire)
    built.loop.assign([0, 1], newest)
    built.loop.reset()
    return built


def test_g11_training_from_files_equals_training_from_the_topic(tmp_path: Path) -> None:
    files, topic = build_on_files(tmp_path).train_all(), build(RECORDS, exact=True).train_all()
    assert files.loop.counts.requests == topic.loop.counts.requests == 40
    a, b = files.loop.snapshot(), topic.loop.snapshot()
    assert a.shared.keys() == b.shared.keys()
    assert all(np.array_equal(a.shared[k], b.shared[k], equal_nan=True) for k in a.shared)
    assert files.pushes() == topic.pushes()
    assert [p.SerializeToString() for p in files.predicted] == [
        p.SerializeToString() for p in topic.predicted
    ]


def test_after_the_session_the_worker_reads_the_stream(tmp_path: Path) -> None:
    built = build_on_files(tmp_path).train_all()
    assert built.offsets() == [20, 20]
    built.loop.assign([0, 1])
    built.loop.reset()
    assert built.offsets() == [0, 0] and not built.loop.step()
