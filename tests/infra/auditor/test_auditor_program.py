"""The auditor as a program: exported metrics, saved files, restarts and outages."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from infra.auditor import auditor_program
from infra.auditor.auditor import Auditor
from infra.auditor.auditor_program import AuditorLoop
from infra.auditor.config import AuditorConfig
from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.consumer import MemoryConsumer, RecordConsumer
from roostream.runtime.kafka.topics import Progress
from tests.infra.auditor.test_auditor import ALL, TOPICS, traffic


class InMemoryAuditor(Auditor):
    """An auditor that reads records in memory."""

    def __init__(self, reader: MemoryConsumer) -> None:
        super().__init__(Broker("nowhere:1"), "x.")
        self.reader = reader

    def open_consumer(self) -> RecordConsumer:
        return self.reader


def make_loop(reader: MemoryConsumer, home: Path, **settings: int) -> AuditorLoop:
    config = AuditorConfig(bootstrap="127.0.0.1:1", home=str(home), **settings)  # type: ignore[arg-type]
    return AuditorLoop(config, InMemoryAuditor(reader), TOPICS)


def test_counters_continue_after_a_restart(tmp_path: Path) -> None:
    reader = MemoryConsumer(ALL, traffic(0, 5))
    first = make_loop(reader, tmp_path)
    assert first.metrics == {}, "no metrics may be exported before something was read"
    first.open()
    first.turn(0.0)
    assert (
        first.metrics["roostream_auditor_requests"] == 5
        and first.metrics["roostream_auditor_accounted"]["yes"] == 1
    )
    first.close()
    reader.append(traffic(5, 5, start=5))
    second = make_loop(reader, tmp_path)
    second.open()
    second.turn(0.0)
    assert second.metrics["roostream_auditor_requests"] == second.metrics["roostream_auditor_samples"] == 10
    assert sum(second.auditor.accounts.num_records.values()) == 20


def test_a_kill_counts_nothing_twice(tmp_path: Path) -> None:
    reader = MemoryConsumer(ALL, traffic(0, 5))
    first = make_loop(reader, tmp_path)
    first.open()
    first.turn(0.0)
    first.save()
    reader.append(traffic(5, 5, start=5))
    first.turn(0.0)  # the process is killed here, before it saves
    second = make_loop(reader, tmp_path)
    second.open()
    second.turn(0.0)
    assert (
        second.metrics["roostream_auditor_requests"] == 10
        and second.metrics["roostream_auditor_duplicates"] == 0
    )


def test_sums_are_exported_even_if_they_cannot_be_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    loop = make_loop(MemoryConsumer(ALL, traffic(0, 5)), tmp_path / "home")
    loop.open()
    loop.home = tmp_path / "file" / "no folder"
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            loop.save()
        loop.close()
    assert caplog.text.count("can't save") == 1 and loop.metrics["roostream_auditor_requests"] == 5


def test_an_unavailable_broker_at_the_start_is_reported(tmp_path: Path) -> None:
    reader = MemoryConsumer(ALL, traffic(0, 5))
    reader.away = True
    loop = make_loop(reader, tmp_path)
    with pytest.raises(UnavailableError):
        loop.open()
    reader.away = False
    loop.open()
    loop.turn(0.0)
    assert loop.metrics["roostream_auditor_requests"] == 5


def test_an_audit_that_has_to_start_over_and_cannot_is_not_reported_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditor_program, "_EXPORT_EVERY_S", 0.0)

    class ConsumerWithoutEnds(MemoryConsumer):
        fails = False

        def end_offsets(self) -> Progress:
            if self.fails:
                raise UnavailableError("injected")
            return super().end_offsets()

    reader = ConsumerWithoutEnds(ALL, traffic(0, 5))
    loop = make_loop(reader, tmp_path)
    loop.open()
    loop.turn(0.0)
    assert loop.metrics["roostream_auditor_accounted"]["yes"] == 1
    reader.append(traffic(5, 5, start=5))
    reader.trim(("impressions", 1), 8)
    reader.fails = True
    with pytest.raises(UnavailableError, match="injected"):
        loop.turn(0.0)
    assert loop.metrics["roostream_auditor_accounted"]["reading"] == 1
    reader.fails = False
    loop.turn(0.0)
    assert loop.metrics["roostream_auditor_lost_records"] == 3
    assert loop.metrics["roostream_auditor_accounted"]["yes"] == 1


def test_unfinished_files_of_a_killed_run_are_swept(tmp_path: Path) -> None:
    unfinished = tmp_path / ".roostream-unfinished.half"
    unfinished.write_bytes(b"half")
    os.utime(unfinished, (0, 0))
    make_loop(MemoryConsumer(ALL), tmp_path).open()
    assert not unfinished.exists()


def test_a_horizon_shorter_than_twice_the_settle_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least twice settle_ms = 600000"):
        AuditorConfig(bootstrap="127.0.0.1:1", home="h", horizon_ms=600_000)
