"""Records which rows a session reads, and reads them again with two readers in alternating turns, to measure
what a change of the reader costs.

Which files, days, row groups and features are read determines a reader's speed, so recorded reads are used
instead of made-up ones (DPP, VLDB 2022, §VI-B). Nothing is trained; a batch is only inspected.
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
from roostream.warehouse.sessions.session_rows import SampleMarks, TableRows
from roostream.wire.batch import Batch

FORMAT = 1


class CapturedRead(NamedTuple):
    """Rows `start` up to `end` of a file."""

    path: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapturedSession:
    """The reads of one version of a warehouse's samples, in order."""

    version: int
    features: tuple[str, ...]  # () = all
    reads: tuple[CapturedRead, ...]

    def write(self, path: Path) -> None:
        """Write the captured session to a file. Raises ConfigError: the file cannot be written."""
        body = {"format": FORMAT, "version": self.version, "features": self.features, "reads": self.reads}
        try:
            path.write_text(json.dumps(body) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path}: expected a file, got {error.strerror}; choose another --capture"
            ) from None

    @classmethod
    def read(cls, path: Path) -> CapturedSession:
        """Read a captured session. Raises ConfigError: there is no such file, or it is something else."""
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            if body["format"] != FORMAT:
                raise ConfigError(
                    f"{path}: expected a session of format {FORMAT}, got {body['format']!r}; capture it again"
                )
            reads = tuple(CapturedRead(str(name), int(start), int(end)) for name, start, end in body["reads"])
            return cls(version=int(body["version"]), features=tuple(map(str, body["features"])), reads=reads)
        except OSError as error:
            made_by = "roostream inspect session --capture"
            raise ConfigError(
                f"{path}: expected a captured session, got {error.strerror}; make one by {made_by}"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                f"{path}: expected a captured session, got something else; capture it again"
            ) from None


class ReplayedSession(NamedTuple):
    """A summary of all batches; equal for readers that return the same rows."""

    requests: int
    candidates: int
    digest: str  # of ids, labels and floats in order


def replay_session(
    reads: Iterable[CapturedRead], rows: TableRows, *, digests: bool = True
) -> ReplayedSession:
    """Read all rows again and summarize the batches. Without `digests` only sizes are counted, which costs
    nothing.

    Raises:
        UnavailableError, CheckpointError: as `TableRows.batch`.
    """
    requests = candidates = 0
    hasher = xxhash.xxh3_64()
    for read in reads:
        batch = rows.batch(*read)
        requests, candidates = requests + batch.num_requests, candidates + batch.num_candidates
        if digests:
            arrays = batch.sample_id_R, batch.item_B, batch.label_BT, batch.ro_float_RF, batch.nro_float_BF
            for array in arrays:
                hasher.update(np.ascontiguousarray(array).tobytes())
    return ReplayedSession(requests, candidates, hasher.hexdigest())


class ReaderComparison(NamedTuple):
    """How many times as long the second reader takes as the first."""

    ratio: float  # median over the turns
    low: float
    high: float  # [low, high] is the 95 % confidence interval of the median
    turns: int

    @property
    def differs(self) -> bool:
        return not self.low <= 1.0 <= self.high


def time_readers(
    first: Callable[[], object], second: Callable[[], object], clock_s: Callable[[], float], turns: int
) -> ReaderComparison:
    """Time both in alternating turns, after one turn of each that is not counted.

    `clock_s`: CPU time of this process where one thread reads, so that other programs matter little.
    """
    first(), second()
    ratios = []
    for turn in range(turns):
        took = {}
        for which in (first, second) if turn % 2 == 0 else (second, first):
            began_s = clock_s()
            which()
            took[which] = clock_s() - began_s
        ratios.append(took[second] / max(took[first], 1e-9))
    return comparison_of(ratios)


def comparison_of(ratios: Sequence[float]) -> ReaderComparison:
    """The median, and its 95 % confidence interval by order statistics, whatever the distribution."""
    ranked, count = sorted(ratios), len(ratios)
    below, share = 0, 0.5**count
    total = share
    while total <= 0.025 and below < count // 2:
        share *= (count - below) / (below + 1)
        below += 1
        total += share
    return ReaderComparison(
        statistics.median(ranked), ranked[max(below - 1, 0)], ranked[count - max(below, 1)], count
    )


class SlowedRows:
    """`TableRows` that take a share longer than another one, to show what a comparison can detect."""

    def __init__(self, rows: TableRows, share: float, clock_s: Callable[[], float]) -> None:
        """`clock_s`: as in `time_readers`; it must advance while it is polled."""
        self.rows, self.share, self.clock_s = rows, share, clock_s

    def batch(self, path: str, start: int, end: int) -> Batch:
        began_s = self.clock_s()
        batch = self.rows.batch(path, start, end)
        until_s = self.clock_s() + self.share * (self.clock_s() - began_s)
        while self.clock_s() < until_s:
            pass
        return batch

    def marks(self, path: str) -> SampleMarks:
        return self.rows.marks(path)
