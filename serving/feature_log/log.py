"""The feature log: every record is on disk before its answer is sent, and stays until Kafka has acknowledged
it.

    home/log/00000007.seg 00000008.seg 00000009.seg      fully acknowledged segments are deleted
                    ▲ cursor                  ▲ end
         all before it is acknowledged        appends go here

Appends are stores into a shared memory map: they survive kill -9 of the process, but not a power failure.
Delivery is at least once: after a restart everything after the cursor is sent again, and the joiner
deduplicates. The size is bounded: a full log refuses records (G7); it never grows further and never drops a
record.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from roostream.errors import SetupError, UnavailableError, WireError
from serving.feature_log.format import HEADER_BYTES, LogRecord, record_bytes
from serving.feature_log.segment import Cursor, CursorFile, LogSegment

log = logging.getLogger("roostream.serving.log")

_READ_BYTES = 1 << 20
_KEEP_DAMAGED = 3  # files that are not segments, kept so that their damage can be examined


class LogFullError(UnavailableError):
    """The feature log is full until Kafka accepts records; nothing was appended."""


class LogEntry(NamedTuple):
    """A record and the cursor after it."""

    after: Cursor
    record: LogRecord | None  # None: damaged on disk


class FeatureLog:
    """Append from any thread; `read` and `acknowledge` from one. Construct with `open`."""

    def __init__(
        self,
        directory: Path,
        segments: list[LogSegment],
        cursors: CursorFile,
        lock_handle: int,
        sizes: tuple[int, int],
    ) -> None:
        self.directory, self.segment_bytes, self.max_bytes = directory, *sizes
        self.appended = threading.Event()  # set by every append; the reader clears it before it reads
        self._segments = {s.start.segment: s for s in segments}
        self._cursors, self._lock_handle = cursors, lock_handle
        self._active = segments[-1]
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(
        cls, directory: str | Path, *, max_bytes: int = 256 << 20, segment_bytes: int = 8 << 20
    ) -> FeatureLog:
        """Open or create the log in `directory`. Records of an earlier process are kept and read from its
        cursor on.

        Raises:
            SetupError: another process has the log open, or the disk fails.
        """
        assert segment_bytes * 2 <= max_bytes
        directory = Path(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock_handle = _claim(directory)
            segments = list(_open_segments(directory))
            cursors = CursorFile.open(directory / "cursor")
            if segments:
                segments[-1] = segments[-1].reopen(segment_bytes)
            else:
                at = cursors.cursor or Cursor(0, 0, 0)
                segments = [
                    LogSegment.create(
                        directory, Cursor(at.segment + 1, HEADER_BYTES, at.sequence), segment_bytes
                    )
                ]
        except OSError as error:
            raise SetupError(
                f"feature log {directory} cannot be used: {error.strerror}; free space or choose another home"
            ) from None
        opened = cls(directory, segments, cursors, lock_handle, (segment_bytes, max_bytes))
        opened.acknowledge(opened.cursor)
        return opened

    @property
    def cursor(self) -> Cursor:
        """Everything before it is acknowledged."""
        stored, oldest = self._cursors.cursor, self._segments[min(self._segments)].start
        if stored is None or stored.segment not in self._segments:
            return oldest
        segment = self._segments[stored.segment]
        if segment is self._active and stored.offset > segment.end.offset:
            return segment.end  # a power failure kept the cursor and lost the records before it
        # a stored cursor of another log with the same segment number has other sequence numbers
        return (
            stored if segment.start.sequence <= stored.sequence and stored.offset >= HEADER_BYTES else oldest
        )

    @property
    def end(self) -> Cursor:
        return self._active.end

    @property
    def backlog_records(self) -> int:
        return self.end.sequence - self.cursor.sequence

    @property
    def backlog_bytes(self) -> int:
        """Unacknowledged bytes, including headers."""
        with self._lock:
            cursor = self.cursor
            return sum(s.end.offset for n, s in self._segments.items() if n >= cursor.segment) - cursor.offset

    def has_room(self, value_bytes: int) -> bool:
        """Whether a record with a value of this size would be accepted now."""
        return self._active.has_room(value_bytes + 64) or self._may_rotate()

    def append(self, record: LogRecord) -> None:
        """Append a record. Once this returns, it will be sent to Kafka at least once, even after kill -9 of
        this process.

        Raises:
            LogFullError: the log or the disk is full; nothing was appended.
            WireError: `oversized`: the record does not fit into a segment; nothing was appended.
        """
        size = record_bytes(record)
        if size > self.segment_bytes - HEADER_BYTES:
            raise WireError(
                "oversized",
                f"expected a record of at most {self.segment_bytes - HEADER_BYTES} bytes, got {size}",
            )
        with self._lock:
            if self._closed:
                raise LogFullError("the feature log is closed: this process is stopping; use another one")
            if not self._active.has_room(size):
                self._rotate()
            self._active.append(record)
        self.appended.set()

    def read(self, at: Cursor, max_bytes: int) -> list[LogEntry]:
        """Return entries from `at` in append order, about `max_bytes` of them, across segments; empty at the
        end."""
        entries: list[LogEntry] = []
        budget = max_bytes
        while budget > 0:
            for found in self._segments[at.segment].scan(at):
                budget -= found.next_offset - at.offset
                at = Cursor(at.segment, found.next_offset, found.sequence + 1)
                entries.append(LogEntry(at, found.record))
                if budget <= 0:
                    return entries
            following = self._following(at)
            if following is None:
                return entries
            at = following
        return entries

    def unacknowledged_events(self) -> list[int]:
        """Sequence numbers of the records after the cursor that are no heartbeats. Only heartbeats name a
        partition."""
        numbers: list[int] = []
        at = self.cursor
        while entries := self.read(at, _READ_BYTES):
            at = entries[-1].after
            numbers += [
                entry.after.sequence - 1
                for entry in entries
                if entry.record is not None and entry.record.partition < 0
            ]
        return numbers

    def acknowledge(self, cursor: Cursor) -> None:
        """Store that everything before `cursor` is delivered, and delete the segments before it."""
        self._cursors.write(cursor)
        with self._lock:
            for number in [n for n in self._segments if n < cursor.segment]:
                segment = self._segments.pop(number)
                segment.close()
                segment.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Idempotent. Later appends raise LogFullError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for segment in self._segments.values():
                segment.close()
            self._cursors.close()
            os.close(self._lock_handle)

    def _following(self, at: Cursor) -> Cursor | None:
        """The start of the next segment if `at` is the end of a full one; else None."""
        with self._lock:
            if at.segment == self._active.start.segment:
                return None
            start = self._segments[min(n for n in self._segments if n > at.segment)].start
        if start.sequence > at.sequence:
            log.error(
                "feature log: %d records before segment %d are damaged and lost",
                start.sequence - at.sequence,
                start.segment,
            )
        return start

    def _may_rotate(self) -> bool:
        return (len(self._segments) + 1) * self.segment_bytes <= self.max_bytes

    def _rotate(self) -> None:
        if not self._may_rotate():
            raise LogFullError(
                f"the feature log is full ({self.max_bytes >> 20} MiB): Kafka has not accepted its "
                "records; try again later"
            )
        end = self._active.end
        try:
            self._active = LogSegment.create(
                self.directory, Cursor(end.segment + 1, HEADER_BYTES, end.sequence), self.segment_bytes
            )
        except OSError as error:
            raise LogFullError(
                f"the feature log cannot grow: {error.strerror}; free space at {self.directory}"
            ) from None
        self._segments[end.segment + 1] = self._active


def _claim(directory: Path) -> int:
    handle = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise SetupError(
            f"feature log {directory} is in use by another process; give each serving process its own home"
        ) from None
    return handle


def _open_segments(directory: Path) -> Iterator[LogSegment]:
    """Yield the segments, oldest first. Files that are not segments are renamed, with an error in the log
    (G5); the newest few of them are kept."""
    for path in sorted(directory.glob("*.seg")):
        segment = LogSegment.open(path)
        if segment is None:
            damaged = path.with_suffix(".damaged")
            log.error("feature log: %s has no valid header; renamed to %s", path, damaged.name)
            path.rename(damaged)
        else:
            yield segment
    for path in sorted(directory.glob("[0-9]" * 8 + ".damaged"))[:-_KEEP_DAMAGED]:
        path.unlink()
