"""What became of requests: taken = trained + frozen + skipped by reason + non_finite, at every moment that anybody can see.

What is told of a chunk is added when the chunk ends, all at once; a chunk that is given up adds nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from trainer.selection.decision import NAMES

TAKEN, NON_FINITE = "taken", "non_finite"
SKIPPED = NAMES[2:]


@dataclasses.dataclass
class RequestCounts:
    """Since this process started."""

    requests: int = 0
    candidates: int = 0
    frozen: int = 0  # scored, not trained
    non_finite: int = 0  # requests that gave numbers that aren't finite: dead letters, of those below
    dead_letters: int = 0
    corrections: int = 0  # trained, beside the requests
    rehearsed: int = 0  # requests trained once more, beside those above
    busy_s: float = 0.0  # pulling and training


class OutcomeCounter:
    """Since the process started; `total` from any thread."""

    def __init__(self) -> None:
        self.total: Mapping[str, int] = dict.fromkeys((TAKEN, *NAMES, NON_FINITE), 0)
        self.begin()

    def begin(self) -> None:
        """A chunk, or everything, begins anew."""
        self._of_chunk = dict.fromkeys((*NAMES, NON_FINITE), 0)

    def tell(self, disposition_R: np.ndarray) -> None:
        """Requests of the chunk in hand, uint8."""
        if not disposition_R.any():
            self._of_chunk["trained"] += len(disposition_R)
            return
        for name, count in zip(NAMES, np.bincount(disposition_R, minlength=len(NAMES)).tolist(), strict=True):
            self._of_chunk[name] += count

    def die(self) -> None:
        """One request of it gave numbers that aren't finite."""
        self._of_chunk[NON_FINITE] += 1

    def settle(self, taken: int) -> None:
        """The chunk is trained: so many requests of it were new."""
        of_chunk = {TAKEN: taken, **self._of_chunk}
        self.total = {name: count + of_chunk[name] for name, count in self.total.items()}
        self.begin()


def sum_outcomes(totals: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Of several workers; {} where nobody tells."""
    return {name: sum(total.get(name, 0) for total in totals) for total in totals for name in total}


def unaccounted_requests(total: Mapping[str, int]) -> int:
    """Requests that were taken and of which nothing is told; 0 unless something is wrong."""
    return total[TAKEN] - sum(count for name, count in total.items() if name != TAKEN)
