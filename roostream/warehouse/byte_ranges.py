"""Which bytes of a file are asked for together, and a file whose bytes come so.

One call to a store costs as much as many bytes. So columns that lie near each other are read in one, with what lies between them,
as long as that is little (DPP, VLDB 2022, §7: over-read from more than 100 % down to 8 %).
"""

from __future__ import annotations

import bisect
import io
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from roostream.errors import RoostreamError
from roostream.runtime.checkpoint_store import CheckpointStore

MAX_OVER_READ = 0.08
SMALL_BYTES = 4096
"""So much may be read in vain whatever is needed: between columns lie some 70 bytes, in a tiny file more than 8 %."""


class ByteRange(NamedTuple):
    """[start, end) of a file."""

    start: int
    end: int


def merged(
    needed: Iterable[ByteRange], over_read: float = MAX_OVER_READ, small: int = SMALL_BYTES
) -> list[ByteRange]:
    """The fewest ranges that hold all of `needed` and at most `over_read` times as many bytes that aren't needed, or `small`
    bytes, where that is more; with `over_read` 0 none.

    Holes are filled from the smallest on, of those alike the first, as long as the bound allows: columns of one width leave
    holes of one width, and a rule by width would have to fill all of these or none.
    """
    ranges = _joined(needed)
    budget = max(over_read * sum(end - start for start, end in ranges), small) if over_read else 0
    filled = set()
    for hole, n in sorted((b.start - a.end, n) for n, (a, b) in enumerate(itertools.pairwise(ranges))):
        budget -= hole
        if budget < 0:
            break
        filled.add(n)
    out = ranges[:1]
    for n, one in enumerate(ranges[1:]):
        if n in filled:
            out[-1] = ByteRange(out[-1].start, one.end)
        else:
            out.append(one)
    return out


def _joined(needed: Iterable[ByteRange]) -> list[ByteRange]:
    """In order, those that touch or overlap as one."""
    out: list[ByteRange] = []
    for one in sorted(needed):
        if out and one.start <= out[-1].end:
            out[-1] = ByteRange(out[-1].start, max(out[-1].end, one.end))
        else:
            out.append(one)
    return out


class RangedFile(io.RawIOBase):
    """An object of a store as a file to read. What was fetched answers; what wasn't is asked for as it is read. One thread."""

    def __init__(self, store: CheckpointStore, name: str, size: int) -> None:
        self.store, self.object, self.size = store, name, size
        self.num_requests = self.num_bytes = 0
        self.error: RoostreamError | None = (
            None  # what a read ended with: those who read through others' code ask here
        )
        self._at = 0
        self._starts: list[int] = []
        self._parts: list[memoryview] = []

    def fetch(self, ranges: Iterable[ByteRange]) -> None:
        """Have these bytes here, and forget those that were.

        Raises:
            UnavailableError: the store. CheckpointError: the object is absent or ends before.
        """
        found = [(start, self._get(start, end - start)) for start, end in ranges]
        self._starts, self._parts = [start for start, _ in found], [memoryview(part) for _, part in found]

    def read(self, size: int = -1) -> bytes:
        return bytes(self.read_buffer(size))

    def read_buffer(self, size: int = -1) -> memoryview:
        """As `read`, without a copy of what was fetched; Arrow asks for a method of this name."""
        size = min(self.size - self._at if size is None or size < 0 else size, self.size - self._at)
        n = bisect.bisect_right(self._starts, self._at) - 1
        first = self._at - self._starts[n] if n >= 0 else 0
        data = self._parts[n][first : first + size] if n >= 0 else memoryview(b"")
        if len(data) < size:
            data = memoryview(self._get(self._at, size))
        self._at += size
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def _get(self, start: int, size: int) -> bytes:
        try:
            data = self.store.get_range(self.object, start, size)
        except RoostreamError as error:
            self.error = error
            raise
        self.num_requests, self.num_bytes = self.num_requests + 1, self.num_bytes + size
        return data
