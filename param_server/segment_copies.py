"""Copies of a shard's segments in the checkpoint store, which make a commit durable where its manifest is
(docs/decisions/0111).

`segments/<shard>-<segment>` has every part of a segment under its key in the key-value store
(param_server/segment_parts.py), the directory first:

    magic RSCP0001 · for each part: length of the key u32 · length of the value u64 · key · value

The manifest names a copy with its size and checksum. Each part is verified against the directory, and the
directory against the manifest, both before it is sent and before it is stored again.
"""

from __future__ import annotations

import concurrent.futures
import struct
from collections import deque
from collections.abc import Callable, Iterator

import xxhash

from param_server.segment_parts import Segment, SegmentParts
from roostream.errors import CheckpointError
from roostream.runtime.checkpoint_store import PART_BYTES, CheckpointStore
from roostream.runtime.manifest import StoredFile, segment_copy_name

_MAGIC = b"RSCP0001"
_PART = struct.Struct("<IQ")
READS_AT_ONCE = 4  # requests on their way while a copy is read


class SegmentCopies:
    """The copies of one shard. One thread at a time.

    `piece_bytes`: what is sent or requested at once. Every method raises UnavailableError if either store
    cannot be used now; what is left then is a segment or an object that nobody names.
    """

    def __init__(self, store: CheckpointStore, shard: int, *, piece_bytes: int = PART_BYTES) -> None:
        self.store, self.shard, self.piece_bytes = store, shard, piece_bytes
        self.sent_bytes = self.fetched_bytes = 0  # since the start

    def send(self, parts: SegmentParts, segment: Segment, on_progress: Callable[[], None]) -> StoredFile:
        """Write the copy of a segment; returns how a manifest names it. `on_progress` is called for each
        piece that was sent or is on its way.

        Raises:
            CheckpointError: the segment is damaged here; there is no copy.
        """
        size = len(_MAGIC) + sum(_PART.size + len(key) + num_bytes for key, num_bytes in parts.sizes(segment))
        hasher, sent = xxhash.xxh3_64(), 0

        def chunks() -> Iterator[bytes]:
            nonlocal sent
            for chunk in _encode(parts.read(segment), self.piece_bytes):
                hasher.update(chunk)
                sent += len(chunk)
                yield chunk
                on_progress()

        name = segment_copy_name(self.shard, segment.name)
        self.store.put_stream(name, chunks(), size)
        self.sent_bytes += sent
        return StoredFile(name=name, bytes=sent, checksum=hasher.hexdigest())

    def fetch(self, parts: SegmentParts, segment: Segment, on_progress: Callable[[], None]) -> None:
        """Store a segment again from its copy, in place of what is left of it. Durable on return.

        Raises:
            CheckpointError: the copy is absent or damaged; the segment is absent.
        """
        assert segment.copy is not None
        reader = _CopyReader(self._pieces(segment.copy, on_progress), segment.copy)
        try:
            parts.store_again(segment, reader.parts())
        except CheckpointError as error:
            raise CheckpointError(f"copy {segment.copy.name} in the checkpoint store: {error}") from None
        self.fetched_bytes += segment.copy.bytes

    def verify(self, segment: Segment) -> None:
        """Read a copy. Raises CheckpointError: it is absent or damaged."""
        assert segment.copy is not None
        for _ in _CopyReader(self._pieces(segment.copy, lambda: None), segment.copy).parts():
            pass

    def _pieces(self, copy: StoredFile, on_progress: Callable[[], None]) -> Iterator[bytes]:
        """The bytes of a copy, in order; a few requests are ahead of the caller."""
        ranges = deque(
            (start, min(self.piece_bytes, copy.bytes - start))
            for start in range(0, copy.bytes, self.piece_bytes)
        )
        with concurrent.futures.ThreadPoolExecutor(READS_AT_ONCE, "fetch") as pool:
            ahead: deque[concurrent.futures.Future[bytes]] = deque()
            try:
                while ranges or ahead:
                    while ranges and len(ahead) < READS_AT_ONCE:
                        ahead.append(pool.submit(self.store.get_range, copy.name, *ranges.popleft()))
                    yield ahead.popleft().result()
                    on_progress()
            finally:
                for future in ahead:
                    future.cancel()


def _encode(parts: Iterator[tuple[bytes, bytes]], piece_bytes: int) -> Iterator[bytes]:
    """The bytes of a copy, in pieces of this size."""
    buffer = bytearray(_MAGIC)
    for key, value in parts:
        buffer += _PART.pack(len(key), len(value)) + key + value
        while len(buffer) >= piece_bytes:
            yield bytes(buffer[:piece_bytes])
            del buffer[:piece_bytes]
    if buffer:
        yield bytes(buffer)


class _CopyReader:
    """Takes a copy apart as its bytes arrive."""

    def __init__(self, pieces: Iterator[bytes], copy: StoredFile) -> None:
        self._pieces, self._copy = pieces, copy
        self._hasher, self._left = xxhash.xxh3_64(), copy.bytes
        self._buffer = bytearray()

    def parts(self) -> Iterator[tuple[bytes, bytes]]:
        """(key, value) of each part. Raises CheckpointError at the end, or before: not the bytes that the
        manifest names."""
        if self._take(len(_MAGIC)) != _MAGIC:
            raise CheckpointError("expected a copy of a segment, got something else: it is damaged")
        while self._left:
            key_bytes, value_bytes = _PART.unpack(self._take(_PART.size))
            yield self._take(key_bytes), self._take(value_bytes)
        if self._hasher.hexdigest() != self._copy.checksum:
            raise CheckpointError("checksum mismatch: it is damaged")

    def _take(self, size: int) -> bytes:
        if size > self._left:
            raise CheckpointError(f"expected {size} more bytes, got {self._left}: it is damaged")
        while len(self._buffer) < size:
            piece = next(self._pieces)
            self._hasher.update(piece)
            self._buffer += piece
        taken = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        self._left -= size
        return taken
