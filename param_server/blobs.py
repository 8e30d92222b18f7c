"""Where a shard keeps its segments: bytes under keys, written together, synced."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import rocksdict

from roo.errors import CheckpointError, SetupError

log = logging.getLogger("roostream.segments")


class Blobs(Protocol):
    """One writer at a time; reads from any thread."""

    def get(self, key: bytes) -> bytes | None:
        """None if absent. Checksums are the caller's."""

    def write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False) -> None:
        """All or nothing. With `sync`, this and every earlier write outlives power loss when the call returns.

        **If it fails** (CheckpointError: disk full, I/O): none of this call's keys changed; the store can be used again.
        """

    def keys(self, prefix: bytes) -> Iterator[bytes]:
        """Ascending."""

    def close(self) -> None:
        """Idempotent."""


class MemoryBlobs:
    """A dict; `fail_at(n)` makes the n-th write from now fail, as a full disk does."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self._until_failure = 0

    def fail_at(self, nth_write: int) -> None:
        self._until_failure = nth_write

    def get(self, key: bytes) -> bytes | None:
        return self.data.get(key)

    def write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False) -> None:
        if self._until_failure:
            self._until_failure -= 1
            if not self._until_failure:
                raise CheckpointError("segments can't be written: injected; free disk space")
        self.data.update(puts)
        for key in deletes:
            self.data.pop(key, None)

    def keys(self, prefix: bytes) -> Iterator[bytes]:
        return iter(sorted(k for k in self.data if k.startswith(prefix)))

    def close(self) -> None:
        """Nothing to let go of."""


class RocksBlobs:
    """RocksDB through rocksdict, in its raw mode (bytes only, nothing pickled)."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._db: rocksdict.Rdict | None = None

    def open(self) -> RocksBlobs:
        """Open or make the directory; self.

        Raises:
            SetupError: another process has it open, or it can't be read or written.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._db = rocksdict.Rdict(str(self.directory), _options())
        except Exception as error:  # rocksdict raises plain Exception
            raise SetupError(
                f"segments in {self.directory} can't be opened ({error}); stop the other shard that uses them, "
                "or make the directory writable"
            ) from None
        return self

    def get(self, key: bytes) -> bytes | None:
        try:
            return self._opened().get(key)
        except Exception as error:
            raise CheckpointError(f"segments in {self.directory} can't be read: {error}") from None

    def write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, value in puts:
            batch.put(key, value)
        for key in deletes:
            batch.delete(key)
        options = rocksdict.WriteOptions()
        options.sync = sync
        try:
            self._opened().write(batch, options)
        except Exception as error:
            self._reopen()  # after a failed write RocksDB refuses all others until it is opened again
            raise CheckpointError(f"segments in {self.directory} can't be written ({error}); free disk space") from None

    def keys(self, prefix: bytes) -> Iterator[bytes]:
        for key in self._opened().keys(from_key=prefix):
            if not key.startswith(prefix):
                return
            yield key

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _opened(self) -> rocksdict.Rdict:
        if self._db is None:
            raise CheckpointError(f"segments in {self.directory} are closed")
        return self._db

    def _reopen(self) -> None:
        self.close()
        with contextlib.suppress(SetupError):  # still no room: the next call says that they are closed, and so on
            self.open()


def _options() -> rocksdict.Options:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(rocksdict.DBCompressionType.none())  # rows are noise to a compressor
    options.set_write_buffer_size(32 << 20)
    options.set_max_total_wal_size(64 << 20)
    options.set_enable_blob_files(True)  # big values are not copied again at each level
    options.set_min_blob_size(16 << 10)
    options.set_enable_blob_gc(True)
    options.set_max_background_jobs(min(os.cpu_count() or 1, 2))
    options.set_keep_log_file_num(2)
    return options
