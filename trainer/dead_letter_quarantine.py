"""Quarantines requests that produce non-finite numbers, and detects when the model's state is the cause."""

from __future__ import annotations

from collections.abc import Callable

from roostream.errors import UnavailableError
from roostream.runtime.kafka.topics import Partition
from trainer.chunks import Chunk, Rejected

MAX_CONSECUTIVE = 16
"""Beyond this many consecutive requests with non-finite results, the model's state is assumed to be
corrupt."""


class NotFiniteError(UnavailableError):
    """Finite inputs give non-finite numbers, so the model's state is corrupt: all members must be restored.
    If that does not help, no restart does."""


class DeadLetterQuarantine:
    """Collects the requests of a chunk whose scores or gradients are not finite even if the request is
    trained alone.

    At the end of the chunk they become dead letters, unless so many follow one another that the model must be
    the cause. Used by the loop's thread only.
    """

    def __init__(self, publish: Callable[[Rejected], None]) -> None:
        """`publish` is called for each dead letter."""
        self.publish = publish
        self.current: Chunk | None = None  # the chunk in training, or the one at which training failed
        self._suspects: list[Rejected] = []
        self._consecutive = 0

    def begin(self, chunk: Chunk) -> None:
        """Start a chunk. Its records that cannot be decoded are dead letters at once."""
        self.current = chunk
        self._suspects.clear()
        for rejected in chunk.rejects:
            self.publish(rejected)

    def suspect(self, partition: Partition, offset: int) -> None:
        """This request alone gives non-finite numbers."""
        assert self.current is not None
        error = (
            "expected finite scores and gradients, got non-finite ones: a row or a feature of it is too large"
        )
        raw = self.current.raw_of(partition, offset)
        self._suspects.append(Rejected(partition, offset, "non_finite", error, raw))
        self._consecutive += 1

    def clear(self) -> None:
        """A request gave finite numbers, so the model's state is sound."""
        self._consecutive = 0

    def settle(self) -> int:
        """End the chunk; its suspects become dead letters. Returns their number. Raises NotFiniteError: too
        many suspects in a row; no suspect of this chunk becomes a dead letter."""
        if self._consecutive >= MAX_CONSECUTIVE:
            raise NotFiniteError(
                "expected finite scores and gradients, got non-finite ones for the last "
                f"{self._consecutive} requests: the cause is the model's state, not a request; "
                "lower the learning rate or clip extreme features, and try a custom model with "
                "`roostream check-model`"
            )
        count = len(self._suspects)
        for rejected in self._suspects:
            self.publish(rejected)
        self._suspects.clear()
        self.current = None
        return count
