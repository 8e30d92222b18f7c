"""The interface of training inputs: chunks of decoded samples, each with the progress that it makes.

Implementations: Kafka or records in memory (record_source.py), a warehouse session
(sessions/session_source.py), and a source that switches between both. Gathering full chunks is the source's
job: it alone knows whether more will come."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from roostream.errors import ConfigError
from roostream.runtime.kafka.consumer import PartitionLag
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.runtime.work_unit import TableInput
from trainer.chunks import Chunk

T = TypeVar("T")


class NewestIds(NamedTuple):
    """The newest samples of a partition, by close time; int64 [N] both."""

    sample_id: np.ndarray
    close_ms: np.ndarray


class BatchSource(Protocol):
    """Chunks of the assigned partitions. One thread, except where noted."""

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        """Return the next chunk: `max_requests` samples, or fewer if the oldest has waited long enough.

        None: no chunk is due after `timeout_s`. Over all partitions, the oldest samples come first.

        With `partition`, only full chunks of that partition are returned, however long they take, so that
        chunks do not depend on time. The caller requests the same partition until its chunk comes. An
        unavailable source is waited for (None)."""

    def poll_remaining(self, max_requests: int) -> Chunk | None:
        """Return a partial chunk after the caller knows that no more input comes. None: nothing is left."""

    def seek(self, at: Progress, leader_epochs: Mapping[Partition, int] = MappingProxyType({})) -> None:
        """Continue from these offsets; partitions that are missing start from their beginning. What was read
        ahead is dropped. `leader_epochs`: as known from the chunk before each offset (`Chunk`). Raises
        UnavailableError: the source is unavailable; nothing was changed."""

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        """Return chunks of the partitions with these numbers only: of a warehouse session, whose positions
        are then the offsets, or (None) of the stream. `seek` must follow.

        Raises:
            UnavailableError: the session cannot be read now.
            CheckpointError: the session differs from the committed one.
            ConfigError: this source has no sessions.
        """

    def bound(self, ends: Progress) -> None:
        """Return nothing at or beyond these offsets until the next call; {} = no bounds. Any thread.

        The chunk before a bound is cut short. If one partition is requested that is at its bound while others
        are not, the chunk is empty, so that the turn passes. Only a `seek` may follow a bound that was
        lowered."""

    @property
    def ended(self) -> bool:
        """Whether everything before the bounds was returned; False without bounds. Any thread."""

    def newest_ids(self, trained: Progress) -> Mapping[Partition, NewestIds]:
        """If a session is complete at `trained`: the samples of its partitions that the stream must not train
        again. Else {}. Raises UnavailableError: they cannot be read now."""

    def positions(self) -> Progress:
        """Every partition of this source → offset behind the last returned chunk, or the target of `seek`."""

    def lag(self) -> dict[Partition, PartitionLag]:
        """Lag as of a moment ago; {} while the ends are unknown. Makes no request; any thread."""

    @property
    def num_lost(self) -> int:
        """Number of samples that were deleted before they could be read. Any thread."""

    def close(self) -> None:
        """Idempotent."""


def refuse_session(session: TableInput | None) -> None:
    """For sources of the stream alone. Raises ConfigError: a session is requested."""
    if session is not None:
        raise ConfigError(
            f"expected the stream, got a session of {session.table}; this program cannot read a warehouse"
        )


class ForwardingSource:
    """A `BatchSource` in front of another one, `source`. Calls that use its handles go through `run`."""

    source: BatchSource

    def run(self, do: Callable[[], T]) -> T:
        return do()

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        return self.run(lambda: self.source.poll(max_requests, timeout_s, partition))

    def poll_remaining(self, max_requests: int) -> Chunk | None:
        return self.run(lambda: self.source.poll_remaining(max_requests))

    def seek(self, at: Progress, leader_epochs: Mapping[Partition, int] = MappingProxyType({})) -> None:
        self.run(lambda: self.source.seek(at, leader_epochs))

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        self.run(lambda: self.source.assign(numbers, session))

    def newest_ids(self, trained: Progress) -> Mapping[Partition, NewestIds]:
        return self.run(lambda: self.source.newest_ids(trained))

    def bound(self, ends: Progress) -> None:
        self.source.bound(ends)

    @property
    def ended(self) -> bool:
        return self.source.ended

    def positions(self) -> Progress:
        return self.source.positions()

    def lag(self) -> dict[Partition, PartitionLag]:
        return self.source.lag()

    @property
    def num_lost(self) -> int:
        return self.source.num_lost

    def close(self) -> None:
        self.run(self.source.close)
