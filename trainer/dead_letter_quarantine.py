"""What of a chunk can't be trained: its dead letters, and the sign that it isn't the chunk's fault."""

from __future__ import annotations

from collections.abc import Callable

from roostream.errors import UnavailableError
from roostream.runtime.kafka.topics import Partition
from trainer.batch_source import Chunk, Rejected

MAX_IN_A_ROW = 16
"""Requests that give numbers that aren't finite, and none between that gives others: so many odd ones are no accident."""


class NotFiniteError(UnavailableError):
    """Finite inputs give numbers that aren't finite, by the model's own state: everyone must be restored. Where that doesn't
    help, no restart does."""


class DeadLetterQuarantine:
    """Of one chunk after the other. A request that alone gives such numbers is dead at the end of its chunk, unless there were so
    many in a row that they can't be the reason. The loop's thread alone."""

    def __init__(self, bury: Callable[[Rejected], None]) -> None:
        """`bury` is called for each that is dead."""
        self.bury = bury
        self.in_hand: Chunk | None = None  # being trained, or where training broke
        self._suspects: list[Rejected] = []
        self._in_a_row = 0

    def begin(self, chunk: Chunk) -> None:
        """What of it can't be decoded is dead from the beginning."""
        self.in_hand = chunk
        self._suspects.clear()
        for rejected in chunk.rejects:
            self.bury(rejected)

    def suspect(self, partition: Partition, offset: int) -> None:
        """Alone this request gives numbers that aren't finite."""
        assert self.in_hand is not None
        error = "expected finite scores and gradients, got others: a row or a feature of it is too large"
        raw = self.in_hand.raw_of(partition, offset)
        self._suspects.append(Rejected(partition, offset, "non_finite", error, raw))
        self._in_a_row += 1

    def clear(self) -> None:
        """A request gave finite numbers: the model's state is in order."""
        self._in_a_row = 0

    def settle(self) -> int:
        """The chunk ends: its suspects are dead; how many.

        Raises:
            NotFiniteError: nothing but suspects for too long; none of this chunk's is dead.
        """
        if self._in_a_row >= MAX_IN_A_ROW:
            raise NotFiniteError(
                f"the last {self._in_a_row} requests all gave scores or gradients that are not finite: not one of them is the "
                "reason, but the model's own state"
            )
        dead = len(self._suspects)
        for rejected in self._suspects:
            self.bury(rejected)
        self._suspects.clear()
        self.in_hand = None
        return dead
