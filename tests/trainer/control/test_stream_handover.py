"""After a session, training continues with the stream if Kafka still has the next records. Otherwise another
session reads what was archived meanwhile."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.topics import Progress
from roostream.runtime.work_unit import TableInput
from roostream.warehouse.version_pins import pinned_versions
from roostream.warehouse.warehouse import Warehouse
from roostream.wire.records import Record
from tests.runtime.manifest_cases import an_input
from tests.warehouse.archive_runs import TOPIC_IDS, make_archiver, make_topic_records
from tests.warehouse.sample_cases import rich_schema
from trainer.config import ControllerConfig
from trainer.control.stream_handover import (
    PROTECT_MS,
    Margin,
    StreamHandover,
    WarehouseHistory,
    margin,
    needs_further_session,
)

SESSION = an_input(ends={("samples", 0): 105, ("samples", 1): 90, ("corrections", 0): 3})
NEWER = dataclasses.replace(
    SESSION,
    version=9,
    begins=SESSION.ends,
    ends={("samples", 0): 140, ("samples", 1): 95, ("corrections", 0): 30},
)


def test_the_margin_is_that_of_the_tightest_partition() -> None:
    assert margin(SESSION, NEWER, {("samples", 0): 100, ("samples", 1): 20}) == Margin(records=5, archived=40)
    assert margin(SESSION, SESSION, {("samples", 0): 100, ("samples", 1): 95}) == Margin(
        records=-5, archived=0
    )


@pytest.mark.parametrize(
    ("found", "further", "why"),
    [
        (Margin(records=50, archived=40), False, "little is new, and Kafka has it"),
        (Margin(records=50, archived=41), True, "much is new, so another session is faster"),
        (Margin(records=-1, archived=1), True, "Kafka has deleted it, and the archive has it"),
        (Margin(records=-1, archived=0), False, "neither has it; the reader counts the lost records"),
    ],
)
def test_another_session_follows_only_if_it_is_needed(found: Margin, further: bool, why: str) -> None:
    assert needs_further_session(found, 40) is further, why


class FakeController:
    def __init__(self) -> None:
        self.now: TableInput | None = SESSION
        self.followed: list[TableInput | None] = []

    def session_now(self) -> tuple[int, TableInput | None]:
        return 1, self.now

    def set_following(self, session: TableInput | None) -> None:
        self.followed.append(session)


class HandoverHarness:
    def __init__(
        self, newest: TableInput | None = NEWER, oldest: Progress | None = None, max_records: int = 10
    ) -> None:
        self.controller, self.clock, self.newest = FakeController(), FakeClock(1000), newest
        self.protected: list[tuple[int, int]] = []  # (version, until when in ms)
        self.requested_begins: list[Progress] = []
        self.handover = StreamHandover(
            self.controller,  # type: ignore[arg-type]
            self._newest,
            lambda session, until_ms: self.protected.append((session.version, until_ms)),
            lambda: oldest or {},
            self.clock,
            max_records,
        )

    def _newest(self, after: TableInput) -> TableInput | None:
        self.requested_begins.append(after.ends)
        return self.newest


def test_table_versions_in_use_are_protected() -> None:
    harness = HandoverHarness()
    harness.handover.check()
    assert harness.controller.followed == [NEWER] and harness.requested_begins == [SESSION.ends]
    assert harness.protected == [(7, 1000 + PROTECT_MS), (9, 1000 + PROTECT_MS)]


def test_the_stream_follows_if_little_was_archived_meanwhile() -> None:
    harness = HandoverHarness(max_records=1000)
    harness.handover.check()
    assert harness.controller.followed == [None] and harness.protected == [(7, 1000 + PROTECT_MS)]


def test_nothing_is_checked_during_the_stream() -> None:
    harness = HandoverHarness()
    harness.controller.now = None
    harness.handover.check()
    assert (harness.controller.followed, harness.protected) == ([], [])


def test_a_failed_check_changes_nothing_and_is_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness, stop = HandoverHarness(), threading.Event()

    def fail(session: TableInput, until_ms: int) -> None:
        stop.set()
        raise UnavailableError("the store is away")

    harness.handover.protect = fail
    harness.handover.run(stop)
    assert harness.controller.followed == [] and "the store is away" in caplog.text


class EventAt(threading.Event):
    """Is set at a time of a fake clock, which each wait advances."""

    def __init__(self, clock: FakeClock, at_s: float) -> None:
        super().__init__()
        self.clock, self.at_s = clock, at_s

    def is_set(self) -> bool:
        return self.clock.monotonic_s() >= self.at_s

    def wait(self, timeout: float | None = None) -> bool:
        self.clock.advance(timeout or 0.0)
        return self.is_set()


def test_what_follows_is_known_soon_after_each_session_begins() -> None:
    """A session may be trained in less time than passes between two checks. It would be followed by the
    stream although Kafka has lost the records."""
    harness = HandoverHarness()
    sessions = {0.0: None, 3.0: SESSION, 8.0: dataclasses.replace(NEWER, digest="later")}
    checked: list[tuple[float, TableInput | None]] = []

    def session_now() -> tuple[int, TableInput | None]:
        now_s = harness.clock.monotonic_s()
        return 1, sessions[max(begin_s for begin_s in sessions if begin_s <= now_s)]

    harness.controller.session_now = session_now  # type: ignore[method-assign]
    harness.controller.set_following = lambda session: checked.append(  # type: ignore[method-assign]
        (harness.clock.monotonic_s(), session)
    )
    harness.handover.run(EventAt(harness.clock, 20.0))
    assert [at_s for at_s, _ in checked] == [3.0, 8.0] and checked[0][1] == NEWER


def test_a_failed_check_is_repeated_within_seconds() -> None:
    harness, failures = HandoverHarness(), [UnavailableError("Kafka is away")]
    oldest = harness.handover.oldest

    def fail_once() -> Progress:
        if failures:
            raise failures.pop()
        return oldest()

    harness.handover.oldest = fail_once
    harness.handover.run(EventAt(harness.clock, 20.0))
    assert harness.controller.followed == [NEWER]


def history_of(warehouse: str, topics: Mapping[str, str] = MappingProxyType({})) -> WarehouseHistory:
    files = {"schema": "s.toml", "store": "store", "warehouse": warehouse}
    config = ControllerConfig(bootstrap="k:1", listen="127.0.0.1:0", num_shards=1, **files)  # type: ignore[arg-type]
    return WarehouseHistory(config, topics or {"samples": "id"}, FakeClock(1000))


def archive(location: Path, records: list[Record]) -> None:
    archiver, reader, _ = make_archiver(location, records)
    archiver.open()
    while not reader.at_end():
        archiver.turn(0.0)
    archiver.flush()


@pytest.mark.parametrize("setting", ["", "another"])
def test_a_session_ends_with_the_warehouse_in_which_it_began(setting: str, tmp_path: Path) -> None:
    """A controller with another setting `warehouse` would neither keep the session's files nor find what was
    archived after it."""
    began, records = tmp_path / "began", make_topic_records(rich_schema(), 20)
    archive(began, [record for record in records if record.offset < 10])
    session = history_of(str(began), TOPIC_IDS).newest()
    assert session is not None
    archive(began, records)
    controller, history = FakeController(), history_of(setting and str(tmp_path / setting), TOPIC_IDS)
    controller.now = session
    handover = history.handover(controller, lambda: {("samples", 0): 15})  # type: ignore[arg-type]
    handover.check()
    (following,) = controller.followed
    assert following is not None and following.table == str(began) and following.begins == session.ends
    store = Warehouse(began).store
    assert pinned_versions(store, "samples", 1000) == {session.version, following.version}
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize("exists", [False, True])
def test_a_location_without_a_table_is_a_config_error(exists: bool, tmp_path: Path) -> None:
    """A restart cannot repair a wrong setting, so the error must differ from that of an unavailable store."""
    location = tmp_path / "archive"
    if exists:
        location.mkdir()
    history = history_of(str(location))
    with pytest.raises(ConfigError, match=rf"^warehouse = '{location}': .*/archive/samples "):
        history.newest()
