"""Files of the feature log: memory-mapped segments, and the cursor."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from serving.feature_log.format import (
    HEADER_BYTES,
    LogRecord,
    ScannedRecord,
    decode_header,
    encode_header,
    encode_record,
    scan,
)

_PREFIX_BYTES = 8  # of a record; stored last


class Cursor(NamedTuple):
    """A position between two records."""

    segment: int
    offset: int
    sequence: int  # of the record after it


class LogSegment:
    """One memory-mapped file. Not thread-safe: the log's lock covers appends; readers see complete records
    only."""

    def __init__(self, path: Path, memory: mmap.mmap, start: Cursor, end: Cursor) -> None:
        self.path, self.memory, self.start, self.end = path, memory, start, end

    @staticmethod
    def name_of(number: int) -> str:
        return f"{number:08d}.seg"

    @classmethod
    def create(cls, directory: Path, start: Cursor, size: int) -> LogSegment:
        """Create an empty segment with allocated blocks, so that a full disk is an OSError here and not a
        signal later.

        After a failure, a file may remain that is not named like a segment; `open` ignores it.
        """
        path = directory / cls.name_of(start.segment)
        temporary = path.with_suffix(".new")
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)
            os.pwrite(handle, encode_header(start.segment, start.sequence), 0)
            memory = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        os.rename(temporary, path)
        return cls(path, memory, start, start)

    @classmethod
    def open(cls, path: Path) -> LogSegment | None:
        """Open a segment of an earlier process for reading; None if the file is not a segment. `reopen` or
        reading finds its end."""
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < HEADER_BYTES:
                return None
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        header = decode_header(memory)
        if header is None or cls.name_of(header[0]) != path.name:
            memory.close()
            return None
        start = Cursor(header[0], HEADER_BYTES, header[1])
        return cls(path, memory, start, Cursor(header[0], len(memory), header[1]))

    def reopen(self, size: int) -> LogSegment:
        """Open the same segment for appending: find its end and zero the bytes after it, an incomplete
        record."""
        end = self.start
        for found in self.scan(self.start):
            end = Cursor(self.start.segment, found.next_offset, found.sequence + 1)
        size = max(size, len(self.memory))
        self.close()
        handle = os.open(self.path, os.O_RDWR)
        try:
            os.ftruncate(handle, end.offset)
            os.posix_fallocate(handle, 0, size)
            memory = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        return LogSegment(self.path, memory, self.start, end)

    def has_room(self, size: int) -> bool:
        return self.end.offset + size <= len(self.memory)

    def append(self, record: LogRecord) -> None:
        """The caller has checked `has_room`. The record survives kill -9 once the last line has run; before,
        nothing was appended."""
        raw, at = encode_record(record, self.end.sequence), self.end.offset
        self.memory[at + _PREFIX_BYTES : at + len(raw)] = raw[_PREFIX_BYTES:]
        self.memory[at : at + _PREFIX_BYTES] = raw[:_PREFIX_BYTES]
        self.end = Cursor(self.end.segment, at + len(raw), self.end.sequence + 1)

    def scan(self, at: Cursor) -> Iterator[ScannedRecord]:
        return scan(self.memory, at.sequence, at.offset)

    def close(self) -> None:
        self.memory.close()


class CursorFile:
    """The acknowledged cursor in two slots, written in turn, so that an incomplete write does not count.

    slot (64 bytes): generation u64 · segment u64 · offset u64 · sequence u64 · xxh3 of those 32 bytes u64 ·
    zeros
    """

    SLOT_BYTES = 64
    _SLOT = struct.Struct("<QQQQ")

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self._generation, self.cursor = max(self._slots(), default=(0, None), key=lambda slot: slot[0])

    @classmethod
    def open(cls, path: Path) -> CursorFile:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(handle, 0, 2 * cls.SLOT_BYTES)
            return cls(mmap.mmap(handle, 2 * cls.SLOT_BYTES))
        finally:
            os.close(handle)

    def write(self, cursor: Cursor) -> None:
        self._generation += 1
        raw = self._SLOT.pack(self._generation, *cursor)
        raw += xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little")
        at = self._generation % 2 * self.SLOT_BYTES
        self.memory[at : at + len(raw)] = raw
        self.cursor = cursor

    def close(self) -> None:
        self.memory.close()

    def _slots(self) -> Iterator[tuple[int, Cursor | None]]:
        for at in (0, self.SLOT_BYTES):
            raw = self.memory[at : at + self._SLOT.size]
            stated = int.from_bytes(self.memory[at + len(raw) : at + len(raw) + 8], "little")
            generation, *cursor = self._SLOT.unpack(raw)
            if generation and stated == xxhash.xxh3_64_intdigest(raw):
                yield generation, Cursor(*cursor)
