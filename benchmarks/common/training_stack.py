"""A stack with Kafka, shards, a controller and a worker, fed with endless samples; without joiner, features
and serving."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import samples as data
from infra.auditor.auditor import Auditor
from infra.child import Child
from infra.options import StackOptions
from infra.stack import Stack
from infra.supervisor import RestartPolicy
from param_server.client import Client
from roostream.errors import RoostreamError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import SAMPLES, name_of, nested
from roostream.runtime.manifest import Manifest
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.scrape import ScrapedMetrics, fetch
from roostream.schema.ids import key_bytes
from roostream.wire import records as wire
from roostream.wire.lookup import Lookup, StackLookup

PROGRAMS = ("kafka", "shards", "controller", "workers")
CANDIDATES = 20
_READY_S = 120.0
_LOOK_S = 0.1
_RESTART_AT_ONCE = RestartPolicy(stable_s=2.0)  # a program that lived for 2 s restarts without a delay
_COMMIT_S, _CALL_S = 60.0, 90.0
_AUDIT_S = 60.0
_ROWS_A_PUSH = 50_000
_HOLD_TRIES = 5
_FIRST_LOADER = 63  # worker numbers from here on belong to no worker


class Feed:
    """Writes samples that close now: `rate` a second, and at most `ahead` more than are committed."""

    def __init__(self, stack: Stack, rate: float, ahead: int = 60_000, kinds: int = 512) -> None:
        self.stack, self.rate, self.ahead = stack, rate, ahead
        self.num_sent = 0
        self._samples = [data.sample(data.demo_schema(), n, candidates=CANDIDATES) for n in range(kinds)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._failed: list[BaseException] = []

    def open(self) -> Feed:
        self._thread.start()
        return self

    def close(self) -> None:
        """Wait until the broker has all samples. Idempotent. Raises the error that ended the feed, if any."""
        self._stop.set()
        self._thread.join(30.0)
        if self._failed:
            raise self._failed.pop()

    def _run(self) -> None:
        try:
            self._feed()
        except BaseException as error:
            self._failed.append(error)

    def _feed(self) -> None:
        producer = clients.producer(Broker(self.stack.endpoints.kafka))
        topic, store = name_of(self.stack.prefix, SAMPLES), FileStore(self.stack.home.store)
        began_s = time.monotonic()
        while not self._stop.wait(_LOOK_S / 2):
            newest = manifests.newest(store)
            limit = self.ahead + (sum(newest.manifest.offsets.values()) if newest else 0)
            due = min(limit, (time.monotonic() - began_s) * self.rate)
            while self.num_sent < due and not self._stop.is_set():
                self._send(producer, topic)
        producer.flush(20)

    def _send(self, producer: Any, topic: str) -> None:
        n, now_ms = self.num_sent, int(time.time() * 1000)
        sample = self._samples[n % len(self._samples)]
        sample.sample_id, sample.close_ms = n + 1, now_ms
        sample.header.request_id, sample.header.time_ms = f"r{n}", now_ms - 20_000
        value = wire.encode(wire.SAMPLE, sample)
        partition = n % self.stack.options.partitions
        key = key_bytes(sample.header.user_id, 0, "")
        clients.send(producer, topic, key=key, value=value, timestamp_ms=now_ms, partition=partition)
        self.num_sent += 1


class SampleAccount(NamedTuple):
    """The samples of one commit."""

    below: int  # samples below the commit's offsets
    trained: int  # samples that its parameters contain, by the workers' counts
    unpredicted: int = 0  # samples below the offsets without a prediction; 0 if not counted

    @property
    def lost(self) -> int:
        return max(self.below - self.trained, 0, self.unpredicted)

    @property
    def twice(self) -> int:
        return max(self.trained - self.below, 0)


class Trainer:
    """A running stack and its feed."""

    def __init__(self, stack: Stack, feed: Feed) -> None:
        self.stack, self.feed, self.schema = stack, feed, data.demo_schema()
        self._auditor: Auditor | None = None
        self._loads = itertools.count()

    def warm_up(self, requests: int) -> None:
        """Wait until this many requests are trained."""

        def is_warm() -> bool:
            return (self.metrics("worker").value("roostream_worker_requests_total") or 0) >= requests

        until(f"{requests} requests trained", is_warm, _READY_S)

    def call(self, method: str, **fields: Any) -> dict[str, Any]:
        """A call to the controller."""
        transport = SocketTransport(self.stack.endpoints.controller)
        try:
            return transport.call(method, fields, timeout_s=_CALL_S)[0]
        finally:
            transport.close()

    def commit(self) -> Manifest:
        """Commit everything trained so far. Raises RuntimeError after a minute without a commit."""
        answer = self.call("commit", timeout_s=_COMMIT_S)
        if not answer["committed"]:
            raise RuntimeError(f"no commit within {_COMMIT_S:.0f} s: {answer}")
        return self.newest()

    def newest(self) -> Manifest:
        found = manifests.newest(FileStore(self.stack.home.store))
        assert found is not None, "nothing was committed yet"
        return found.manifest

    def metrics(self, name: str) -> ScrapedMetrics:
        """A program's metrics now; empty if it does not answer."""
        return fetch(self.stack.endpoints.metrics[name], timeout_s=2.0)

    def child(self, name: str) -> Child:
        child = self.stack.supervisor.slots[name].child
        assert child is not None, f"{name} does not run"
        return child

    def hold(self, count: int) -> None:
        """Change rows 1 to `count` of the items, so that the next commit writes them. Starts again if the
        programs are restored in between."""
        for left in reversed(range(_HOLD_TRIES)):
            try:
                return self._hold(count)
            except RoostreamError:
                if not left:
                    raise
                time.sleep(1.0)

    def _hold(self, count: int) -> None:
        transports = [SocketTransport(address) for address in self.stack.endpoints.shards]
        worker = _FIRST_LOADER + next(self._loads)  # a shard accepts a push number of a worker once
        client = Client(self.schema, transports, worker=worker, num_buckets=self.stack.options.buckets)
        try:
            client.set_incarnation(int(self.call("status")["incarnation"]))
            touch(client, count)
        finally:
            client.close()
            for transport in transports:
                transport.close()

    def audited(self, manifest: Manifest) -> SampleAccount:
        """The account of this commit, with what the topics say about its samples."""
        if self._auditor is None:
            stack = self.stack
            self._auditor = Auditor(
                Broker(stack.endpoints.kafka), stack.prefix, num_partitions=stack.options.partitions
            )
        auditor, offsets = self._auditor, nested(manifest.offsets)[SAMPLES]

        def unpredicted() -> int:
            ends = auditor.accounts.sample_ends
            unread = sum(max(offset - ends.get(partition, 0), 0) for partition, offset in offsets.items())
            return unread + auditor.accounts.untrained_below(offsets)

        ends_s = time.monotonic() + _AUDIT_S
        auditor.poll(1.0)
        while unpredicted() and time.monotonic() < ends_s:
            auditor.poll(1.0)
        return account(manifest)._replace(unpredicted=unpredicted())

    def close(self) -> None:
        self.feed.close()
        if self._auditor is not None:
            self._auditor.close()

    def uncommitted(self, seconds: float) -> Manifest:
        """Commit, train for so long, and return the commit to which an interrupted program returns now."""
        self.commit()
        ends_s = time.monotonic() + seconds
        until(
            "something new is trained",
            lambda: time.monotonic() >= ends_s and self.call("status")["news"],
            seconds + 60.0,
        )
        return self.newest()

    @property
    def interval_s(self) -> float:
        return float(self.stack.options.overrides["controller"]["commit_interval_ms"]) / 1000


def touch(client: Client, count: int) -> None:
    """Change rows 1 to `count` of the demo's items a little."""
    table = client.schema.table_by_name["item"]
    ids = np.arange(1, count + 1, dtype=np.int64)
    for id_U in np.array_split(ids, -(-count // _ROWS_A_PUSH)):
        lookup = Lookup({table.stack: StackLookup(np.full(len(id_U), table.id, np.uint32), id_U, {})})
        gradients = {table.stack: np.full((len(id_U), table.dim), 1e-4, np.float32)}
        client.push(lookup, gradients, step=1, time_ms=int(time.time() * 1000))


def account(manifest: Manifest) -> SampleAccount:
    return SampleAccount(
        below=sum(manifest.offsets.values()),
        trained=sum(part.metrics["requests"] for part in manifest.workers.values()),
    )


def until(what: str, check: Callable[[], Any], timeout_s: float, pause_s: float = _LOOK_S) -> Any:
    """The first true value of `check`.

    Raises:
        RuntimeError: none came in time.
    """
    ends_s = time.monotonic() + timeout_s
    while time.monotonic() < ends_s:
        if value := check():
            return value
        time.sleep(pause_s)
    raise RuntimeError(f"not within {timeout_s:.0f} s: {what}")


def ended(child: Child, timeout_s: float) -> tuple[float, int]:
    """Wait for a child's end: when it was (monotonic seconds), and its exit code.

    Raises:
        RuntimeError: it still runs.
    """
    with contextlib.suppress(ProcessLookupError):  # the supervisor has seen its end already
        handle = os.pidfd_open(child.pid)
        try:
            if not select.select([handle], [], [], timeout_s)[0]:
                raise RuntimeError(f"{child.program.name} still runs after {timeout_s:.0f} s")
        finally:
            os.close(handle)
    at_s = time.monotonic()
    until(f"the exit code of {child.program.name}", lambda: child.process.returncode is not None, 5.0, 0.02)
    return at_s, int(child.process.returncode)


@contextlib.contextmanager
def training_stack(
    rate: float, rows: int, warm_requests: int, interval_ms: int = 10_000
) -> Iterator[Trainer]:
    """A stack that trains at most `rate` requests a second, has `rows` rows beside those of its samples, and
    has trained `warm_requests` requests. `interval_ms`: between commits."""
    with tempfile.TemporaryDirectory(prefix="roostream-bench-", ignore_cleanup_errors=True) as folder:
        options = StackOptions(overrides={"controller": {"commit_interval_ms": interval_ms}})
        with Stack(Path(folder) / "home", options, policy=_RESTART_AT_ONCE) as stack:
            stack.start(PROGRAMS)
            stack.wait_ready("workers", timeout_s=_READY_S)
            trainer = Trainer(stack, Feed(stack, rate).open())
            try:
                trainer.warm_up(warm_requests)
                if rows:
                    trainer.hold(rows)
                trainer.commit()
                yield trainer
            finally:
                trainer.close()
