"""A log, joined in this process, as files of a warehouse: what an archiver would have made of it behind Kafka, in one commit.

The log's own digest stands where a topic's id does, so that the same log lands once: a second time is refused.
Memory: the joiner's open requests, and the samples of a file for each partition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from joiner.config import JoinerConfig
from joiner.local_engine import LocalEngine
from joiner.outputs import Output
from roostream.cli.replay.outcome import LocalTopics
from roostream.cli.replay.program_settings import program_settings
from roostream.errors import ConfigError, FencedError
from roostream.replay.config import ReplayConfig
from roostream.replay.replay_log import open_log
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES
from roostream.schema.registry import register
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from roostream.warehouse.archive import group_by_day, sample_rows
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.delta_table import ProgressStep
from roostream.warehouse.parquet_file import FileKey, write_rows
from roostream.warehouse.warehouse import Warehouse
from roostream.wire import records as wire
from roostream.wire.records import Record

FILE_BYTES = 64 << 20
"""Of samples of a partition, as records, that wait for a file."""


@dataclasses.dataclass
class Archived:
    """What became of a log."""

    requests: int = 0
    samples: int = 0
    files: int = 0
    bytes: int = 0
    late: int = 0  # engagements behind the window: in no sample


def archive_log(
    replay: ReplayConfig,
    paths: Sequence[str],
    place: str,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Archived:
    """`paths`: the files that the log is made of; `progress`: called with requests read, and those in all (0 = not known).

    **If it fails** the warehouse is as it was, but for files that nobody names.

    Raises:
        ConfigError: the log is in the warehouse already, or can't be read. UnavailableError: the warehouse can't be written now.
    """
    schema = load_schema(replay.schema_path)
    warehouse, told = Warehouse(place), Archived()
    warehouse.create()
    register(warehouse.store, schema)
    digest = digest_of(paths, schema)
    known = warehouse.samples.snapshot()
    if any(known.progress(f"{SAMPLES}/{digest}/{n}") is not None for n in range(_partitions(replay))):
        raise _there_already(place)
    files = _Landing(warehouse, schema, digest, told)
    log, topics = open_log(replay, schema), LocalTopics(schema)
    engine = LocalEngine(
        JoinerConfig(engine="local", **program_settings(replay).joiner),
        schema,
        {schema.fingerprint: schema}.get,
    )
    for record in log.records:
        if wire.kind_of(record.value) == wire.IMPRESSION:
            told.requests += 1
            progress(told.requests, log.num_requests)
        files.take(topics, engine.process(topics.append(record)), engine.watermark_ms)
    files.take(topics, engine.end_of_input(), engine.watermark_ms)
    files.flush()
    steps = {f"{SAMPLES}/{digest}/{n}": ProgressStep(None, after) for n, after in files.after.items()}
    try:
        warehouse.samples.commit(files.made, progress=steps)
    except FencedError:
        raise _there_already(place) from None
    return told


def digest_of(paths: Sequence[str], schema: Schema) -> str:
    """`log-` and 16 hex digits of the files' bytes, in their order, and of the schema."""
    its = xxhash.xxh3_64(f"{schema.fingerprint:016x}".encode())
    for path in paths:
        with Path(path).open("rb") as file:
            while piece := file.read(1 << 20):
                its.update(piece)
    return f"log-{its.hexdigest()}"


class _Landing:
    """Samples by partition, and the files that were made of them; nobody names these yet."""

    def __init__(self, warehouse: Warehouse, schema: Schema, digest: str, told: Archived) -> None:
        self.warehouse, self.schema, self.digest, self.told = warehouse, schema, digest, told
        self.made: list[DataFile] = []
        self.after: dict[int, int] = {}
        self._waiting: dict[int, list[Record]] = {}
        self._bytes: dict[int, int] = {}

    def take(self, topics: LocalTopics, outputs: Sequence[Output], watermark_ms: int) -> None:
        for output in outputs:
            time_ms = output.timestamp_ms if output.timestamp_ms is not None else watermark_ms
            record = topics.write(output.topic, output.key, output.value, time_ms)
            self.told.late += record.topic == CORRECTIONS
            if record.topic == SAMPLES:
                n = record.partition
                self._waiting.setdefault(n, []).append(record)
                self._bytes[n] = self._bytes.get(n, 0) + len(record.value or b"")
                if self._bytes[n] >= FILE_BYTES:
                    self._flush(n)

    def flush(self) -> None:
        for n in sorted(self._waiting):
            self._flush(n)

    def _flush(self, n: int) -> None:
        records = self._waiting.pop(n, [])
        self._bytes[n] = 0
        if not records:
            return
        rows, _ = sample_rows(self.schema, records)
        self.warehouse.samples.widen(rows.forms)
        for day, its in group_by_day(rows).items():
            where = FileKey(
                table=SAMPLES, day=day, partition=n, fingerprint=self.schema.fingerprint, topic=self.digest
            )
            self.made.append(write_rows(self.warehouse.store, its, where, self.warehouse.column_order()))
            self.told.files += 1
            self.told.bytes += self.made[-1].bytes
        self.told.samples += len(rows.counts_R)
        self.after[n] = records[-1].offset + 1


def _partitions(replay: ReplayConfig) -> int:
    return JoinerConfig(engine="local", **program_settings(replay).joiner).partitions


def _there_already(place: str) -> ConfigError:
    return ConfigError(
        f"{place}: expected a log that isn't there yet, got one that was imported before; nothing was changed"
    )
