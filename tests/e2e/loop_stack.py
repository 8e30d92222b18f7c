"""A whole stack for the end-to-end and chaos tests, and helpers that wait for and read its state."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from infra.auditor.auditor import Auditor
from infra.options import StackOptions, demo
from infra.stack import Stack
from roostream.errors import UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import open_store
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import ENGAGEMENTS, IMPRESSIONS, SAMPLES, name_of, nested
from roostream.runtime.manifest import Manifest


def quick_options() -> StackOptions:
    """The demo's stack with shorter intervals, so that a test sees many commits. Requests close at the end of
    the window, so that a sample contains every engagement."""
    return demo(
        overrides={
            "joiner": {"window_ms": 4_000, "lateness_ms": 1_000, "checkpoint_interval_ms": 2_000},
            "worker": {},
            "shard": {"publish_interval_ms": 300},
            "controller": {"commit_interval_ms": 2_000},
            "simulate": {"rate": 15.0},
        }
    )


def wait_until(
    event: str, check: Callable[[], Any], timeout_s: float, read: Callable[[], object] | None = None
) -> Any:
    """Wait for a true value of `check` and return it. On a timeout, after which `check` is called once more,
    the test fails with `event` and with what `read` returns."""
    until_s = time.monotonic() + timeout_s
    while True:
        is_last = time.monotonic() >= until_s
        if value := check():
            return value
        if is_last:
            raise AssertionError(
                f"not within {timeout_s:.0f} s: {event}{f'; read: {read()}' if read else ''}"
            )
        time.sleep(0.25)


def rank(stack: Stack, items: list[int]) -> dict[str, Any]:
    """Rank these items for user 7 and return the answer."""
    body = {"user_id": 7, "session_id": 1, "candidates": [{"item_id": i} for i in items]}
    call = urllib.request.Request(
        f"{stack.endpoints.serving}/v1/rank", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=5) as answer:
        return json.loads(answer.read())


def newest(stack: Stack) -> Manifest | None:
    url = stack.options.overrides.get("controller", {}).get("store", stack.home.store)
    found = manifests.newest(open_store(url))
    return found.manifest if found else None


def applied(stack: Stack) -> int:
    """The number of samples in the committed parameters, from the newest manifest. A rollback lowers it."""
    manifest = newest(stack)
    return sum(part.metrics["requests"] for part in manifest.workers.values()) if manifest else 0


def auditor(stack: Stack) -> Auditor:
    return Auditor(
        Broker(stack.endpoints.kafka),
        stack.prefix,
        num_partitions=stack.options.partitions,
        settle_ms=stack.options.settle_ms,
    )


def drained(stack: Stack, audit: Auditor) -> bool:
    """Whether every request is sampled and the committed parameters contain each sample once. Records that
    the auditor has not read yet can't make this true, because the two counts have different sources; neither
    can figures that Kafka does not report now."""
    try:
        audit.poll(2.0)
    except UnavailableError:
        return False
    sums = audit.sums()
    unfinished = sums.pending or sums.pending_requests or sums.unknown
    return sums.samples > 0 and not unfinished and applied(stack) == sums.samples


def kill_and_resume(stack: Stack, victim: str, *, more: int = 50, timeout_s: float = 120) -> int:
    """Kill a program with SIGKILL and wait until `more` further samples are committed. Returns how many
    were."""
    before = applied(stack)
    stack.kill(victim)
    event = f"{more} more committed samples after the kill of {victim}"
    return wait_until(event, lambda: (now := applied(stack) - before) >= more and now, timeout_s)


def unreadable(stack: Stack) -> int:
    """The number of dead letters whose bytes are no valid record."""
    audit = auditor(stack)
    try:
        audit.poll(5.0)
        reasons = audit.sums().dead_letters
        return reasons.get("undecodable", 0) + reasons.get("unknown_type", 0)
    finally:
        audit.close()


def check_nothing_lost_or_twice(stack: Stack, *, within_s: float = 120) -> None:
    """Stop the simulator and check guarantees G1 and G2 (docs/architecture.md). G1 is checked from the
    topics. G2 is checked from the committed count: lost samples make it smaller, repeated ones larger."""
    stack.stop_program("simulate")
    audit = auditor(stack)
    try:
        wait_until(
            "every request sampled and committed",
            lambda: drained(stack, audit),
            within_s,
            lambda: (applied(stack), audit.sums()),
        )
        sums = audit.sums(ended=True)
        assert sums.accounted, sums
        assert (
            sums.engagements == sums.folded + sums.corrected + sums.only_repeated + sums.dead_engagements
        ), sums
        assert sums.requests == sums.samples + sums.dead_requests, sums
        assert applied(stack) == sums.samples, (applied(stack), sums)
        manifest = newest(stack)
        assert manifest is not None and audit.accounts.untrained_below(nested(manifest.offsets)[SAMPLES]) == 0
    finally:
        audit.close()


def produce_garbage(stack: Stack) -> int:
    """Write invalid bytes with the present time to every partition of the event topics and the samples.
    Returns the number of records."""
    client = clients.producer(Broker(stack.endpoints.kafka))
    now_ms, count = int(time.time() * 1000), 0
    for topic in (IMPRESSIONS, ENGAGEMENTS, SAMPLES):
        for partition in range(stack.options.partitions):
            for value in (b"", b"no record", b"\x01\x01\xff\xff\xff"):
                clients.send(
                    client,
                    name_of(stack.prefix, topic),
                    key=b"\0" * 8,
                    value=value,
                    timestamp_ms=now_ms,
                    partition=partition,
                )
                count += 1
    assert client.flush(20) == 0
    return count
