"""What comes behind a session of the warehouse: the stream, or first a session of what was archived meanwhile.

The stream can only go on where the session's version ends while Kafka still has that. It is looked at again and again, and the
version is held as long as it is read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from roostream.errors import CheckpointError, ConfigError, RoostreamError
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.topics import SAMPLES, Progress
from roostream.runtime.work_unit import TableInput
from trainer.config import ControllerConfig
from trainer.control.controller import Controller

log = logging.getLogger("roostream.controller")

LOOK_S = 60.0
HELD_MS = 15 * 60_000  # a version, by each look


class Margin(NamedTuple):
    """How much of what the stream must still have, Kafka has beside it."""

    records: (
        int  # of the partition where it is least: between the oldest record and where the stream would go on
    )
    archived: int  # records that the newest version has behind the session's


def margin(session: TableInput, newest: TableInput, oldest: Progress) -> Margin:
    """`oldest`: offsets of the oldest records that Kafka has."""
    left = [
        at - oldest.get(partition, 0) for partition, at in session.ends.items() if partition[0] == SAMPLES
    ]
    more = [newest.ends.get(p, at) - at for p, at in session.ends.items() if p[0] == SAMPLES]
    return Margin(min(left, default=0), sum(max(count, 0) for count in more))


def follows(found: Margin, max_records: int) -> bool:
    """A further session comes before the stream: much was archived meanwhile, or Kafka has lost what the stream would need and
    the archive has it."""
    return found.archived > max_records or (found.records < 0 and found.archived > 0)


class StreamHandover:
    """Looks while a session is trained, in a thread of its own."""

    def __init__(
        self,
        controller: Controller,
        newest: Callable[[Progress], TableInput | None],
        hold: Callable[[TableInput, int], None],
        oldest: Callable[[], Progress],
        clock: Clock,
        max_records: int,
    ) -> None:
        """`newest`: a session of the newest version, from these offsets on; `hold`: a version is kept until this wall time;
        `oldest`: of the topic."""
        self.controller, self.newest, self.hold, self.oldest, self.clock = (
            controller,
            newest,
            hold,
            oldest,
            clock,
        )
        self.max_records = max_records
        self.margin: Margin | None = None

    def run(self, stop: threading.Event) -> None:
        """Until `stop`."""
        while not stop.is_set():
            try:
                self.look()
            except RoostreamError as error:
                log.warning("what follows the warehouse's session can't be looked at now: %s", error)
            stop.wait(LOOK_S)

    def look(self) -> None:
        """Once. Raises RoostreamError: it can't be told now; what was said before stands."""
        _, session = self.controller.session_now()
        if session is None:
            self.margin = None
            return
        until_ms = self.clock.now_ms() + HELD_MS
        self.hold(session, until_ms)
        newest = self.newest(session.ends)
        if newest is None:
            return
        self.margin = margin(session, newest, self.oldest())
        if self.margin.records < 0:
            log.warning(
                "Kafka has lost %d samples behind the session's end: the archive is read on",
                -self.margin.records,
            )
        if follows(self.margin, self.max_records):
            self.hold(newest, until_ms)
            return self.controller.set_following(newest)
        self.controller.set_following(None)


class WarehouseHistory:
    """The warehouse of a controller's settings."""

    def __init__(self, config: ControllerConfig, topics: Mapping[str, str], clock: Clock) -> None:
        """`topics`: name → id, of the stream that follows.

        Raises:
            ConfigError: the packages that read it aren't there.
        """
        try:
            from roostream.warehouse.sessions.sample_table import SampleTable
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"expected {error.name} to read {config.warehouse}; pip install 'roostream[warehouse]'"
            ) from None
        self.config, self.topics, self.clock = config, dict(topics), clock
        self.table = SampleTable(config.warehouse)

    def newest(self, begins: Progress | None = None) -> TableInput | None:
        """As `SampleTable.newest`; what a session would be is held before it is read.

        Raises:
            ConfigError: there is no table where the settings say, or it is damaged: this controller can't go on with them.
        """
        try:
            found = self.table.newest(self.config.session, self.topics, begins)
        except CheckpointError as error:
            raise ConfigError(f"warehouse = {self.config.warehouse!r}: {error}") from None
        if found is not None and not begins:
            self.hold(found, self.clock.now_ms() + HELD_MS)
        return found

    def hold(self, session: TableInput, until_ms: int) -> None:
        self.table.hold(session, f"session-{session.digest}", until_ms)

    def watch(
        self, controller: Controller, oldest: Callable[[], Progress], stop: threading.Event
    ) -> StreamHandover:
        """In a thread until `stop`."""
        it = StreamHandover(
            controller, self.newest, self.hold, oldest, self.clock, self.config.handover_records
        )
        threading.Thread(target=it.run, args=(stop,), name="hand-over", daemon=True).start()
        return it
