"""The stack engine of a replay: a local stack with Kafka, Flink and the programs of the trainer.

1 start the stack; topics accept old event times
2 write the log in transactions, while the auditor reads along (an idempotent producer alone duplicates old
  records when the broker
  restarts)
3 wait until every request and engagement has left the joiner, and every sample has a prediction
4 wait for the commit that includes the last sample
5 stop the stack

With `archived_until` the first part of the log is archived before anything is trained:
  a write the first part; the joiner, archivers and the compactor run, but no trainer
  b wait until every sample is in the warehouse and nothing is due to be sealed
  c start the trainer, which trains a new model from this version of the warehouse
  d wait for the commit that switches to the stream, then write the second part
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from confluent_kafka import KafkaException

from infra.auditor.accounts import Accounts
from infra.auditor.auditor import Auditor
from infra.options import StackOptions, save_options
from infra.stack import Stack
from roostream.cli.replay.outcome import (
    ArchivedPart,
    Outcome,
    ReplayProgress,
    ReplayStatistics,
    TrainingSummary,
)
from roostream.cli.replay.program_settings import joiner_settings, program_settings
from roostream.errors import ConfigError, UnavailableError, needs_extra
from roostream.replay.config import ReplayConfig
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import CheckpointStore, FileStore
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import SAMPLES, name_of, nested
from roostream.runtime.program import Stop
from roostream.runtime.scrape import fetch
from roostream.schema.schema import Schema
from roostream.schema.toml_file import read_toml
from roostream.wire.records import Record

log = logging.getLogger("roostream.replay")
_MAX_TRANSACTION_RECORDS, _MAX_TRANSACTION_S = 2000, 1.0
_TRANSACTIONS = {"linger_ms": 20, "delivery_timeout_ms": 300_000, "transaction_timeout_ms": 600_000}
_STALLED_S = 180.0
_PROGRAMS = ("kafka", "flink", "joiner", "shards", "controller", "workers")


def replay_on_stack(
    config: ReplayConfig, schema: Schema, records: Iterable[Record], progress: ReplayProgress, stop: Stop
) -> Outcome:
    """Run a replay; the numbers are those of the module's docstring. The stack is stopped in any case.

    Raises:
        UnavailableError: a program failed for good, or there was no progress for three minutes; the message
            says what is missing.
    """
    with _home(config) as home, Stack(home, stack_options(config, home)) as stack:
        stack.start(ARCHIVE_PROGRAMS if config.archived_until else _PROGRAMS)  # 1
        stack.wait_ready("kafka", timeout_s=180)
        outcome = _StackReplay(config, schema, stack, progress, stop).run(records)
        if config.home:
            save_options(stack.home.root, options_for_up(config, stack.options, stack.home.root))
        return outcome


def stack_options(config: ReplayConfig, home: Path) -> StackOptions:
    """Options of the stack for a replay. Raises as `program_settings`."""
    choices = program_settings(config)
    past = archive_overrides(home.resolve() / "warehouse") if config.archived_until else {}
    others = {
        name: {**past.get(name, {}), **choices.others.get(name, {})} for name in (*past, *choices.others)
    }
    overrides = {
        **others,
        "controller": {"commit_interval_ms": 5000, **others.get("controller", {})},
        "joiner": choices.joiner,
        "worker": {"model": _model_file(config, choices.model, home), **choices.worker},
    }
    return StackOptions(
        schema=config.schema_path.resolve(),
        replay=True,
        num_shards=config.num_shards,
        num_archivers=int(bool(past)),
        seed=config.seed,
        overrides=overrides,
    )


def options_for_up(config: ReplayConfig, options: StackOptions, home: Path) -> StackOptions:
    """Options for a later `up` in this home: the same schema (a copy), shards, window and model, but default
    limits and no freeze.

    Its topics keep all records, because histories and counters are rebuilt from them at each start.
    """
    schema = home / "conf" / "schema.toml"  # not beside the home's folders, where a user may have one
    schema.parent.mkdir(parents=True, exist_ok=True)
    schema.write_bytes(options.schema.read_bytes())
    choices, flags = program_settings(config), joiner_settings(config)
    joiner = {
        k: v
        for k, v in choices.joiner.items()
        if k in ("window_ms", "lateness_ms", "early_close_ms") or v != flags.get(k)
    }
    worker = {k: v for k, v in options.overrides["worker"].items() if k != "freeze_at_ms"}
    overrides = {**choices.others, "joiner": joiner, "worker": worker}
    return dataclasses.replace(options, schema=schema, num_archivers=0, overrides=overrides)


def _model_file(config: ReplayConfig, sets: Mapping[str, Any], home: Path) -> str:
    """Path of the model TOML; with `--set model.KEY` a changed copy in the home."""
    if not sets:
        return str(Path(config.first_model).resolve()) if config.first_model else ""
    given = read_toml(config.first_model).raw if config.first_model else {}
    if str(given.get("kind", "")).rpartition(":")[0].endswith(".py"):  # relative to the original TOML
        given = {**given, "kind": str(Path(config.first_model).resolve().parent / given["kind"])}
    file = home.resolve() / "conf" / "model.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(tomli_w.dumps(given | dict(sets)), encoding="utf-8")
    return str(file)


@contextlib.contextmanager
def _home(config: ReplayConfig) -> Iterator[Path]:
    if config.home:
        yield Path(config.home)
    else:
        with tempfile.TemporaryDirectory(prefix="roostream-replay-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)


@contextlib.contextmanager
def _rejections() -> Iterator[None]:
    """Raise UnavailableError for what Kafka refuses."""
    try:
        yield
    except KafkaException as error:
        raise UnavailableError(
            f"Kafka rejected records of the log: {error.args[0].str()}; run the replay again"
        ) from None


class _StackReplay:
    """One run on one stack."""

    def __init__(
        self, config: ReplayConfig, schema: Schema, stack: Stack, progress: ReplayProgress, stop: Stop
    ) -> None:
        self.config, self.stack, self.progress, self.stop = config, stack, progress, stop
        self.statistics = ReplayStatistics(schema, config.measure_from_ms)
        self.auditor = Auditor(
            Broker(stack.endpoints.kafka),
            stack.prefix,
            num_partitions=stack.options.partitions,
            on_record=self.statistics.add,
        )
        self.sent: Counter[str] = Counter()
        self._moved_s = time.monotonic()
        self._seen: tuple[int, ...] = ()

    @property
    def accounts(self) -> Accounts:
        """The accounts of the auditor, which replaces them when it starts."""
        return self.auditor.accounts

    def run(self, records: Iterable[Record]) -> Outcome:
        try:
            archived: ArchivedPart | None = None
            if self.config.archived_until:
                log_ = SplitLog(records, self.config.archived_until_ms)
                archived, records = self._from_archive(log_.before()), log_.others()
            self._send(records)  # 2
            self._wait(self._is_trained, "trained")  # 3
            self._wait(self._is_committed, "committed")  # 4
            untrained = self.accounts.untrained_below(self._committed())
            return Outcome(
                accounts=self.accounts,
                statistics=self.statistics,
                untrained=untrained,
                training=self._training(),
                archived=archived,
            )
        finally:
            self.auditor.close()

    def _from_archive(self, records: Iterable[Record]) -> ArchivedPart:
        """Archive these records, train a new model from the archive, and switch to the stream."""
        past = ArchivePhase(
            self.stack.home.root / "warehouse", FileStore(self.stack.home.store), SystemClock()
        )
        self._send(records)
        if not self.sent:
            raise ConfigError(
                f"archived_until: expected requests before {self.config.archived_until}, got none in the log"
            )
        self._wait(lambda: self._is_read() and past.is_archived(self.accounts.sample_ends), "archived")
        found = past.archived()
        self.stack.start(_PROGRAMS)
        self._wait(past.is_handed_over, "trained from the warehouse")
        return past.trained(found)

    def _training(self) -> TrainingSummary:
        """Figures from the newest manifest and the metrics of the worker."""
        newest = manifests.newest(FileStore(self.stack.home.store))
        worker = fetch(self.stack.endpoints.metrics["worker"])
        skipped = worker.value("roostream_worker_non_finite_total")
        rehearsed = worker.value("roostream_worker_rehearsed_total")
        return TrainingSummary(
            steps=newest.manifest.step if newest else None,
            model=newest.manifest.model if newest else None,
            non_finite=None if skipped is None else int(skipped),
            rehearsed=None if rehearsed is None else int(rehearsed),
        )

    def _send(self, records: Iterable[Record]) -> None:
        producer = clients.producer(
            Broker(self.stack.endpoints.kafka), transactional_id=f"replay-{uuid.uuid4().hex}", **_TRANSACTIONS
        )
        with _rejections():
            producer.init_transactions(30)
        open_since_s, count = 0.0, 0
        for record in records:
            with _rejections():
                if not count:
                    producer.begin_transaction()
                    open_since_s = time.monotonic()
                self._produce(producer, record)
            count += 1
            if count >= _MAX_TRANSACTION_RECORDS or time.monotonic() - open_since_s > _MAX_TRANSACTION_S:
                self._commit(producer)
                count = 0
        if count:
            self._commit(producer)

    def _produce(self, producer: Any, record: Record) -> None:
        topic = name_of(self.stack.prefix, record.topic)
        clients.send(
            producer,
            topic,
            key=record.key,
            value=record.value,
            timestamp_ms=record.timestamp_ms,
            partition=record.partition,
        )
        self.sent[record.topic] += 1

    def _commit(self, producer: Any) -> None:
        """Commit a transaction, with retries. Raises UnavailableError: the records may be missing, so the
        replay must end."""
        for _ in range(10):
            with _rejections():
                try:
                    producer.commit_transaction(30)
                    break
                except KafkaException as error:
                    if not error.args[0].retriable():
                        raise
        else:
            raise UnavailableError(
                "Kafka did not commit records of the log within 5 minutes; run the replay again"
            )
        self._poll(0.0)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        while not self.stop.is_set() and not done():
            self._poll(0.5)
            if failed := self.stack.failed():
                raise UnavailableError(
                    f"{failed[0]} failed for good: {self.stack.last_error(failed[0])}; its log is "
                    f"{self.stack.log_path(failed[0])}"
                )
            if time.monotonic() - self._moved_s > _STALLED_S:
                raise UnavailableError(f"nothing was {what} for {_STALLED_S:.0f} s; {self._missing()}")

    def _poll(self, budget_s: float) -> None:
        """Read the topics for up to `budget_s`, and remember when there was progress."""
        self.auditor.poll(budget_s)
        a = self.accounts
        sums = a.sums()
        self.progress.update(joined=sums.samples, trained=sums.predicted)
        now = (*a.num_records.values(), *self._committed().values())
        if now != self._seen:
            self._seen, self._moved_s = now, time.monotonic()

    def _is_trained(self) -> bool:
        a = self.accounts
        waiting = a.events.pending or a.requests.pending or a.unread or a.untrained
        return self._is_read() and not waiting

    def _is_read(self) -> bool:
        """Whether the auditor has read everything that was sent."""
        return all(self.accounts.num_records[topic] >= n for topic, n in self.sent.items())

    def _is_committed(self) -> bool:
        committed = self._committed()
        return all(committed.get(p, 0) >= end for p, end in self.accounts.sample_ends.items())

    def _committed(self) -> dict[int, int]:
        """Next offset of each partition of samples, from the newest manifest."""
        store = FileStore(self.stack.home.store)
        newest = manifests.newest(store)
        return {} if newest is None else nested(newest.manifest.offsets).get(SAMPLES, {})

    def _missing(self) -> str:
        s, a = self.accounts.sums(), self.accounts
        return (
            f"requests without a sample: {s.pending_requests}, engagements without an outcome: {s.pending}, "
            f"samples without a prediction: {len(a.untrained)}; the logs are in {self.stack.home.logs}"
        )


ARCHIVE_PROGRAMS = ("kafka", "flink", "joiner", "archiver", "compactor")
"""Programs that run while the first part of the log is archived."""
_QUIET_S = 5.0  # after this time without new samples, the joiner waits for later events


def archive_overrides(warehouse: Path) -> dict[str, dict[str, Any]]:
    """Settings of the programs that archive quickly and train from the warehouse."""
    return {
        "archiver": {"flush_interval_ms": 2000},
        "compactor": {"interval_ms": 1000},
        "controller": {"warehouse": str(warehouse)},
    }


class SplitLog:
    """Splits the records of a log at a time."""

    def __init__(self, records: Iterable[Record], until_ms: int) -> None:
        self.until_ms, self._records = until_ms, iter(records)
        self._next: list[Record] = []

    def before(self) -> Iterator[Record]:
        """Records before the time; read them all before `others`."""
        for record in self._records:
            if record.timestamp_ms >= self.until_ms:
                self._next = [record]
                return
            yield record

    def others(self) -> Iterator[Record]:
        return itertools.chain(self._next, self._records)


class ArchivePhase:
    """Observes the warehouse of a stack: when it is filled, and when a model was trained from it."""

    def __init__(self, place: Path, store: CheckpointStore, clock: Clock) -> None:
        """`store` has the commits of the stack. Raises ConfigError: the packages for a warehouse are not
        installed."""
        with needs_extra("a warehouse", "warehouse"):
            from roostream.warehouse.compact import Compactor
            from roostream.warehouse.config import CompactorConfig
            from roostream.warehouse.warehouse import Warehouse
        self.store, self.clock = store, clock
        self._warehouse = Warehouse(place)
        self._compactor = Compactor(self._warehouse, CompactorConfig(warehouse=str(place)), clock)
        self._began_s = self._seen_s = clock.monotonic_s()
        self._seen: dict[int, int] = {}

    def is_archived(self, sample_ends: Mapping[int, int]) -> bool:
        """Whether step b is complete. `sample_ends`: partition → end offset of samples. Raises
        UnavailableError."""
        if sample_ends != self._seen:
            self._seen, self._seen_s = dict(sample_ends), self.clock.monotonic_s()
        if (
            not self._seen
            or self.clock.monotonic_s() - self._seen_s < _QUIET_S
            or not self._warehouse.samples.exists()
        ):
            return False
        behind: dict[int, int] = {}
        for file in self._warehouse.samples.snapshot().files:
            behind[file.partition] = max(behind.get(file.partition, 0), file.last_offset + 1)
        return (
            all(behind.get(number, 0) >= end for number, end in self._seen.items())
            and not self._compactor.due()
        )

    def archived(self) -> ArchivedPart:
        """The archived part; the time of training is measured from this call."""
        files = self._warehouse.samples.snapshot().files
        archive_s, self._began_s = self.clock.monotonic_s() - self._began_s, self.clock.monotonic_s()
        return ArchivedPart(
            samples=sum(file.rows for file in files),
            days=len({file.day for file in files}),
            files=len(files),
            sealed=sum(file.sealed for file in files),
            bytes=sum(file.bytes for file in files),
            archive_s=archive_s,
        )

    def is_handed_over(self) -> bool:
        """Whether step d's commit exists."""
        newest = manifests.newest(self.store)
        return newest is not None and newest.manifest.input is None

    def trained(self, archived: ArchivedPart) -> ArchivedPart:
        """`archived` with the number of trained samples and the training time, after the switch to the
        stream."""
        newest = manifests.newest(self.store)
        assert newest is not None, "call after is_handed_over"
        requests = sum(part.metrics["requests"] for part in newest.manifest.workers.values())
        return dataclasses.replace(
            archived, trained=requests, train_s=self.clock.monotonic_s() - self._began_s
        )
