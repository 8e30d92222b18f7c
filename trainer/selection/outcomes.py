"""Outcomes of requests. At any visible time: taken = trained + frozen + skipped by reason + non_finite.

Counts of a chunk are added at once when the chunk ends; an abandoned chunk adds nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from trainer.selection.decision import NAMES

TAKEN, NON_FINITE = "taken", "non_finite"


@dataclasses.dataclass
class RequestCounts:
    """Counts since this process started."""

    requests: int = 0
    candidates: int = 0
    duplicates: int = 0  # requests and corrections that were trained before
    frozen: int = 0  # scored, not trained
    non_finite: int = 0  # requests whose results were not finite; they are among the dead letters
    dead_letters: int = 0
    corrections: int = 0  # trained, not counted among requests
    rehearsed: int = 0  # requests trained again, not counted among requests
    busy_s: float = 0.0  # pulling and training


class OutcomeCounter:
    """Counts since the process started. `total` may be read by any thread."""

    def __init__(self) -> None:
        self.total: Mapping[str, int] = dict.fromkeys((TAKEN, *NAMES, NON_FINITE), 0)
        self.discard_chunk()

    def discard_chunk(self) -> None:
        """Discard the counts of the current chunk."""
        self._of_chunk = dict.fromkeys((*NAMES, NON_FINITE), 0)

    def add(self, disposition_R: np.ndarray) -> None:
        """Count requests of the current chunk, uint8 dispositions."""
        if not disposition_R.any():
            self._of_chunk["trained"] += len(disposition_R)
            return
        for name, count in zip(NAMES, np.bincount(disposition_R, minlength=len(NAMES)).tolist(), strict=True):
            self._of_chunk[name] += count

    def add_non_finite(self) -> None:
        """A request of the chunk gave non-finite results."""
        self._of_chunk[NON_FINITE] += 1

    def commit_chunk(self, taken: int) -> None:
        """The chunk is trained: `taken` of its requests were new."""
        of_chunk = {TAKEN: taken, **self._of_chunk}
        self.total = {name: count + of_chunk[name] for name, count in self.total.items()}
        self.discard_chunk()


def sum_outcomes(totals: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Sum over several workers; {} without reports."""
    return {name: sum(total.get(name, 0) for total in totals) for total in totals for name in total}


def unaccounted_requests(total: Mapping[str, int]) -> int:
    """Requests that were taken but have no outcome; 0 unless there is a bug."""
    return total[TAKEN] - sum(count for name, count in total.items() if name != TAKEN)
