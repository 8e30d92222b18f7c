"""Archiver, compactor, readers, controller and two workers of one stack are killed at random moments while a
new model is trained from the warehouse, handed over to a stream that goes on meanwhile, and trained there:
every sample once, and in exact mode the bits of a stack that nothing disturbs, whose workers read the same
version of the table by themselves.

A hundred kills or more, ten or more of them on the stream, and three or more of each kind of program. They go
to INITIAL_KILLS_REPORT, if that is set; `INITIAL_KILLS=200 INITIAL_KILLS_S=1500` asks for more of them,
`INITIAL_KILLS=12 INITIAL_KILLS_S=240` for fewer, INITIAL_KILLS_WORKERS for another number of workers.
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
LONGER_S = 300.0  # of a slow machine, for the switch and the stream
PARTITIONS, BATCH, STEP = 4, 4, 360  # a sample closes 360 s behind the one before: 20 days in 4,800
NUM_HISTORY = 4800
OF_READERS = {"max_requests_s": 40}
LIGHT = ("archiver", "compactor", "reader-0", "reader-1")
HEAVY = ("controller", "worker", *(f"worker-{number}" for number in range(1, WORKERS)))
KINDS = ("archiver", "compactor", "reader", "controller", "worker")
EACH_ALONE = RestartPolicy(first_s=0.2, max_s=1.0, stable_s=2.0, max_restarts=1 << 20)
TRAINER = {
    "controller": {"commit_interval_ms": 500, "unit_records": 200, "seed": 0},
    "worker": {"exact": True, "batch_requests": BATCH, "first_batch_requests": BATCH},
}

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(MAX_S + 1200)]


def options(home: Path, *, killed: bool) -> StackOptions:
    schema = home / "schema.toml"
    schema.parent.mkdir(parents=True, exist_ok=True)
    schema.write_text(to_toml(samples.schema()))
    own = {
        "archiver": {"flush_interval_ms": 300},
        "compactor": {"interval_ms": 300, "seal_after_ms": 0},
        "reader": OF_READERS,
    }
    controller = {**TRAINER["controller"], "warehouse": str(home / "warehouse")}
    overrides: dict[str, Mapping[str, Any]] = {**own, **TRAINER, "controller": controller}
    made = StackOptions(
        schema=schema, replay=True, partitions=PARTITIONS, num_workers=WORKERS, overrides=overrides
    )
    return dataclasses.replace(made, num_archivers=1, num_readers=2) if killed else made


class Live:
    """Samples of ascending numbers, as many in each partition, a whole batch of each at a time."""

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

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            self.send(PARTITIONS * BATCH)


def number_of(n: int) -> int:
    return 1 + STEP * n


@dataclasses.dataclass
class Killed:
    """Who was killed how often, while history was trained and behind it."""

    of: Counter[str] = dataclasses.field(default_factory=Counter)
    initial: int = 0
    stream: int = 0
    around: int = 0  # of those, within the last and the first commits about the switch
    session: TableInput | None = None

    @property
    def num(self) -> int:
        return self.initial + self.stream

    @property
    def is_mixed(self) -> bool:
        """Each kind of program was killed three times or more."""
        return min(self.of[name] for name in KINDS) >= 3


class Killer:
    """Kills one at a time; who trains only once what was trained behind the last such kill is committed, or
    nothing would be."""

    def __init__(self, stack: Stack, draw: random.Random) -> None:
        self.stack, self.draw, self.killed = stack, draw, Killed()
        self._seq = 0

    @property
    def wants_more(self) -> bool:
        return self.wants_history or self.killed.stream < KILLS // 10

    @property
    def wants_history(self) -> bool:
        """More kills while history is trained."""
        return self.killed.num < KILLS or not self.killed.is_mixed

    def step(self, spares: bool = False) -> None:
        """`spares`: history is left alone, so that what comes behind it has its kills, too."""
        last = newest(self.stack)
        if last is None:
            return
        self.killed.session = self.killed.session or last.input
        near = self._is_near(last)
        if spares and last.input is not None and not near:
            return
        victim = self._victim(last, near)
        if victim is None:
            return
        with contextlib.suppress(UnavailableError):  # it is on its way back
            self.stack.kill(victim)
            self.killed.of[victim.partition("-")[0]] += 1
            self.killed.around += near
            if last.input is not None:
                self.killed.initial += 1
            else:
                self.killed.stream += 1

    def _victim(self, last: Manifest, near: bool) -> str | None:
        if self.draw.random() < (0.7 if near else 0.4) and last.seq > self._seq:
            self._seq = last.seq
            kind = min(("controller", "worker"), key=lambda name: (self.killed.of[name], self.draw.random()))
            return kind if kind == "controller" else self.draw.choice(HEAVY[1:])
        names = LIGHT if last.input is not None else LIGHT[:2] + LIGHT[2:] * (self.draw.random() < 0.1)
        return self.draw.choice([name for name in names if self.stack.pid(name)] or [None])

    def _is_near(self, last: Manifest) -> bool:
        """The switch is about to come, or has just been."""
        if last.input is not None:
            return sum(last.input.rows.values()) - sum(last.positions.values()) < 600
        return sum(last.positions.values()) - NUM_HISTORY < 200


@contextlib.contextmanager
def live(stack: Stack) -> Iterator[Live]:
    it = Live(stack)
    try:
        yield it
    finally:
        it.end()


def files_of(place: Path) -> list[DataFile]:
    warehouse = Warehouse(place)
    return list(warehouse.samples.snapshot().files) if warehouse.samples.exists() else []


def is_sealed(place: Path, count: int) -> bool:
    """All of these are archived, and nothing is due."""
    config = CompactorConfig(warehouse=str(place), seal_after_ms=0)
    rows = sum(file.rows for file in files_of(place))
    return rows >= count and not Compactor(Warehouse(place), config, SystemClock()).due()


def train_under_kills(home: Path, seed: int) -> tuple[Killed, int]:
    """What was killed, and how many samples there are."""
    draw = random.Random(seed)
    with Stack(home, options(home, killed=True), policy=EACH_ALONE) as stack:
        register(FileStore(stack.home.store), samples.schema())
        stack.start(["kafka", "archiver", "compactor"])
        stack.wait_ready("kafka", timeout_s=180)
        with live(stack) as feed:
            killer = Killer(stack, draw)
            archive_under_kills(stack, feed, killer, draw)
            stack.start(["shards", "controller", "workers", "reader-0", "reader-1"])
            wait_until("the session is fixed", lambda: newest(stack) is not None, 180)
            feed.begin()
            ends_s = time.monotonic() + MAX_S
            while (left_s := ends_s - time.monotonic()) > -LONGER_S and killer.wants_more:
                time.sleep(draw.uniform(0.05, 3.0))
                killer.step(spares=left_s < 0 or not killer.wants_history)
            feed.end()
            wait_until("each sample once", lambda: applied(stack) >= feed.num_sent, 300)
            check_books(stack, feed.num_sent)
            return killer.killed, feed.num_sent


def archive_under_kills(stack: Stack, feed: Live, killer: Killer, draw: random.Random) -> None:
    place = stack.home.root / "warehouse"
    while feed.num_sent < NUM_HISTORY:
        feed.send(400)
        time.sleep(draw.uniform(0.0, 0.3))
        with contextlib.suppress(UnavailableError):
            stack.kill(victim := draw.choice(LIGHT[:2]))
            killer.killed.of[victim] += 1
            killer.killed.initial += 1
    wait_until("history at rest", lambda: is_sealed(place, NUM_HISTORY), 120)


def check_books(stack: Stack, count: int) -> None:
    """Committed, predicted and archived: each of these samples, once."""
    place, last = stack.home.root / "warehouse", newest(stack)
    assert last is not None and last.input is None and applied(stack) == count
    audit = auditor(stack)
    try:
        wait_until("all topics read", lambda: audit.poll(2.0) == 0 and audit.is_current(), 120)
        assert audit.sums().samples == count
        assert audit.accounts.untrained_below(nested(last.offsets)[SAMPLES]) == 0
    finally:
        audit.close()
    wait_until("everything is archived", lambda: sum(file.rows for file in files_of(place)) >= count, 60)
    ids = Counter(id_ for _, _, id_ in count_rows(place).elements())
    assert ids == Counter(number_of(n) for n in range(count))


def at_version(place: Path, version: int) -> None:
    """The table of samples as it was: what was committed behind it is gone, files stay."""
    logs = place / "samples" / "_delta_log"
    (logs / "_last_checkpoint").unlink(missing_ok=True)
    for file in logs.iterdir():
        if file.name.split(".")[0].isdecimal() and int(file.name.split(".")[0]) > version:
            file.unlink()


def train_undisturbed(home: Path, count: int) -> TableInput | None:
    """In the same home, from the same version and topic; the session that was trained."""
    with Stack(home, options(home, killed=False)) as stack:
        stack.start(["kafka", "shards", "controller", "workers"])
        wait_until("the session is fixed", lambda: newest(stack) is not None, 180)
        first = newest(stack)
        wait_until("each sample once", lambda: applied(stack) >= count, 300)
        assert first is not None and applied(stack) == count
        return first.input


def bits(home: Path) -> dict[str, bytes]:
    store = FileStore(home / "store")
    last = manifests.newest(store)
    assert last is not None and last.manifest.input is None
    tensors, _ = tensor_file.decode(manifests.read_file(store, last.manifest.dense))
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


def report(killed: Killed, count: int) -> None:
    told: dict[str, Any] = {
        "killed": dict(killed.of),
        "while_initial": killed.initial,
        "on_the_stream": killed.stream,
        "about_the_switch": killed.around,
        "workers": WORKERS,
        "samples": count,
    }
    print(json.dumps(told))
    if path := os.environ.get("INITIAL_KILLS_REPORT"):
        Path(path).write_text(json.dumps(told) + "\n")


def test_g2_g11_mixed_kills_while_history_is_trained_and_handed_over_change_no_bit(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    home = tmp_path / "home"
    killed, count = train_under_kills(home, pytestconfig.getoption("--seed", default=0))
    report(killed, count)
    assert killed.session is not None and killed.num >= KILLS and killed.stream >= KILLS // 10
    assert killed.is_mixed, killed.of
    disturbed = bits(home)
    for folder in (
        "store",
        *(path.name for path in home.glob("shard-*")),
        *(path.name for path in home.glob("worker*")),
    ):
        shutil.rmtree(home / folder, ignore_errors=True)
    at_version(home / "warehouse", killed.session.version)
    again = train_undisturbed(home, count)
    assert again is not None and (again.digest, again.rows) == (killed.session.digest, killed.session.rows)
    assert bits(home) == disturbed
