"""The archive phase of a replay: the log's events before a date go through the stack's archiver into a
warehouse before training starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roostream.cli.replay.stack_replay import ArchivePhase, SplitLog, options_for_up, stack_options
from roostream.errors import ConfigError
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.clock import FakeClock
from roostream.warehouse.compact import Compactor
from roostream.warehouse.config import CompactorConfig
from roostream.warehouse.warehouse import Warehouse
from roostream.wire.records import Record
from tests.cli.replay.test_stack_replay import config
from tests.trainer import samples
from tests.warehouse.archive_runs import make_archiver, make_topic_records
from tests.warehouse.sample_cases import rich_schema
from tests.warehouse.sessions.test_sample_table import archive


def records_at(*times_ms: int) -> list[Record]:
    return [Record("impressions", 0, -1, time_ms, b"", b"") for time_ms in times_ms]


def test_a_log_is_split_at_a_time_without_losses() -> None:
    log = SplitLog(iter(records_at(1, 4, 4, 5, 9)), 5)
    assert [record.timestamp_ms for record in log.before()] == [1, 4, 4]
    assert [record.timestamp_ms for record in log.others()] == [5, 9]
    all_before = SplitLog(records_at(1, 2), 5)
    assert len(list(all_before.before())) == 2 and not list(all_before.others())


def test_the_log_is_read_only_as_far_as_needed() -> None:
    read: list[int] = []

    def log() -> Iterator[Record]:
        for record in records_at(1, 2, 3, 4):
            read.append(record.timestamp_ms)
            yield record

    assert len(list(SplitLog(log(), 2).before())) == 1
    assert read == [1, 2]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder whose warehouse has 60 samples of one day, 30 from each of two partitions."""
    Warehouse(tmp_path / "warehouse").create()
    archive(tmp_path / "warehouse", samples.records(list(range(1, 61))))
    return tmp_path


def archive_phase(home: Path, clock: FakeClock) -> ArchivePhase:
    return ArchivePhase(home / "warehouse", FileStore(home / "store"), clock)


def test_the_archive_is_complete_when_files_have_all_samples(home: Path) -> None:
    clock = FakeClock()
    phase = archive_phase(home, clock)
    ends = {0: 30, 1: 30}
    assert not phase.is_archived({}), "nothing is joined yet"
    assert not phase.is_archived(ends)
    clock.advance(4.0)
    assert not phase.is_archived(ends)
    clock.advance(1.0)
    assert phase.is_archived(ends)
    assert not phase.is_archived({0: 30, 1: 31}), "one more sample was joined"
    clock.advance(60.0)
    assert not phase.is_archived({0: 30, 1: 31}), "the new sample is not in a file"
    assert not archive_phase(home / "elsewhere", clock).is_archived(ends)


def test_the_archive_phase_waits_until_finished_days_are_sealed(tmp_path: Path) -> None:
    clock, ends = FakeClock(), {0: 30, 1: 30}
    archiver, reader, _ = make_archiver(
        tmp_path / "warehouse", make_topic_records(rich_schema(), 30, days=3), clock=clock
    )
    archiver.open()
    while not reader.at_end():
        archiver.turn(0.0, max_records=13)
    archiver.flush()
    phase = archive_phase(tmp_path, clock)
    phase.is_archived(ends)
    clock.advance(5.0)
    assert not phase.is_archived(ends)
    compactor = Compactor(
        Warehouse(tmp_path / "warehouse"), CompactorConfig(warehouse=str(tmp_path / "warehouse")), clock
    )
    assert all(compactor.seal(seal) for seal in compactor.due())
    assert phase.is_archived(ends)
    found = phase.archived()
    assert (found.samples, found.days, found.archive_s) == (60, 3, 5.0) and 0 < found.sealed < found.files


def test_a_stack_that_archives_first_has_archivers_and_a_trainer_that_begins_in_the_warehouse(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    replay_config = config(tmp_path, archived_until="2024-05-01", set=("controller.unit_records=100",))
    options = stack_options(replay_config, home)
    assert options.num_archivers == 1
    assert options.overrides["controller"] == {
        "commit_interval_ms": 5000,
        "warehouse": str(home / "warehouse"),
        "unit_records": 100,
    }
    saved_overrides = options_for_up(replay_config, options, home).overrides
    assert saved_overrides["controller"] == {"unit_records": 100}, (
        "a model that is already trained does not start in the warehouse"
    )
    assert stack_options(config(tmp_path), home).num_archivers == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "local", "archived_until": "2024-05-01"}, "'archived_until': expected --engine stack,"),
        ({"archived_until": "soon"}, "archived_until"),
    ],
)
def test_impossible_settings_are_rejected(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **settings)
