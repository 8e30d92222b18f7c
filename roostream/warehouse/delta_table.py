"""A table's log: its files, and how far each program has come. The only importer of deltalake.

A commit adds files and progress together, or nothing. Progress is stored as Delta's application transactions:
of two commits that move the same name one is rejected, while others are rebased over each other
(docs/decisions/0058).

    samples/<topic id>/<partition>      next offset of the topic that is in no file yet
    corrections/<topic id>/<partition>  the same, in the table of corrections
    compact/<day>/<partition>           how often that day's files were replaced
    folded/<day>/<partition>/<topic id>  offset of `corrections` below which they are folded into sealed files
    retired/<topic id>/<partition>      offset of the topic below which files may have been retired
    retired_days                        ordinal of the first day of which samples may be left
    cut/<day>                           how often a part of that day's files was retired

Delta checks added files against each other and progress against itself, but not removals. So a commit that
removes files must also move a name, and this module rejects a commit whose files are gone. A vacuum deletes
files that no version has named for ORPHAN_HOURS, so whoever writes files commits them much sooner.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import deltalake
from deltalake import CommitProperties, Transaction
from deltalake import schema as types
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from roostream.errors import CheckpointError, ConfigError, FencedError, UnavailableError, reason_of
from roostream.runtime.checkpoint_store import FileStore, open_store, s3_reason, sync_path
from roostream.warehouse.data_file import DataFile, candidates_of, is_file_path, topic_of
from roostream.warehouse.parquet_file import ordered
from roostream.wire.columnar import CANDIDATE, REQUEST, ColumnType

_PARTITION_BY = {"day": "date", "partition": "integer", "fingerprint": "string", "sealed": "boolean"}
_TYPES = {"i8": "long", "i4": "integer", "f4": "float", "bytes": "binary"}
_BOUNDS = "min.offset", "max.offset", "min.close_ms", "max.close_ms"  # in the log of each file
_TRIES = 20
_S3_OPTIONS = {  # a put that loses is reported; callers have their own retries
    "conditional_put": "etag",
    "connect_timeout": "5s",
    "timeout": "30s",
    "max_retries": "2",
    "retry_timeout": "10s",
}
# What delta-rs says of a log that exists but cannot be understood.
_DAMAGE = (
    *("Json error", "Invalid JSON", "Invalid table version", "Invalid log", "Parquet error", "LogSegment"),
    *("found gap", "Invalid Checkpoint", "No table metadata or protocol"),  # files of the log are missing
)
ORPHAN_HOURS = 168
"""Hours that a file stays that no version of the table has named: it may wait for its commit."""
_KEPT_REMOVALS, _ONE_WEEK = "delta.deletedFileRetentionDuration", "interval 168 hours"  # Delta's default
_CONFIGURATION: dict[str, str | None] = {
    "delta.logRetentionDuration": "interval 60 days",
    "delta.checkpointInterval": "20",
}


log = logging.getLogger("roostream.warehouse")


class MissingFilesError(CheckpointError):
    """Files that a commit would add are gone. Nothing was committed; write them again."""


class ProgressStep(NamedTuple):
    """From where to where a commit moves a progress name. `before` None: the name was never set."""

    before: int | None
    after: int


class TableSnapshot:
    """One version of a table. Immutable."""

    def __init__(self, log: deltalake.DeltaTable) -> None:
        self.version = log.version()
        self.log = log

    @cached_property
    def files(self) -> tuple[DataFile, ...]:
        """All files, sorted by path."""
        return tuple(_files(self.log))

    @property
    def table_id(self) -> str:
        """The id that Delta draws when a table is created; it never changes."""
        return str(self.log.metadata().id)

    def progress(self, name: str) -> int | None:
        """The value of a progress name (see the module), None if it was never set."""
        return self.log.transaction_version(name)

    def paths(self) -> frozenset[str]:
        """The paths of all files; faster than `files`."""
        return frozenset(self.log.get_add_actions(flatten=True)["path"].to_pylist())

    def of_days(self, first: date | None = None, last: date | None = None) -> tuple[DataFile, ...]:
        """Files of days [first, last]; None = no bound."""
        return tuple(
            f for f in self.files if (first is None or f.day >= first) and (last is None or f.day <= last)
        )


class WarehouseTable:
    """One table. Nothing is read before the first call. One thread."""

    def __init__(self, location: str | Path, name: str, *, fsync: Callable[[int], None] = os.fsync) -> None:
        """`location`: of the warehouse, a directory or s3://bucket/prefix. `name`: the table's folder in
        it."""
        self.name, self._fsync = name, fsync
        self.url = _joined(location, name)
        self._options = _S3_OPTIONS if self.url.startswith("s3://") else None
        self._store = open_store(location)
        # Of the table as last read, with their types; none is ever removed.
        self._columns: dict[str, str] = {}

    def create(self) -> None:
        """Create the table if it is absent. Idempotent, also when several programs call it at once.

        Raises:
            UnavailableError: the location cannot be written.
        """
        fields = [_field(name, {**REQUEST, **CANDIDATE}[name]) for name in ordered({**REQUEST, **CANDIDATE})]
        schema = types.Schema(
            [*fields, *(types.Field(n, types.PrimitiveType(t)) for n, t in _PARTITION_BY.items())]
        )
        with self._translating_errors("made"):
            if self._options is None:
                FileStore(self._log_folder, fsync=self._fsync).make_root()
            create = partial(
                deltalake.DeltaTable.create,
                self.url,
                schema,
                mode="ignore",
                partition_by=list(_PARTITION_BY),
                configuration=_CONFIGURATION,
                storage_options=self._options,
            )
            for left in range(_TRIES, 0, -1):
                try:
                    create()
                    return self._sync_log(self._newest().version())
                except DeltaError:  # another program created it at the same moment
                    if left == 1 or not self._exists():
                        raise

    def exists(self) -> bool:
        with self._translating_errors("read"):
            return self._exists()

    def snapshot(self, version: int | None = None) -> TableSnapshot:
        """The table now, or at a version.

        Raises:
            UnavailableError: it cannot be read now.
            CheckpointError: there is no such table or version, or the log is damaged.
        """
        with self._translating_errors("read"):
            try:
                return TableSnapshot(
                    deltalake.DeltaTable(self.url, version=version, storage_options=self._options)
                )
            except TableNotFoundError:
                if version is None or not self._exists():
                    raise
                raise CheckpointError(
                    f"{self.url}: expected version {version}, but the log has deleted it by its age; read a "
                    "newer version"
                ) from None

    def widen(self, column_types: Mapping[str, ColumnType]) -> list[str]:
        """Add missing columns to the table's schema, in a commit of its own; return the columns that the
        table has with another type. Other tools cannot read those columns, Roostream can. Raises as
        `commit`."""
        fields = [_field(name, column_type) for name, column_type in column_types.items()]

        def add_missing(log: deltalake.DeltaTable) -> None:
            self._columns = {field.name: field.type.to_json() for field in log.schema().fields}
            if new := [field for field in fields if field.name not in self._columns]:
                log.alter.add_columns(new)
                self._columns |= {field.name: field.type.to_json() for field in new}

        if not self._columns.keys() >= column_types.keys():
            self._retry(add_missing)
        return [field.name for field in fields if self._columns[field.name] != field.type.to_json()]

    def commit(
        self,
        add: Sequence[DataFile],
        remove: Sequence[DataFile] = (),
        progress: Mapping[str, ProgressStep] | None = None,
    ) -> None:
        """Add files, remove files and move progress names in one transaction.

        Raises:
            FencedError: another program moved one of the names or removed one of the files. Nothing was
            committed. MissingFilesError: a file of `add` is not in the store; nothing was committed.
            UnavailableError: the log cannot be written. All or nothing was committed; call again with the
            same files to learn which.
        """
        steps = dict(progress or {})
        assert steps or not remove, "a removal needs a progress name that moves"

        def attempt(log: deltalake.DeltaTable) -> None:
            found = TableSnapshot(log)
            moved = _moved(found, steps)
            # Listing the paths takes long in a large table: only where they decide something.
            paths = found.paths() if moved or remove or not steps else frozenset()
            if add and all(file.path in paths for file in add):
                return  # an earlier call committed them, but its answer was lost
            if moved:
                name, at = moved
                raise FencedError(
                    f"{self.url}: expected {name} at {steps[name].before}, got {at}: another program moved "
                    "it; read the table again"
                )
            for file in remove:
                if file.path not in paths:
                    raise FencedError(
                        f"{self.url}: {file.path} is gone: another program replaced it; read the table again"
                    )
            self._check_written(add)
            self._write(found, add, remove, steps)

        self._retry(attempt)

    def vacuum(
        self,
        retention_hours: int,
        keep_versions: Collection[int] = (),
        *,
        dry_run: bool = False,
        beat: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Delete files that were removed from the table this long ago, and files that no version has named
        for ORPHAN_HOURS; return their paths. Files of `keep_versions` stay, and so do files whose name is
        none of this package. It lists the whole table twice. `beat` is called after each deleted file.

        Raises:
            UnavailableError: the location cannot be read or written.
            CheckpointError: there is no such table, or its log is damaged, also at one of `keep_versions`;
            nothing was deleted.
        """
        if not dry_run:
            self._keep_removals(retention_hours)
        with self._translating_errors("swept"):
            log = self._newest()
            keep = [v for v in sorted(set(keep_versions)) if self._has_version(v, log.version())]
            deletable = partial(
                log.vacuum, dry_run=True, enforce_retention_duration=False, keep_versions=keep or None
            )
            removed = set(deletable(retention_hours=retention_hours, full=False))
            present = deletable(retention_hours=retention_hours, full=True)
            orphans = set(deletable(retention_hours=max(retention_hours, ORPHAN_HOURS), full=True))
            found = sorted(path for path in present if path in removed | orphans and is_file_path(path))
        if not dry_run:
            for path in found:
                self._store.delete(f"{self.name}/{path}")
                beat()
        return found

    def _keep_removals(self, hours: int) -> None:
        """Let the log remember when a file was removed for this long. A checkpoint of the log drops a removal
        that is older than the log's own limit. The file would then look like one that no version has
        named."""

        def attempt(log: deltalake.DeltaTable) -> None:
            _, number, unit = (log.metadata().configuration.get(_KEPT_REMOVALS) or _ONE_WEEK).split()
            if unit == "hours" and hours > int(number):
                log.alter.set_table_properties({_KEPT_REMOVALS: f"interval {hours} hours"})

        self._retry(attempt)

    def _has_version(self, version: int, newest: int) -> bool:
        """Whether a pinned version exists. A pin of one that does not protects nothing. Raises DeltaError: it
        exists and cannot be read, so it is unknown which files it needs."""
        if 0 <= version <= newest:
            try:
                deltalake.DeltaTable(self.url, version=version, storage_options=self._options)
            except TableNotFoundError:
                pass  # the log deletes its old entries
            else:
                return True
        log.warning("%s: a pin names version %d, which does not exist; it is ignored", self.url, version)
        return False

    def _retry(self, attempt: Callable[[deltalake.DeltaTable], None]) -> None:
        """Call `attempt` with the newest version; repeat while other programs commit at the same time. Raises
        UnavailableError after `_TRIES`."""
        with self._translating_errors("written"):
            for _ in range(_TRIES):
                with contextlib.suppress(CommitFailedError):
                    log = self._newest()
                    before = log.version()
                    attempt(log)
                    return self._sync_log(before)
        raise UnavailableError(f"{self.url}: too many programs write to it at once; try again later")

    @property
    def _log_folder(self) -> Path:
        return Path(self.url) / "_delta_log"

    def _sync_log(self, first: int) -> None:
        """Sync the entries from version `first` on, and their checkpoints, which deltalake does not do. Entry
        `first` may be of another program that was killed before it had synced it."""
        if self._options is not None:
            return
        for version in itertools.count(first):
            entry = self._log_folder / f"{version:020d}.json"
            if not entry.exists():
                break
            sync_path(entry, self._fsync)
            if (checkpoint := entry.with_suffix(".checkpoint.parquet")).exists():
                sync_path(checkpoint, self._fsync)
        sync_path(self._log_folder, self._fsync)

    def _check_written(self, files: Sequence[DataFile]) -> None:
        for file in files:
            try:
                self._store.get_range(f"{self.name}/{file.path}", 0, 1)
            except CheckpointError:
                raise MissingFilesError(
                    f"{self.url}: expected {file.path} before its commit, but it is gone; write it again"
                ) from None

    def _write(
        self,
        found: TableSnapshot,
        add: Sequence[DataFile],
        remove: Sequence[DataFile],
        steps: Mapping[str, ProgressStep],
    ) -> None:
        now_ms = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [_added(file, now_ms) for file in add]
        actions += [RemoveAction(f.path, True, now_ms, f.bytes, _partition_values(f)) for f in remove]
        moved = [Transaction(name, step.after) for name, step in steps.items()]
        log = found.log
        log.create_write_transaction(
            actions,
            "append",
            log.schema(),
            list(_PARTITION_BY),
            commit_properties=CommitProperties(app_transactions=moved),
        )

    def _newest(self) -> deltalake.DeltaTable:
        return deltalake.DeltaTable(self.url, storage_options=self._options)

    def _exists(self) -> bool:
        try:
            self._newest()
        except TableNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def _translating_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except TableNotFoundError:
            raise CheckpointError(
                f"{self.url} is no table; check that an archiver has written there"
            ) from None
        except (DeltaError, OSError) as error:
            text = reason_of(error).strip().split("\n", 1)[0][:300]
            if isinstance(error, DeltaError) and any(word in text for word in _DAMAGE):
                raise CheckpointError(
                    f"{self.url} is damaged: {text}; restore its log from a backup"
                ) from None
            raise UnavailableError(
                f"{self.url} cannot be {verb} now ({s3_reason(error)}); make its location available"
            ) from None


def _moved(found: TableSnapshot, steps: Mapping[str, ProgressStep]) -> tuple[str, int | None] | None:
    """The first name that is not where its step begins, and where it is."""
    for name, step in steps.items():
        if (at := found.progress(name)) != step.before:
            return name, at
    return None


def _joined(location: str | Path, name: str) -> str:
    text = str(location).removeprefix("file://").rstrip("/")
    if "://" in text and not text.startswith("s3://"):
        raise ConfigError(
            f"expected a warehouse in a directory or at s3://bucket/prefix, got {str(location)!r}"
        )
    return f"{text}/{name}"


def _field(name: str, column_type: ColumnType) -> types.Field:
    plain: Any = types.PrimitiveType("string" if column_type.role == "text" else _TYPES[column_type.dtype])
    for _ in range(column_type.is_list + (column_type.of == "candidate")):
        plain = types.ArrayType(plain, True)
    return types.Field(name, plain, nullable=True)


def _partition_values(file: DataFile) -> dict[str, str | None]:
    return {
        "day": file.day.isoformat(),
        "partition": str(file.partition),
        "fingerprint": f"{file.fingerprint:016x}",
        "sealed": "true" if file.sealed else "false",
    }


def _added(file: DataFile, now_ms: int) -> AddAction:
    bounds = {
        "offset": (file.first_offset, file.last_offset),
        "close_ms": (file.first_close_ms, file.last_close_ms),
    }
    stats = {
        "numRecords": file.rows,
        "minValues": {name: low for name, (low, _) in bounds.items()},
        "maxValues": {name: high for name, (_, high) in bounds.items()},
        "nullCount": dict.fromkeys(bounds, 0),
    }
    return AddAction(file.path, file.bytes, _partition_values(file), now_ms, True, json.dumps(stats))


def _files(log: deltalake.DeltaTable) -> Iterator[DataFile]:
    """Sorted by path, so that every program lists them in the same order.

    Raises:
        CheckpointError: another program than Roostream added a file.
    """
    actions = log.get_add_actions(flatten=True)
    columns = {name: actions[name].to_pylist() for name in actions.schema.names}
    for n in sorted(range(actions.num_rows), key=lambda n: columns["path"][n]):
        entry = {name: values[n] for name, values in columns.items()}
        numbers = [entry.get(name) for name in ("num_records", *_BOUNDS)]
        if None in numbers or not is_file_path(entry["path"]):
            raise CheckpointError(
                f"{log.table_uri}: expected files of Roostream, got {entry['path']!r} of another program; "
                "restore the version of the table before it"
            )
        yield DataFile(
            path=entry["path"],
            bytes=entry["size_bytes"],
            rows=entry["num_records"],
            candidates=candidates_of(entry["path"]),
            day=entry["partition.day"],
            partition=entry["partition.partition"],
            fingerprint=int(entry["partition.fingerprint"], 16),
            first_offset=entry["min.offset"],
            last_offset=entry["max.offset"],
            first_close_ms=entry["min.close_ms"],
            last_close_ms=entry["max.close_ms"],
            sealed=entry["partition.sealed"],
            topic=topic_of(entry["path"]),
        )
