"""A source is asked in one thread, whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from roostream.errors import UnavailableError
from roostream.runtime.kafka.consumer import PartitionLag
from roostream.runtime.kafka.topics import Partition, Progress
from trainer.chunks import Chunk
from trainer.pipeline.source_thread import SourceThread


class Noting:
    """A source that notes from which threads it is opened, called and closed."""

    num_lost = 3

    def __init__(self) -> None:
        self.calls = [("open", threading.get_ident())]

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        return self._note("poll")

    def rest(self, max_requests: int) -> Chunk | None:
        return self._note("rest")

    def seek(self, at: Progress, leader_epochs: Mapping[Partition, int] = MappingProxyType({})) -> None:
        self._note("seek")

    def positions(self) -> Progress:
        return {("samples", 0): 7}

    def lag(self) -> dict[Partition, PartitionLag]:
        return {}

    def close(self) -> None:
        self._note("close")

    def _note(self, what: str) -> None:
        self.calls.append((what, threading.get_ident()))


def test_the_source_is_used_from_one_thread() -> None:
    source = SourceThread(Noting)
    noting = source.source
    assert isinstance(noting, Noting)
    source.seek({})
    assert source.submit(lambda: source.poll(1, 0.0)).result() is None, "from within it too"
    source.rest(1)
    source.close()
    source.close()
    assert [what for what, _ in noting.calls] == ["open", "seek", "poll", "rest", "close"]
    (thread,) = {ident for _, ident in noting.calls}
    assert thread != threading.get_ident()


def test_reading_progress_does_not_wait_for_a_poll() -> None:
    source, busy = SourceThread(Noting), threading.Event()
    reading = source.submit(busy.wait)
    assert source.positions() == {("samples", 0): 7} and source.lag() == {} and source.num_lost == 3
    busy.set()
    assert reading.result()
    source.close()


def test_a_source_that_fails_to_open_leaves_no_thread() -> None:
    before = threading.active_count()

    def away() -> Noting:
        raise UnavailableError("Kafka is away")

    with pytest.raises(UnavailableError, match="Kafka is away"):
        SourceThread(away)
    assert threading.active_count() == before
