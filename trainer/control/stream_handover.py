"""Chooses what follows a warehouse session: the stream, or first a further session of what was archived
meanwhile.

The stream can only continue where the session's table version ends if Kafka still has those records. So this
is checked repeatedly while the session is trained, and the table version is protected from deletion as long
as it is read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from roostream.errors import CheckpointError, ConfigError, RoostreamError
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.topics import SAMPLES, Progress
from roostream.runtime.work_unit import TableInput
from trainer.config import ControllerConfig
from trainer.control.controller import Controller

if TYPE_CHECKING:
    from roostream.warehouse.sessions.sample_table import SampleTable

log = logging.getLogger("roostream.controller")

CHECK_S = 60.0
RETRY_S = 5.0
_LOOK_S = 1.0  # for a new session
PROTECT_MS = 15 * 60_000  # each check protects the version for this long


class Margin(NamedTuple):
    """How close the stream is to losing records that it needs after the session."""

    records: int  # between Kafka's oldest record and the stream's start, in the partition with the fewest
    archived: int  # records that the newest version has beyond the session


def margin(session: TableInput, newest: TableInput, oldest: Progress) -> Margin:
    """Records between Kafka's oldest ones and the end of the session (the smallest of all partitions), and
    records archived after it. `oldest`: offsets of Kafka's oldest records."""
    ends = {partition: end for partition, end in session.ends.items() if partition[0] == SAMPLES}
    left = [end - oldest.get(partition, 0) for partition, end in ends.items()]
    archived = sum(max(newest.ends.get(partition, end) - end, 0) for partition, end in ends.items())
    return Margin(min(left, default=0), archived)


def needs_further_session(found: Margin, max_records: int) -> bool:
    """Whether a further session comes before the stream: much was archived meanwhile, or Kafka has lost
    records that the archive has."""
    return found.archived > max_records or (found.records < 0 and found.archived > 0)


class StreamHandover:
    """Checks repeatedly while a session is trained, in its own thread."""

    def __init__(
        self,
        controller: Controller,
        newest: Callable[[TableInput], TableInput | None],
        protect: Callable[[TableInput, int], None],
        oldest: Callable[[], Progress],
        clock: Clock,
        max_records: int,
    ) -> None:
        """`newest`: a session of the newest version from the end of this one on. `protect`: keep a version
        until this wall time. `oldest`: offsets of the topic's oldest records."""
        self.controller, self.newest, self.protect, self.oldest = controller, newest, protect, oldest
        self.clock, self.max_records = clock, max_records

    def run(self, stop: threading.Event) -> None:
        """Run until `stop`. A new session is checked at once, because it may be trained in less than
        CHECK_S, and unchecked it would be followed by the stream."""
        checked, due_s = "", 0.0
        while not stop.is_set():
            _, session = self.controller.session_now()
            if session and (session.digest != checked or self.clock.monotonic_s() >= due_s):
                wait_s = CHECK_S
                try:
                    self.check()
                except RoostreamError as error:
                    log.warning("what follows the warehouse session cannot be determined now: %s", error)
                    wait_s = RETRY_S
                checked, due_s = session.digest, self.clock.monotonic_s() + wait_s
            stop.wait(_LOOK_S)

    def check(self) -> None:
        """Check once. Raises RoostreamError: not possible now; the last decision stays."""
        _, session = self.controller.session_now()
        if session is None:
            return
        until_ms = self.clock.now_ms() + PROTECT_MS
        self.protect(session, until_ms)
        newest = self.newest(session)
        if newest is None:
            return
        found = margin(session, newest, self.oldest())
        if found.records < 0:
            log.warning(
                "Kafka has deleted %d samples after the session's end; training continues from the archive",
                -found.records,
            )
        follows = needs_further_session(found, self.max_records)
        if follows:
            self.protect(newest, until_ms)
        self.controller.set_following(newest if follows else None)


def sample_table(location: str) -> SampleTable:
    """Raises ConfigError: the packages for reading it are not installed."""
    try:
        from roostream.warehouse.sessions.sample_table import SampleTable
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"expected {error.name} to read {location}; pip install 'roostream[warehouse]'"
        ) from None
    return SampleTable(location)


class WarehouseHistory:
    """The warehouse named by a controller's settings. A session that has begun stays with its own: another
    warehouse may lack what was archived between the session and the stream."""

    def __init__(self, config: ControllerConfig, topics: Mapping[str, str], clock: Clock) -> None:
        """`topics`: name → id of the stream that follows. Raises ConfigError: the packages for reading it are
        not installed."""
        self.config, self.topics, self.clock = config, dict(topics), clock
        if config.warehouse:
            sample_table(config.warehouse)

    def newest(self, after: TableInput | None = None) -> TableInput | None:
        """A session of the newest version: that of the settings, or a further one `after` one that is
        trained. A first session is protected before it is read. Raises ConfigError: there is no table at its
        location, or it is damaged."""
        location = after.table if after else self.config.warehouse
        begins = after.ends if after else None
        try:
            session = sample_table(location).newest(self.config.session, self.topics, begins)
        except CheckpointError as error:
            raise ConfigError(f"warehouse = {location!r}: {error}") from None
        if session is not None and after is None:
            self.protect(session, self.clock.now_ms() + PROTECT_MS)
        return session

    def protect(self, session: TableInput, until_ms: int) -> None:
        sample_table(session.table).pin_session(session, f"session-{session.digest}", until_ms)

    def handover(self, controller: Controller, oldest: Callable[[], Progress]) -> StreamHandover:
        """The checks of the stream's offsets; `run` has a thread of its own."""
        return StreamHandover(
            controller, self.newest, self.protect, oldest, self.clock, self.config.handover_records
        )
