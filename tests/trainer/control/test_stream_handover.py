"""What comes behind a session: the stream where Kafka still has it, else what was archived meanwhile."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.topics import Progress
from roostream.runtime.work_unit import TableInput
from tests.runtime.manifest_cases import an_input
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
        (Margin(records=50, archived=40), False, "little is new: the stream has it"),
        (Margin(records=50, archived=41), True, "much is new"),
        (Margin(records=-1, archived=1), True, "Kafka lost it, the archive has it"),
        (Margin(records=-1, archived=0), False, "nobody has it: the reader counts what is lost"),
    ],
)
def test_when_a_further_session_follows(found: Margin, further: bool, why: str) -> None:
    assert needs_further_session(found, 40) is further, why


class FakeController:
    def __init__(self) -> None:
        self.now: TableInput | None = SESSION
        self.followed: list[TableInput | None] = []

    def session_now(self) -> tuple[int, TableInput | None]:
        return 1, self.now

    def set_following(self, session: TableInput | None) -> None:
        self.followed.append(session)


class Case:
    def __init__(
        self, newest: TableInput | None = NEWER, oldest: Progress | None = None, most: int = 10
    ) -> None:
        self.controller, self.clock, self.newest = FakeController(), FakeClock(1000), newest
        self.held: list[tuple[int, int]] = []
        self.asked: list[Progress] = []
        self.it = StreamHandover(
            self.controller,  # type: ignore[arg-type]
            self._newest,
            lambda session, until_ms: self.held.append((session.version, until_ms)),
            lambda: oldest or {},
            self.clock,
            most,
        )

    def _newest(self, begins: Progress) -> TableInput | None:
        self.asked.append(begins)
        return self.newest


def test_table_versions_in_use_are_protected() -> None:
    case = Case()
    case.it.check()
    assert case.controller.followed == [NEWER] and case.asked == [SESSION.ends]
    assert case.held == [(7, 1000 + PROTECT_MS), (9, 1000 + PROTECT_MS)]


def test_the_stream_follows_if_little_was_archived_meanwhile() -> None:
    case = Case(most=1000)
    case.it.check()
    assert case.controller.followed == [None] and case.held == [(7, 1000 + PROTECT_MS)]


def test_nothing_is_checked_during_the_stream() -> None:
    case = Case()
    case.controller.now = None
    case.it.check()
    assert (case.controller.followed, case.held) == ([], [])


def test_a_failed_check_changes_nothing_and_is_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case, stop = Case(), threading.Event()

    def away(session: TableInput, until_ms: int) -> None:
        stop.set()
        raise UnavailableError("the store is away")

    case.it.protect = away
    case.it.run(stop)
    assert case.controller.followed == [] and "the store is away" in caplog.text


@pytest.mark.parametrize("exists", [False, True])
def test_a_location_without_a_table_is_a_config_error(exists: bool, tmp_path: Path) -> None:
    """No start mends that: whoever supervises has to know it from a place that is away."""
    place = tmp_path / "archive"
    if exists:
        place.mkdir()
    files = {"schema": "s.toml", "store": "store", "warehouse": str(place)}
    config = ControllerConfig(bootstrap="k:1", listen="127.0.0.1:0", num_shards=1, **files)  # type: ignore[arg-type]
    history = WarehouseHistory(config, {"samples": "id"}, FakeClock(1000))
    with pytest.raises(ConfigError, match=rf"^warehouse = '{place}': .*/archive/samples "):
        history.newest()
