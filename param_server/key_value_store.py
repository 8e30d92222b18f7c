"""The key-value store of a shard's segments: bytes under keys, written atomically and synced."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import rocksdict

from roostream.errors import CheckpointError, RoostreamError, SetupError, UnavailableError

log = logging.getLogger("roostream.segments")

_FLUSH_BYTES = 4 << 20
"""RocksDB keeps written values in memory until its buffer is full, which takes an hour of small commits. So
the store flushes once this much was written."""

_MAX_LOG_BYTES = 64 << 20  # values are in the log before they are in a file
_SPARE_BYTES = 4 << 20  # for RocksDB's own files


class KeyValueStore(Protocol):
    """One thread at a time.

    Every method but `close` raises UnavailableError if the store cannot be read or written now (a full disk,
    a lost mount; trying again can help), and CheckpointError if the store reports that its data are damaged.
    """

    def get(self, key: bytes) -> bytes | None:
        """None if absent. Checksums are the caller's."""

    def write(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        """Write all or nothing. With `sync`, this and every earlier write is durable on return.

        **If it fails:** none of the keys changed, and the next call works as soon as the disk does.
        """

    def keys(self, prefix: bytes) -> Iterator[bytes]:
        """Ascending."""

    def check_space(self, num_bytes: int) -> None:
        """Raise UnavailableError if there is no space for values of this size. `write` checks its own."""

    def close(self) -> None:
        """Idempotent."""


class MemoryKeyValueStore:
    """A dict; `fail_at(n)` makes the n-th write from now fail, as a full disk does."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self._until_failure = 0

    def fail_at(self, nth_write: int) -> None:
        self._until_failure = nth_write

    def get(self, key: bytes) -> bytes | None:
        return self.data.get(key)

    def write(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        if self._until_failure:
            self._until_failure -= 1
            if not self._until_failure:
                raise UnavailableError("segments cannot be written: injected; free disk space")
        self.data.update(puts)
        for key in deletes:
            self.data.pop(key, None)

    def keys(self, prefix: bytes) -> Iterator[bytes]:
        return iter(sorted(k for k in self.data if k.startswith(prefix)))

    def check_space(self, num_bytes: int) -> None:
        """There is always enough."""

    def close(self) -> None:
        """Nothing to close."""


class RocksDbStore:
    """RocksDB through rocksdict, in raw mode (bytes only, nothing pickled)."""

    def __init__(self, directory: str | Path, options: Callable[[], rocksdict.Options] | None = None) -> None:
        self.directory, self._options = Path(directory), options or rocks_options
        self._db: rocksdict.Rdict | None = None
        self._in_use = False
        self._unflushed_bytes = 0

    def open(self, *, read_only: bool = False) -> RocksDbStore:
        """Open or create the directory; return self. `read_only`: beside the process that writes it; then the
        directory must exist. Raises SetupError: another process has it open, it cannot be read or written, or
        it is damaged; the message says what to do."""
        access = rocksdict.AccessType.read_only() if read_only else rocksdict.AccessType.read_write()
        try:
            if not read_only:
                self.directory.mkdir(parents=True, exist_ok=True)
            self._db = rocksdict.Rdict(str(self.directory), self._options(), access_type=access)
        except Exception as error:  # rocksdict raises plain Exception
            raise SetupError(
                f"segments in {self.directory} cannot be opened ({error}); {self._remedy(error)}"
            ) from None
        self._in_use = True
        return self

    def get(self, key: bytes) -> bytes | None:
        db = self.database()
        try:
            return db.get(key)
        except Exception as error:
            raise self._failure("read", error) from None

    def write(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        num_bytes = 0
        for key, value in puts:
            batch.put(key, value)
            num_bytes += len(value)
        for key in deletes:
            batch.delete(key)
        options = rocksdict.WriteOptions()
        options.sync = sync
        if num_bytes:
            self.check_space(num_bytes)
        db = self.database()
        try:
            db.write(batch, options)
        except Exception as error:
            del db
            self._close_database()  # after a failed write RocksDB rejects all others until it is opened again
            raise self._failure("written", error) from None
        self._unflushed_bytes += num_bytes
        if sync and self._unflushed_bytes >= _FLUSH_BYTES:
            self._flush(db)

    def check_space(self, num_bytes: int) -> None:
        # Without space RocksDB can neither delete nor be opened, because opening flushes. What an aborted
        # commit has written would then stay.
        db = self.database()
        for is_last in (False, True):
            in_memory = int(db.property_int_value("rocksdb.cur-size-all-mem-tables") or 0)
            needed = in_memory + num_bytes + min(num_bytes, _MAX_LOG_BYTES) + _SPARE_BYTES
            try:
                disk = os.statvfs(self.directory)
            except OSError as error:
                raise self._failure("written", error) from None
            if (free := disk.f_bavail * disk.f_frsize) >= needed:
                return
            if not is_last:
                self._flush(db)  # this drops deleted values, and the log
                db = self.database()
        raise UnavailableError(
            f"segments in {self.directory} cannot be written: expected {needed >> 20} MiB of free space, got "
            f"{free >> 20}; free disk space"
        )

    def _flush(self, db: rocksdict.Rdict) -> None:
        """Free the memory of written values. What cannot be flushed stays in the log, which was synced."""
        self._unflushed_bytes = 0
        try:
            db.flush(True)
        except Exception as error:
            del db
            log.warning(
                "segments in %s cannot be flushed (%s); %s", self.directory, error, self._remedy(error)
            )
            self._close_database()

    def keys(self, prefix: bytes) -> Iterator[bytes]:
        db = self.database()
        try:
            for key in db.keys(from_key=prefix):
                if not key.startswith(prefix):
                    return
                yield key
        except Exception as error:
            raise self._failure("listed", error) from None

    def close(self) -> None:
        self._in_use = False
        self._close_database()

    def database(self) -> rocksdict.Rdict:
        """The database, opened again if a failed write has closed it."""
        if self._db is None:
            if not self._in_use:
                raise UnavailableError(f"segments in {self.directory} are closed")
            try:
                self.open()
            except SetupError as error:
                raise UnavailableError(str(error)) from None
        assert self._db is not None
        return self._db

    def _close_database(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            try:
                db.close()  # closing flushes, which fails like the write before; it is closed all the same
            except Exception as error:
                log.warning(
                    "segments in %s were closed without a flush (%s); their log has everything",
                    self.directory,
                    error,
                )

    def _failure(self, what: str, error: Exception) -> RoostreamError:
        if self._is_damage(error):
            return CheckpointError(
                f"segments in {self.directory} cannot be {what}: they are damaged ({error})"
            )
        return UnavailableError(
            f"segments in {self.directory} cannot be {what} ({error}); {self._remedy(error)}"
        )

    def _is_damage(self, error: Exception) -> bool:
        """A checksum mismatch, or a missing file in an existing database."""
        text = str(error)
        return "Corruption" in text or ("No such file" in text and (self.directory / "CURRENT").exists())

    def _remedy(self, error: Exception) -> str:
        if "LOCK" in str(error):
            return "stop the other shard process that uses them"
        if self._is_damage(error):
            return 'they are damaged: restore them from a backup (docs/architecture.md, "Damage")'
        return "free disk space, or make the directory readable and writable"


def rocks_options() -> rocksdict.Options:
    """For rows: few large values, each written once."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(rocksdict.DBCompressionType.none())  # rows do not compress
    options.set_write_buffer_size(32 << 20)
    options.set_max_total_wal_size(_MAX_LOG_BYTES)
    options.set_enable_blob_files(True)  # large values are not copied at each level
    options.set_min_blob_size(16 << 10)
    options.set_enable_blob_gc(True)
    tables = rocksdict.BlockBasedOptions()
    tables.set_block_cache(rocksdict.Cache(4 << 20))  # segments are read once, at a restore or a check
    options.set_block_based_table_factory(tables)
    options.set_max_background_jobs(min(os.cpu_count() or 1, 2))
    options.set_keep_log_file_num(2)
    # Each flush makes two files. RocksDB keeps all of them open without this: 1024, the usual limit of a
    # process, with 2 GB of segments.
    options.set_max_open_files(256)
    return options
