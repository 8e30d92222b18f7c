"""Captured reads of a session are replayed, and a comparison of two readers detects small differences in
time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from roostream.errors import ConfigError
from roostream.warehouse.sessions.session_capture import (
    CapturedRead,
    CapturedSession,
    ReaderComparison,
    SlowedRows,
    comparison_of,
    replay_session,
    time_readers,
)
from roostream.warehouse.sessions.session_rows import LocalSessionRows
from tests.trainer import samples
from tests.warehouse.memory_table import MemoryTable, table_of


class FakeCpuClock:
    """A fake clock of CPU time that only readers advance."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s


def capture_session() -> tuple[MemoryTable, list[CapturedRead]]:
    """Read a whole session; return its table and the captured reads."""
    table = table_of(samples.records(list(range(1, 31))))
    session = table.session(shuffle_seed=None)
    local = LocalSessionRows(session, table)
    for split in session.order.splits:
        position = split.at
        while position < split.end_position:
            position = local.piece(split, position).end
    return table, [CapturedRead(*read) for read in table.reads]


def test_a_captured_session_is_read_again_identically(tmp_path: Path) -> None:
    table, reads = capture_session()
    assert len(reads) > 5
    CapturedSession(version=3, features=("a", "b"), reads=tuple(reads)).write(tmp_path / "session.json")
    read_session = CapturedSession.read(tmp_path / "session.json")
    assert read_session == CapturedSession(version=3, features=("a", "b"), reads=tuple(reads))
    summary = replay_session(read_session.reads, table)
    assert (summary.requests, summary == replay_session(reads, table)) == (30, True)
    assert replay_session(reversed(reads), table).digest != summary.digest, (
        "the digest must depend on the order of reads"
    )
    assert replay_session(reads, table, digests=False)._replace(digest=summary.digest) == summary


@pytest.mark.parametrize("text", ['{"format": 2}', '{"format": 1, "version": "x"}', "[]"])
def test_invalid_files_are_rejected_as_captured_session(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ConfigError):
        CapturedSession.read(tmp_path / "s.json")
    with pytest.raises(ConfigError):
        CapturedSession.read(tmp_path / "absent.json")
    with pytest.raises(ConfigError):
        CapturedSession(version=1, features=(), reads=()).write(tmp_path)


def noisy_comparison(ratio: float, seed: int, turns: int = 31) -> ReaderComparison:
    """Compare readers on a simulated busy machine: times vary by 2 %, and some are 1.5 times as long."""
    rng = random.Random(seed)
    return comparison_of(
        [ratio * (1 + rng.gauss(0, 0.02)) * (1.5 if rng.random() < 0.05 else 1.0) for _ in range(turns)]
    )


def test_a_difference_of_three_percent_is_detected_through_noise_and_no_difference_is_not() -> None:
    summary = [noisy_comparison(1.03, seed).differs for seed in range(200)]
    false = [noisy_comparison(1.0, seed).differs for seed in range(200)]
    assert sum(summary) >= 190 and sum(false) <= 20


def test_the_interval_is_that_of_order_statistics_around_the_median() -> None:
    ratios = [float(n) for n in range(1, 12)]
    assert comparison_of(ratios) == ReaderComparison(6.0, 2.0, 10.0, 11), (
        "the second and the tenth of 11 values bound an interval of 98.8 %"
    )
    assert comparison_of([1.2]) == ReaderComparison(1.2, 1.2, 1.2, 1)
    assert not comparison_of([0.9, 1.0, 1.1]).differs


def test_a_reader_slowed_by_a_share_takes_that_share_longer() -> None:
    table, reads = capture_session()
    clock = FakeCpuClock()

    class CostlyTable(MemoryTable):
        """A table in which each read takes 10 ms of CPU time."""

        def batch(self, path: str, start: int, end: int):  # type: ignore[no-untyped-def]
            clock.now_s += 0.01
            return super().batch(path, start, end)

    costly_table = CostlyTable(list(zip(table.files, table.batches.values(), strict=True)))
    slowed = SlowedRows(costly_table, 0.05, clock)
    comparison = time_readers(
        lambda: replay_session(reads, costly_table), lambda: replay_session(reads, slowed), clock, turns=5
    )
    assert comparison.ratio == pytest.approx(1.05, rel=2e-3) and comparison.differs
    assert (
        slowed.marks(table.files[0].path).offset_R.tolist()
        == table.marks(table.files[0].path).offset_R.tolist()
    )
