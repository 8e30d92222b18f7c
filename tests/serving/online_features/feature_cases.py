"""A real Redis server on a free port, random events, and an in-memory consumer of them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from roostream.errors import WireError
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.runtime.kafka.topics import (
    DEFAULT_PARTITIONS,
    ENGAGEMENTS,
    EVENTS,
    IMPRESSIONS,
    Partition,
    all_partitions,
)
from roostream.schema.ids import key_bytes
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from serving.online_features.hydration import Hydrator

EVENT_PARTITIONS = all_partitions(EVENTS, DEFAULT_PARTITIONS)

T0 = 1_700_000_000_000


def find_redis() -> str | None:
    return shutil.which(
        "redis-server", path=f"{os.environ.get('PATH', '')}{os.pathsep}{Path(sys.prefix) / 'bin'}"
    )


class RedisServer:
    """A Redis server that can be stopped and started again on the same port. It always starts empty."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder, self._options = folder, options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = find_redis()
        assert binary is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen([binary, *options, *self._options], stdout=subprocess.DEVNULL)
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise AssertionError("redis-server did not start")

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def patient_hydrator(redis: RedisServer, schema: Schema) -> Hydrator:
    """Return a hydrator with a fake clock, so that no read counts as slow on a busy machine."""
    return Hydrator(redis.url, "x.", schema, clock=FakeClock(), timeout_s=5.0)


class MemoryEvents(MemoryConsumer):
    """An in-memory consumer of both event topics that counts its seeks."""

    def __init__(self, records: Iterable[Record], partitions: Sequence[Partition] = EVENT_PARTITIONS) -> None:
        super().__init__(partitions, records)
        self.seeks = 0

    def seek(
        self, progress: Mapping[Partition, int], leader_epochs: Mapping[Partition, int] = MappingProxyType({})
    ) -> None:
        self.seeks += 1
        super().seek(progress, leader_epochs)


def impression(user_id: int, item_ids: list[int], time_ms: int) -> tuple[str, int, bytes]:
    message = pb.Impression(header=_header(user_id, time_ms), item_ids=item_ids)
    return IMPRESSIONS, time_ms, wire.encode(wire.IMPRESSION, message)


def engagement(user_id: int, item_id: int, time_ms: int, action: str = "click") -> tuple[str, int, bytes]:
    message = pb.Engagement(
        header=_header(user_id, time_ms), event_id=time_ms, item_id=item_id, action=action, value=1
    )
    return ENGAGEMENTS, time_ms, wire.encode(wire.ENGAGEMENT, message)


def _header(user_id: int, time_ms: int) -> pb.Header:
    return pb.Header(user_id=user_id, time_ms=time_ms, request_id=f"{user_id}-{time_ms}")


def heartbeat(time_ms: int) -> tuple[str, int, bytes]:
    return IMPRESSIONS, time_ms, wire.encode(wire.HEARTBEAT, pb.Heartbeat(time_ms=time_ms))


def events(count: int, seed: int = 0) -> list[tuple[str, int, bytes]]:
    """Return random views and clicks of a few users and items in time order, mixed with heartbeats and
    unreadable records.
    """
    rng = np.random.default_rng(seed)
    out = []
    for n in range(count):
        user, time_ms = int(rng.integers(0, 4)), T0 + 60_000 * n
        items = rng.integers(0, 12, 4).tolist()
        out.append(
            impression(user, items, time_ms) if rng.random() < 0.6 else engagement(user, items[0], time_ms)
        )
        if n % 7 == 0:
            out.append(heartbeat(time_ms))
        if n % 11 == 0:
            out.append((ENGAGEMENTS, time_ms, b"\x02\x01\xff"))
    return out


def records_of(given: list[tuple[str, int, bytes]]) -> list[Record]:
    """Return records of these events, spread over partitions with consecutive offsets."""
    ends = dict.fromkeys(EVENT_PARTITIONS, 0)
    out = []
    for n, (topic, time_ms, value) in enumerate(given):
        partition = (topic, n % 4)
        out.append(Record(*partition, ends[partition], time_ms, _key(value), value))
        ends[partition] += 1
    return out


def _key(value: bytes) -> bytes:
    try:
        _, message = wire.decode(value)
    except WireError:
        return b""
    if not isinstance(message, pb.Impression | pb.Engagement):
        return b""
    header = message.header
    return key_bytes(header.user_id, header.session_id, header.request_id)
