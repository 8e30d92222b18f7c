"""What a session read, kept, and read again by readers that are compared: what a change of the reader costs, in one run.

    a session ── CapturingRows ──► [(file, rows), …] ──► replayed(reader A) │ replayed(reader B)   turns, each of the same reads
                                                                 └── ratio of CPU time a turn, its median and how sure it is

Recorded reads instead of made-up ones: which files, days and row groups are read, and of which features, is what a reader's
speed depends on (DPP, VLDB 2022, §VI-B). Nothing is trained: a batch is only looked at.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from roostream.errors import ConfigError
from roostream.warehouse.sessions.session_rows import Marks, TableRows
from roostream.wire.batch import Batch

FORMAT = 1


class CapturedRead(NamedTuple):
    """Rows `start` up to `end` of a file."""

    path: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapturedSession:
    """What was read of a version of a warehouse's samples, in order."""

    version: int
    features: tuple[str, ...]  # () = all
    reads: tuple[CapturedRead, ...]

    def write(self, path: Path) -> None:
        """Raises ConfigError: it can't be written."""
        told = {"format": FORMAT, "version": self.version, "features": self.features, "reads": self.reads}
        try:
            path.write_text(json.dumps(told) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path}: expected a file, got {error.strerror}; choose another --capture"
            ) from None

    @classmethod
    def read(cls, path: Path) -> CapturedSession:
        """Raises ConfigError: there is none, or it is none."""
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            if told["format"] != FORMAT:
                raise ConfigError(
                    f"{path}: expected a captured session of format {FORMAT}, got {told['format']!r}; capture anew"
                )
            reads = tuple(CapturedRead(str(name), int(start), int(end)) for name, start, end in told["reads"])
            return cls(version=int(told["version"]), features=tuple(map(str, told["features"])), reads=reads)
        except OSError as error:
            made_by = "roostream inspect session --capture"
            raise ConfigError(
                f"{path}: expected a captured session, got {error.strerror}; make one by {made_by}"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{path}: expected a captured session, got something else; capture anew"
            ) from None


class CapturingRows:
    """`TableRows` that notes what is asked of others. As thread-safe as they are."""

    def __init__(self, rows: TableRows) -> None:
        self.rows = rows
        self.reads: list[CapturedRead] = []

    def batch(self, path: str, start: int, end: int) -> Batch:
        self.reads.append(CapturedRead(path, start, end))
        return self.rows.batch(path, start, end)

    def marks(self, path: str) -> Marks:
        return self.rows.marks(path)


class ReplayedSession(NamedTuple):
    """What a dummy trainer saw of all reads: equal for readers that read alike."""

    requests: int
    candidates: int
    digest: str  # of ids, labels and floats, in order


def replayed(reads: Iterable[CapturedRead], rows: TableRows, *, digests: bool = True) -> ReplayedSession:
    """Read once more, a batch after the other, and look at each; without `digests` at its sizes alone, which costs nothing.

    Raises:
        UnavailableError, CheckpointError: as `TableRows.batch`.
    """
    requests = candidates = 0
    its = xxhash.xxh3_64()
    for read in reads:
        batch = rows.batch(*read)
        requests, candidates = requests + batch.num_requests, candidates + batch.num_candidates
        for array in (
            (batch.sample_id_R, batch.item_B, batch.label_BT, batch.ro_float_RF, batch.nro_float_BF)
            if digests
            else ()
        ):
            its.update(np.ascontiguousarray(array).tobytes())
    return ReplayedSession(requests, candidates, its.hexdigest())


class Compared(NamedTuple):
    """How many times as long the second reader takes as the first."""

    ratio: float  # median over the turns
    low: float
    high: float  # [low, high] holds the median of all turns there could be, 19 times of 20
    turns: int

    @property
    def differs(self) -> bool:
        return not self.low <= 1.0 <= self.high


def compared(
    first: Callable[[], object], second: Callable[[], object], clock_s: Callable[[], float], turns: int
) -> Compared:
    """In turns: first second, second first, …, after one of each that isn't counted. `clock_s`: CPU time of this process where
    one thread reads, so that other programs count for little."""
    first(), second()
    ratios = []
    for turn in range(turns):
        took = {}
        for which in (first, second) if turn % 2 == 0 else (second, first):
            began_s = clock_s()
            which()
            took[which] = clock_s() - began_s
        ratios.append(took[second] / max(took[first], 1e-9))
    return of_ratios(ratios)


def of_ratios(ratios: Sequence[float]) -> Compared:
    """The median, and between which of them it lies 19 times of 20, whatever their law: order statistics of a fair coin."""
    ranked, count = sorted(ratios), len(ratios)
    below, share = 0, 0.5**count
    total = share
    while total <= 0.025 and below < count // 2:
        share *= (count - below) / (below + 1)
        below += 1
        total += share
    return Compared(
        statistics.median(ranked), ranked[max(below - 1, 0)], ranked[count - max(below, 1)], count
    )


class SlowedRows:
    """`TableRows` that take a share longer than others do: what a comparison can see is shown with them."""

    def __init__(self, rows: TableRows, share: float, clock_s: Callable[[], float]) -> None:
        """`clock_s`: as `compared` has it; it goes on while it is asked."""
        self.rows, self.share, self.clock_s = rows, share, clock_s

    def batch(self, path: str, start: int, end: int) -> Batch:
        began_s = self.clock_s()
        batch = self.rows.batch(path, start, end)
        until_s = self.clock_s() + self.share * (self.clock_s() - began_s)
        while self.clock_s() < until_s:
            pass
        return batch

    def marks(self, path: str) -> Marks:
        return self.rows.marks(path)
