"""The feature log on disk: it is bounded, keeps its order, and is consistent after a kill at any moment."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.errors import SetupError, WireError
from serving.feature_log.format import HEADER_BYTES, LogRecord
from serving.feature_log.log import FeatureLog, LogFullError
from serving.feature_log.segment import Cursor, CursorFile, LogSegment

SMALL_LOG = {"segment_bytes": 4096, "max_bytes": 3 * 4096}


def record(i: int, size: int = 100) -> LogRecord:
    return LogRecord("impressions", -1, 1000 + i, b"userkey!", i.to_bytes(4, "little") + bytes(size))


def make_log(home: Path, count: int = 60) -> FeatureLog:
    log = FeatureLog.open(home, **SMALL_LOG)
    for i in range(count):
        log.append(record(i))
    return log


def numbers(log: FeatureLog, at: Cursor | None = None) -> list[int]:
    return [
        int.from_bytes(e.record.value[:4], "little") for e in log.read(at or log.cursor, 1 << 30) if e.record
    ]


def test_records_are_read_in_order_across_segments(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    assert numbers(log) == list(range(60))
    assert len(list(tmp_path.glob("*.seg"))) == 3
    assert log.backlog_records == 60
    assert 60 * 144 <= log.backlog_bytes <= 60 * 144 + 3 * HEADER_BYTES
    first = log.read(log.cursor, 300)
    assert len(first) == 3, "a read stops at its budget"
    assert numbers(log, first[-1].after) == list(range(3, 60))
    log.close()


def test_acknowledged_segments_are_deleted_and_the_cursor_survives_a_restart(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    entries = log.read(log.cursor, 1 << 30)
    log.acknowledge(entries[39].after)
    assert len(list(tmp_path.glob("*.seg"))) == 2
    log.close()
    again = FeatureLog.open(tmp_path, **SMALL_LOG)
    assert numbers(again) == list(range(40, 60))
    again.append(record(60))
    assert numbers(again) == list(range(40, 61))
    assert again.end.sequence == 61
    again.close()


def test_a_full_log_refuses_records_until_some_are_delivered(tmp_path: Path) -> None:
    log = FeatureLog.open(tmp_path, **SMALL_LOG)
    count = 0
    with pytest.raises(LogFullError, match=r"is full .* try again later"):
        while True:
            log.append(record(count))
            count += 1
    assert not log.has_room(200)
    assert sum(p.stat().st_size for p in tmp_path.glob("*.seg")) <= SMALL_LOG["max_bytes"]
    assert numbers(log) == list(range(count)), "all records that were accepted are in the log"
    log.acknowledge(log.read(log.cursor, 4096)[-1].after)
    assert log.has_room(200)
    log.append(record(count))
    assert numbers(log)[-1] == count
    log.close()


def test_a_record_larger_than_a_segment_is_refused(tmp_path: Path) -> None:
    log = FeatureLog.open(tmp_path, **SMALL_LOG)
    with pytest.raises(WireError, match="at most 4032 bytes"):
        log.append(record(0, size=5000))
    log.close()


def test_a_closed_log_refuses(tmp_path: Path) -> None:
    log = FeatureLog.open(tmp_path, **SMALL_LOG)
    log.close()
    log.close()
    with pytest.raises(LogFullError, match="closed"):
        log.append(record(0))


def test_two_processes_cannot_open_one_log(tmp_path: Path) -> None:
    log = FeatureLog.open(tmp_path, **SMALL_LOG)
    with pytest.raises(SetupError, match="in use by another process"):
        FeatureLog.open(tmp_path, **SMALL_LOG)
    log.close()
    FeatureLog.open(tmp_path, **SMALL_LOG).close()


def test_an_unusable_log_directory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="another home"):
        FeatureLog.open(tmp_path / "file" / "log", **SMALL_LOG)


def test_no_record_is_lost_if_a_new_segment_cannot_be_created(tmp_path: Path) -> None:
    log = FeatureLog.open(tmp_path, **SMALL_LOG)
    log.directory = tmp_path / "gone"
    with pytest.raises(LogFullError, match="grow"):
        for i in range(100):
            log.append(record(i))
    assert numbers(log) == list(range(log.end.sequence)) != []
    log.close()


def reopen_with_damage(home: Path, at: int, damage: bytes) -> FeatureLog:
    """Reopen a log of 60 records after overwriting bytes of its first segment."""
    make_log(home).close()
    with min(home.glob("*.seg")).open("r+b") as file:
        file.seek(at)
        file.write(damage)
    return FeatureLog.open(home, **SMALL_LOG)


def test_records_after_a_power_failure_are_read_although_older_ones_and_not_the_cursor_were_lost(
    tmp_path: Path,
) -> None:
    log = make_log(tmp_path, count=20)
    log.acknowledge(log.end)
    log.close()
    with min(tmp_path.glob("*.seg")).open("r+b") as file:
        file.seek(HEADER_BYTES + 10 * 144)
        file.write(bytes(10 * 144))
    again = FeatureLog.open(tmp_path, **SMALL_LOG)
    assert again.backlog_records == 0
    for i in range(100, 115):
        again.append(record(i))
    assert numbers(again) == list(range(100, 115)), "also those at the place of lost records"
    again.close()


def test_a_segment_with_a_damaged_header_is_set_aside_and_the_others_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    again = reopen_with_damage(tmp_path, 3, b"?")
    assert numbers(again) == list(range(28, 60))
    assert ".damaged" in caplog.text and len(list(tmp_path.glob("*.damaged"))) == 1
    again.close()


def test_only_the_newest_damaged_segments_are_kept(tmp_path: Path) -> None:
    for number in range(1, 9):
        (tmp_path / f"{number:08d}.seg").write_bytes(b"no header")
    (tmp_path / "notes.damaged").write_bytes(b"not a segment")
    FeatureLog.open(tmp_path, **SMALL_LOG).close()
    kept = [f"{number:08d}.damaged" for number in (6, 7, 8)]
    assert sorted(path.name for path in tmp_path.glob("*.damaged")) == [*kept, "notes.damaged"]


def test_damaged_records_within_a_segment_are_counted_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    again = reopen_with_damage(tmp_path, HEADER_BYTES + 20 * 144, bytes(2 * 144))
    assert numbers(again) == [*range(20), *range(28, 60)]
    assert "8 records before segment 2 are damaged and lost" in caplog.text
    again.close()


@settings(max_examples=40)
@given(st.integers(0, 40), st.data())
def test_a_truncated_last_segment_keeps_its_records_and_is_appended_to(
    tmp_path_factory: pytest.TempPathFactory, count: int, data: st.DataObject
) -> None:
    home = tmp_path_factory.mktemp("log")
    log = make_log(home, count)
    log.close()
    last = sorted(home.glob("*.seg"))[-1]
    end = log.end.offset
    cut = data.draw(st.integers(HEADER_BYTES, end))
    with last.open("r+b") as file:
        file.truncate(cut)
    again = FeatureLog.open(home, **SMALL_LOG)
    kept = numbers(again)
    assert kept == list(range(len(kept))) and len(kept) >= count - (end - cut + 143) // 144
    again.append(record(1000))
    assert numbers(again) == [*kept, 1000]
    again.close()


def test_the_cursor_survives_a_torn_write(tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    file = CursorFile.open(path)
    file.write(Cursor(1, 64, 0))
    file.write(Cursor(2, 128, 7))
    file.close()
    raw = bytearray(path.read_bytes())
    raw[10] ^= 1  # slot 0 has the newer cursor
    path.write_bytes(raw)
    torn = CursorFile.open(path)
    assert torn.cursor == Cursor(1, 64, 0)
    torn.close()


def test_a_lost_cursor_repeats_records_and_loses_none(tmp_path: Path) -> None:
    log = FeatureLog.open(tmp_path, **SMALL_LOG)
    for i in range(10):
        log.append(record(i))
    log.acknowledge(log.read(log.cursor, 1 << 20)[4].after)
    log.close()
    (tmp_path / "cursor").unlink()
    again = FeatureLog.open(tmp_path, **SMALL_LOG)
    assert numbers(again) == list(range(10))
    again.close()


def test_segment_names_and_headers_must_agree(tmp_path: Path) -> None:
    LogSegment.create(tmp_path, Cursor(3, HEADER_BYTES, 0), 4096).close()
    (tmp_path / "00000003.seg").rename(tmp_path / "00000004.seg")
    assert LogSegment.open(tmp_path / "00000004.seg") is None
    (tmp_path / "00000005.seg").write_bytes(b"short")
    assert LogSegment.open(tmp_path / "00000005.seg") is None


_WRITER = """
import sys
from serving.feature_log.log import FeatureLog
from serving.feature_log.format import LogRecord
log = FeatureLog.open(sys.argv[1], segment_bytes=1 << 16, max_bytes=1 << 26)
i = 0
while True:
    log.append(LogRecord("impressions", -1, i, b"userkey!", i.to_bytes(4, "little") + bytes(i % 300)))
    i += 1
    if i % 50 == 0:
        print(i, flush=True)
"""


def test_records_appended_before_kill_9_survive_it(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for _ in range(40):
        line = writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read().split()
    writer.wait()
    writer.stdout.close()
    num_reported = int(rest[-1] if rest else line)
    log = FeatureLog.open(tmp_path, segment_bytes=1 << 16, max_bytes=1 << 26)
    found = numbers(log)
    assert found == list(range(len(found))) and len(found) >= num_reported
    log.close()
