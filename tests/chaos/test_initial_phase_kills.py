"""Random kills of the archiver, the compactor, readers, the controller and workers during initial training.

A new model is trained from the warehouse, handed over to the stream, and trained there. Every sample is
trained once, and in exact mode the weights equal, bit for bit, those of an undisturbed stack that reads the
same version of the table without readers (guarantees G2 and G11, docs/architecture.md).

At least 100 programs are killed, at least 10 of them during stream training and at least 3 of each kind.
INITIAL_KILLS_REPORT names a file for the counts. `INITIAL_KILLS=200 INITIAL_KILLS_S=1500` makes the run
longer, `INITIAL_KILLS=12 INITIAL_KILLS_S=240` shorter; INITIAL_KILLS_WORKERS sets the number of workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from infra.options import StackOptions
from infra.stack import Stack
from infra.supervisor import RestartPolicy
from roostream.errors import UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.clock import SystemClock
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import SAMPLES, name_of, nested
from roostream.runtime.manifest import Manifest
from roostream.runtime.work_unit import TableInput
from roostream.schema.registry import register, to_toml
from roostream.warehouse.compact import Compactor
from roostream.warehouse.config import CompactorConfig
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.warehouse import Warehouse
from tests.e2e.loop_stack import applied, auditor, newest, wait_until
from tests.trainer import samples
from tests.warehouse.archive_runs import count_rows

KILLS, MAX_S = int(os.environ.get("INITIAL_KILLS", "100")), float(os.environ.get("INITIAL_KILLS_S", "900"))
WORKERS = int(os.environ.get("INITIAL_KILLS_WORKERS", "2"))
LONGER_S = 300.0  # additional time for the switch and the stream on a slow machine
# a sample closes 360 s after the previous one, so 4,800 samples cover 20 days
PARTITIONS, BATCH, STEP = 4, 4, 360
NUM_HISTORY = 4800
READER_SETTINGS = {"max_requests_s": 40}
DATA_PROGRAMS = ("archiver", "compactor", "reader-0", "reader-1")
TRAINING_PROGRAMS = ("controller", "worker", *(f"worker-{number}" for number in range(1, WORKERS)))
KINDS = ("archiver", "compactor", "reader", "controller", "worker")
FAST_RESTARTS = RestartPolicy(first_s=0.2, max_s=1.0, stable_s=2.0, max_restarts=1 << 20)
TRAINER = {
    "controller": {"commit_interval_ms": 500, "unit_records": 200, "seed": 0},
    "worker": {"exact": True, "batch_requests": BATCH, "first_batch_requests": BATCH},
}

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(MAX_S + 1200)]


def options(home: Path, *, killed: bool) -> StackOptions:
    schema = home / "schema.toml"
    schema.parent.mkdir(parents=True, exist_ok=True)
    schema.write_text(to_toml(samples.schema()))
    data_settings = {
        "archiver": {"flush_interval_ms": 300},
        "compactor": {"interval_ms": 300, "seal_after_ms": 0},
        "reader": READER_SETTINGS,
    }
    controller = {**TRAINER["controller"], "warehouse": str(home / "warehouse")}
    overrides: dict[str, Mapping[str, Any]] = {**data_settings, **TRAINER, "controller": controller}
    stack_options = StackOptions(
        schema=schema, replay=True, partitions=PARTITIONS, num_workers=WORKERS, overrides=overrides
    )
    return dataclasses.replace(stack_options, num_archivers=1, num_readers=2) if killed else stack_options


class SampleProducer:
    """Produces samples with ascending numbers to all partitions evenly, whole batches at a time."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.num_sent = stack, 0
        self._producer = clients.producer(Broker(stack.endpoints.kafka))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live", daemon=True)

    def send(self, count: int) -> None:
        topic = name_of(self.stack.prefix, SAMPLES)
        for n in range(self.num_sent, self.num_sent + count):
            number = number_of(n)
            key, time_ms = number.to_bytes(8, "little"), samples.T0 + number * 1000 + 500
            value = samples.sample(number)
            clients.send(
                self._producer, topic, key=key, value=value, timestamp_ms=time_ms, partition=n % PARTITIONS
            )
        assert self._producer.flush(30) == 0
        self.num_sent += count

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            self.send(PARTITIONS * BATCH)


def number_of(n: int) -> int:
    return 1 + STEP * n


@dataclasses.dataclass
class KillCounts:
    """How often each kind of program was killed, during initial training and on the stream."""

    by_kind: Counter[str] = dataclasses.field(default_factory=Counter)
    initial: int = 0
    stream: int = 0
    near_switch: int = 0  # kills close to the switch, included in the two counts above
    session: TableInput | None = None

    @property
    def total(self) -> int:
        return self.initial + self.stream

    @property
    def is_mixed(self) -> bool:
        """Whether each kind of program was killed at least three times."""
        return min(self.by_kind[name] for name in KINDS) >= 3


class Killer:
    """Kills one program at a time. A controller or worker is killed only after a commit since its last such
    kill, so that training makes progress."""

    def __init__(self, stack: Stack, draw: random.Random) -> None:
        self.stack, self.draw, self.killed = stack, draw, KillCounts()
        self._seq = 0

    @property
    def needs_more_kills(self) -> bool:
        return self.needs_more_initial_kills or self.killed.stream < KILLS // 10

    @property
    def needs_more_initial_kills(self) -> bool:
        """Whether more kills are needed during initial training."""
        return self.killed.total < KILLS or not self.killed.is_mixed

    def step(self, spares_history: bool = False) -> None:
        """Kill one program. `spares_history`: kill nothing during initial training, so that enough kills
        happen on the stream."""
        last = newest(self.stack)
        if last is None:
            return
        self.killed.session = self.killed.session or last.input
        near = self._is_near(last)
        if spares_history and last.input is not None and not near:
            return
        victim = self._victim(last, near)
        if victim is None:
            return
        with contextlib.suppress(UnavailableError):  # the program is restarting
            self.stack.kill(victim)
            self.killed.by_kind[victim.partition("-")[0]] += 1
            self.killed.near_switch += near
            if last.input is not None:
                self.killed.initial += 1
            else:
                self.killed.stream += 1

    def _victim(self, last: Manifest, near: bool) -> str | None:
        if self.draw.random() < (0.7 if near else 0.4) and last.seq > self._seq:
            self._seq = last.seq
            kind = min(
                ("controller", "worker"), key=lambda name: (self.killed.by_kind[name], self.draw.random())
            )
            return kind if kind == "controller" else self.draw.choice(TRAINING_PROGRAMS[1:])
        names = (
            DATA_PROGRAMS
            if last.input is not None
            else DATA_PROGRAMS[:2] + DATA_PROGRAMS[2:] * (self.draw.random() < 0.1)
        )
        return self.draw.choice([name for name in names if self.stack.pid(name)] or [None])

    def _is_near(self, last: Manifest) -> bool:
        """Whether the switch to the stream is close or has just happened."""
        if last.input is not None:
            return sum(last.input.rows.values()) - sum(last.positions.values()) < 600
        return sum(last.positions.values()) - NUM_HISTORY < 200


@contextlib.contextmanager
def producing(stack: Stack) -> Iterator[SampleProducer]:
    producer = SampleProducer(stack)
    try:
        yield producer
    finally:
        producer.stop()


def files_of(warehouse_path: Path) -> list[DataFile]:
    warehouse = Warehouse(warehouse_path)
    return list(warehouse.samples.snapshot().files) if warehouse.samples.exists() else []


def is_sealed(warehouse_path: Path, count: int) -> bool:
    """Whether at least `count` samples are archived and nothing is left to compact."""
    config = CompactorConfig(warehouse=str(warehouse_path), seal_after_ms=0)
    rows = sum(file.rows for file in files_of(warehouse_path))
    return rows >= count and not Compactor(Warehouse(warehouse_path), config, SystemClock()).due()


def train_under_kills(home: Path, seed: int) -> tuple[KillCounts, int]:
    """Train while programs are killed. Returns the kills and the number of samples."""
    draw = random.Random(seed)
    with Stack(home, options(home, killed=True), policy=FAST_RESTARTS) as stack:
        register(FileStore(stack.home.store), samples.schema())
        stack.start(["kafka", "archiver", "compactor"])
        stack.wait_ready("kafka", timeout_s=180)
        with producing(stack) as producer:
            killer = Killer(stack, draw)
            archive_under_kills(stack, producer, killer, draw)
            stack.start(["shards", "controller", "workers", "reader-0", "reader-1"])
            wait_until("the session is fixed", lambda: newest(stack) is not None, 180)
            producer.start()
            ends_s = time.monotonic() + MAX_S
            while (left_s := ends_s - time.monotonic()) > -LONGER_S and killer.needs_more_kills:
                time.sleep(draw.uniform(0.05, 3.0))
                killer.step(spares_history=left_s < 0 or not killer.needs_more_initial_kills)
            producer.stop()
            wait_until("all samples", lambda: applied(stack) >= producer.num_sent, 300)
            check_accounts(stack, producer.num_sent)
            return killer.killed, producer.num_sent


def archive_under_kills(stack: Stack, producer: SampleProducer, killer: Killer, draw: random.Random) -> None:
    warehouse_path = stack.home.root / "warehouse"
    while producer.num_sent < NUM_HISTORY:
        producer.send(400)
        time.sleep(draw.uniform(0.0, 0.3))
        with contextlib.suppress(UnavailableError):
            stack.kill(victim := draw.choice(DATA_PROGRAMS[:2]))
            killer.killed.by_kind[victim] += 1
            killer.killed.initial += 1
    wait_until("a compacted history", lambda: is_sealed(warehouse_path, NUM_HISTORY), 120)


def check_accounts(stack: Stack, count: int) -> None:
    """Check that each of these samples was committed, predicted and archived once."""
    warehouse_path, last = stack.home.root / "warehouse", newest(stack)
    assert last is not None and last.input is None and applied(stack) == count
    audit = auditor(stack)
    try:
        wait_until("all topics read", lambda: audit.poll(2.0) == 0 and audit.is_current(), 120)
        assert audit.sums().samples == count
        assert audit.accounts.untrained_below(nested(last.offsets)[SAMPLES]) == 0
    finally:
        audit.close()
    wait_until(
        "everything is archived", lambda: sum(file.rows for file in files_of(warehouse_path)) >= count, 60
    )
    ids = Counter(id_ for _, _, id_ in count_rows(warehouse_path).elements())
    assert ids == Counter(number_of(n) for n in range(count))


def reset_table_to(warehouse_path: Path, version: int) -> None:
    """Set the table of samples back to this version: later commits are removed, data files stay."""
    logs = warehouse_path / "samples" / "_delta_log"
    (logs / "_last_checkpoint").unlink(missing_ok=True)
    for file in logs.iterdir():
        if file.name.split(".")[0].isdecimal() and int(file.name.split(".")[0]) > version:
            file.unlink()


def train_undisturbed(home: Path, count: int) -> TableInput | None:
    """Train again without kills, with the same home, table version and topic. Returns the training
    session."""
    with Stack(home, options(home, killed=False)) as stack:
        stack.start(["kafka", "shards", "controller", "workers"])
        wait_until("the session is fixed", lambda: newest(stack) is not None, 180)
        first = newest(stack)
        wait_until("all samples", lambda: applied(stack) >= count, 300)
        assert first is not None and applied(stack) == count
        return first.input


def dense_tensors(home: Path) -> dict[str, bytes]:
    store = FileStore(home / "store")
    last = manifests.newest(store)
    assert last is not None and last.manifest.input is None
    tensors, _ = tensor_file.decode(manifests.read_file(store, last.manifest.dense))
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


def write_report(killed: KillCounts, count: int) -> None:
    counts: dict[str, Any] = {
        "killed": dict(killed.by_kind),
        "while_initial": killed.initial,
        "on_the_stream": killed.stream,
        "about_the_switch": killed.near_switch,
        "workers": WORKERS,
        "samples": count,
    }
    print(json.dumps(counts))
    if path := os.environ.get("INITIAL_KILLS_REPORT"):
        Path(path).write_text(json.dumps(counts) + "\n")


def test_g2_g11_kills_during_initial_training_and_the_switch_change_no_bit(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    home = tmp_path / "home"
    killed, count = train_under_kills(home, pytestconfig.getoption("--seed", default=0))
    write_report(killed, count)
    assert killed.session is not None and killed.total >= KILLS and killed.stream >= KILLS // 10
    assert killed.is_mixed, killed.by_kind
    disturbed = dense_tensors(home)
    for folder in (
        "store",
        *(path.name for path in home.glob("shard-*")),
        *(path.name for path in home.glob("worker*")),
    ):
        shutil.rmtree(home / folder, ignore_errors=True)
    reset_table_to(home / "warehouse", killed.session.version)
    undisturbed = train_undisturbed(home, count)
    assert undisturbed is not None and (undisturbed.digest, undisturbed.rows) == (
        killed.session.digest,
        killed.session.rows,
    )
    assert dense_tensors(home) == disturbed
