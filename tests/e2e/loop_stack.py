"""One whole stack for the end-to-end tests, and the questions that they ask it."""

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
    """The demo's stack with shorter times, so that a test sees many commits. Requests close at the end of
    the window, so that every engagement is in its sample."""
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
    what: str, check: Callable[[], Any], timeout_s: float, read: Callable[[], object] | None = None
) -> Any:
    """The first true value of `check`; fails the test with `what` and with what `read` returns if none
    comes."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        if value := check():
            return value
        time.sleep(0.25)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}{f'; read: {read()}' if read else ''}")


def rank(stack: Stack, items: list[int]) -> dict[str, Any]:
    """The answer to a new request of user 7."""
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
    """Samples that the committed parameters contain, as the newest manifest counts them: rolled back with
    everything else."""
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
    """Every request is sampled, and the committed parameters contain each sample once. What the auditor
    hasn't read yet can't make this true: the counts come from two places; nor can what Kafka doesn't tell
    now."""
    try:
        audit.poll(2.0)
    except UnavailableError:
        return False
    sums = audit.sums()
    waits = sums.pending or sums.pending_requests or sums.unknown
    return sums.samples > 0 and not waits and applied(stack) == sums.samples


def kill_and_resume(stack: Stack, victim: str, *, more: int = 50, timeout_s: float = 120) -> int:
    """kill -9, then wait until the loop has by itself committed `more` samples beyond those that were; how
    many more."""
    before = applied(stack)
    stack.kill(victim)
    what = f"{more} more committed samples after the kill of {victim}"
    return wait_until(what, lambda: (now := applied(stack) - before) >= more and now, timeout_s)


def unreadable(stack: Stack) -> int:
    """Dead letters of bytes that are no record."""
    audit = auditor(stack)
    try:
        audit.poll(5.0)
        reasons = audit.sums().dead_letters
        return reasons.get("undecodable", 0) + reasons.get("unknown_type", 0)
    finally:
        audit.close()


def check_nothing_lost_or_twice(stack: Stack, *, within_s: float = 120) -> None:
    """G1 from the topics; G2 from the committed count, which lost samples make smaller and repeated ones
    larger."""
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
    """Bytes that are no record, at now, to every partition of both event topics and of the samples; how many
    records."""
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
