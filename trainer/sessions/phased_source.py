"""Switches between the stream and a warehouse session, as the controller decides at each restore."""

from __future__ import annotations

from collections.abc import Callable, Collection

from roostream.runtime.work_unit import TableInput
from trainer.batch_source import BatchSource, ForwardingSource


class PhasedSource(ForwardingSource):
    """A `BatchSource`. It starts with the stream, which stays open."""

    def __init__(self, stream: BatchSource, open_session: Callable[[TableInput], BatchSource]) -> None:
        """`open_session` raises as `assign`."""
        self.stream, self.open_session = stream, open_session
        self.source = stream

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        opened = self.open_session(session) if session else self.stream
        if self.source is not self.stream:
            self.source.close()
        self.source = opened
        self.source.assign(numbers)

    def close(self) -> None:
        if self.source is not self.stream:
            self.source.close()
        self.stream.close()
