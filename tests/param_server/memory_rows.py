"""The topic `rows` in memory: a `RowsTopic` (param_server/publish.py)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from param_server.publish import Message
from roostream.errors import UnavailableError
from roostream.runtime.kafka.consumer import RecordsGoneError
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS


class InMemoryRows:
    """A topic in memory, with injected faults: `down` makes every call raise UnavailableError, and
    `fail_after` the next delivery."""

    def __init__(self, num_partitions: int = DEFAULT_PARTITIONS) -> None:
        self.values: list[list[bytes]] = [[] for _ in range(num_partitions)]
        self.first = [0] * num_partitions
        self.down = False
        self._fail_after: int | None = None

    def fail_after(self, num_messages: int) -> None:
        """Make one delivery raise UnavailableError after its first `num_messages` messages are appended: the
        next delivery that has more."""
        self._fail_after = num_messages

    def trim(self, partition: int, first: int) -> None:
        """Delete records below offset `first`, as retention does."""
        self.first[partition] = first

    def deliver(self, messages: Sequence[Message], stop: threading.Event) -> list[int]:
        self._check()
        offsets: list[int] = []
        for message in messages:
            if self._fail_after is not None and len(offsets) >= self._fail_after:
                self._fail_after = None
                raise UnavailableError("rows: injected fault in the middle of a delivery")
            self.values[message.partition].append(message.value)
            offsets.append(len(self.values[message.partition]) - 1)
        return offsets

    def bounds(self, partition: int, stop: threading.Event) -> tuple[int, int]:
        self._check()
        return self.first[partition], len(self.values[partition])

    def read(self, partition: int, start: int, end: int, stop: threading.Event) -> Iterator[bytes]:
        self._check()
        if start < self.first[partition]:
            raise RecordsGoneError(
                f"rows {partition}: expected offset {start}, the oldest is {self.first[partition]}"
            )
        yield from self.values[partition][start:end]

    def close(self) -> None:
        self.down = True

    def _check(self) -> None:
        if self.down:
            raise UnavailableError("rows: injected outage")
