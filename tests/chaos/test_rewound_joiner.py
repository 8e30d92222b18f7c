"""A joiner that is restored to a state ten minutes back in event time emits the same samples again. The
worker skips all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.options import StackOptions
from infra.stack import Stack
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.flink_rest import FlinkRest
from roostream.runtime.rpc.client import SocketTransport
from roostream.schema.registry import to_toml
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.e2e.loop_stack import applied, auditor, drained, newest, wait_until
from tests.joiner.cases import SCHEMA, engagement, impression, record
from tests.joiner.generated import START_MS, on_every_partition
from tests.joiner.joined_topics import consume, produce

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(580)]

MINUTE_MS, EVERY_MS, WINDOW_MS = 60_000, 2_000, 20_000
BEFORE, REWOUND, AFTER = range(0, 10), range(10, 23), range(23, 26)
"""Minutes of event time: joined before the savepoint; joined, trained and joined again; joined only after the
restore."""
REQUESTS_PER_MINUTE = MINUTE_MS // EVERY_MS


def events(minutes: range) -> Iterator[Record]:
    """One request every two seconds, a click for every third, and heartbeats."""
    for n in range(minutes.start * REQUESTS_PER_MINUTE, minutes.stop * REQUESTS_PER_MINUTE):
        time_ms, ids = START_MS + n * EVERY_MS, {"request": f"r{n}", "user": n % 40 + 1}
        yield record(impression(time_ms, [n % 50 + 1, n % 7 + 51], **ids), partition=-1)
        if n % 3 == 0:
            yield record(engagement(time_ms + 1_000, n % 50 + 1, event=n + 1, **ids), partition=-1)
        if n % 5 == 4:
            yield from on_every_partition(pb.Heartbeat(time_ms=time_ms + EVERY_MS))


def num_closed(minutes: range) -> int:
    """The least number of requests that have closed at the end of `minutes`. The next heartbeat may close
    more."""
    return minutes.stop * REQUESTS_PER_MINUTE - (WINDOW_MS + 10_000) // EVERY_MS - 1


def num_skipped(stack: Stack) -> int:
    """The number of samples that the worker skipped because their ids were already trained."""
    transport = SocketTransport(stack.endpoints.controller)
    try:
        status, _ = transport.call("status", {}, timeout_s=5.0)
        return int(status["reports"]["worker 0"]["duplicates"])
    finally:
        transport.close()


def weights(stack: Stack) -> dict[str, np.ndarray]:
    manifest = newest(stack)
    assert manifest is not None
    tensors, _ = tensor_file.decode(FileStore(stack.home.store).get(manifest.dense.name))
    return {name: value for name, value in tensors.items() if name.startswith(("model.", "optimizer."))}


def options(folder: Path) -> StackOptions:
    (folder / "schema.toml").write_text(to_toml(SCHEMA), encoding="utf-8")
    joiner: dict[str, Any] = {"window_ms": WINDOW_MS, "lateness_ms": 1_000, "checkpoint_interval_ms": 1_000}
    return StackOptions(
        schema=folder / "schema.toml",
        replay=True,
        overrides={"joiner": joiner, "controller": {"commit_interval_ms": 1_000}},
    )


def stable_count(count: Callable[[], int], quiet_s: float = 3.0) -> int:
    """The count once it has not changed for `quiet_s`. The joiner may still emit what the last heartbeat
    closed."""
    before = -1
    while (current := count()) != before:
        before = current
        time.sleep(quiet_s)
    return current


def restart_from(flink: FlinkRest, savepoint: Path, elsewhere: Path) -> None:
    """End the job. The joiner's program then starts the next job from `savepoint`, which is made to look like
    the newest."""
    tomorrow_s = time.time() + 86_400
    os.utime(savepoint / "_metadata", (tomorrow_s, tomorrow_s))
    job = flink.live_job()
    assert job is not None
    flink.stop_with_savepoint(job["jid"], elsewhere.as_uri(), 60)


def test_g2_a_joiner_restored_to_ten_minutes_earlier_trains_nothing_twice(tmp_path: Path) -> None:
    with Stack(tmp_path / "home", options(tmp_path)) as stack:
        stack.start(["kafka", "flink", "joiner", "shards", "controller", "workers"])
        stack.wait_ready("kafka", timeout_s=60)
        kafka, flink = stack.endpoints.kafka, FlinkRest(stack.endpoints.flink)
        produce(kafka, "", list(events(BEFORE)))
        wait_until(
            "the samples before the savepoint are trained", lambda: applied(stack) >= num_closed(BEFORE), 180
        )
        first = flink.live_job()
        assert first is not None
        savepoints = tmp_path / "home" / "flink" / "savepoints"
        savepoint = Path(
            flink.stop_with_savepoint(first["jid"], savepoints.as_uri(), 60).removeprefix("file:")
        )
        produce(kafka, "", list(events(REWOUND)))
        wait_until(
            "the samples that will be repeated are trained",
            lambda: applied(stack) >= num_closed(REWOUND),
            120,
        )
        emitted = stable_count(lambda: len(consume(kafka, "", "samples")))
        wait_until("all emitted samples are trained", lambda: applied(stack) == emitted, 60)
        trained, before = emitted, weights(stack)
        assert num_skipped(stack) == 0

        restart_from(flink, savepoint, tmp_path / "elsewhere")
        num_repeated = len(REWOUND) * REQUESTS_PER_MINUTE - 20
        wait_until(
            "repeated samples", lambda: len(consume(kafka, "", "samples")) >= emitted + num_repeated, 120
        )
        wait_until("skipped samples", lambda: num_skipped(stack) >= num_repeated, 60)
        assert num_repeated * EVERY_MS >= 10 * MINUTE_MS
        assert applied(stack) == trained
        assert all(np.array_equal(value, before[name]) for name, value in weights(stack).items())

        produce(
            kafka, "", [*events(AFTER), *on_every_partition(pb.EndMarker(time_ms=START_MS + 60 * MINUTE_MS))]
        )
        audit = auditor(stack)
        try:
            wait_until("every request sampled and committed", lambda: drained(stack, audit), 120)
            sums = audit.sums(ended=True)
            assert sums.accounted and sums.requests == sums.samples == AFTER.stop * REQUESTS_PER_MINUTE, sums
            assert applied(stack) == sums.samples, "each sample must be trained once"
            assert num_skipped(stack) == len(consume(kafka, "", "samples")) - sums.samples >= num_repeated
        finally:
            audit.close()
