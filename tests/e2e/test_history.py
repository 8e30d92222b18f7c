"""History first, on real Kafka: several workers train up to the export point, one worker trains the stream,
and programs are killed on the way."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from infra.options import StackOptions
from infra.stack import Stack
from roostream.errors import UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import SAMPLES, name_of
from roostream.runtime.rpc.client import SocketTransport
from roostream.schema.registry import to_toml
from roostream.schema.schema_file import load_schema
from tests.cli.train.test_offline import make_wide_schema
from tests.e2e.loop_stack import applied, newest, wait_until
from tests.trainer import samples

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]
SCHEMA = """
[tables.user]
dim = 2
[tables.item]
dim = 4
rule = "rowwise_adagrad"
[[ro]]
name = "user"
kind = "ids"
table = "user"
[[ro]]
name = "hour"
kind = "float"
[[nro]]
name = "item"
kind = "ids"
table = "item"
[[nro]]
name = "age"
kind = "float"
[[label]]
name = "click"
action = "click"
fold = "any"
"""
HISTORY, MORE = range(1, 2001), range(2001, 2201)


def produce(stack: Stack, numbers: range, *, transaction: str = "", fingerprint: int = 0) -> None:
    """Send the samples to the partition of each number. A transaction leaves a marker after its last
    record."""
    name = {"transactional_id": transaction, "delivery_timeout_ms": 20_000, "transaction_timeout_ms": 60_000}
    client = clients.producer(Broker(stack.endpoints.kafka), **(name if transaction else {}))  # type: ignore[arg-type]
    if transaction:
        client.init_transactions(20)
        client.begin_transaction()
    for number in numbers:
        time_ms, key = samples.T0 + number * 1000 + 500, number.to_bytes(8, "little")
        topic = name_of(stack.prefix, SAMPLES)
        clients.send(
            client,
            topic,
            key=key,
            value=samples.sample(number, fingerprint=fingerprint),
            timestamp_ms=time_ms,
            partition=number % 4,
        )
    assert client.flush(30) == 0
    if transaction:
        client.commit_transaction(20)


def controller_status(stack: Stack) -> dict[str, Any]:
    """The controller's status; {} if it does not answer."""
    transport = SocketTransport(stack.endpoints.controller)
    try:
        return dict(transport.call("status", {}, timeout_s=2.0)[0])
    except UnavailableError:
        return {}
    finally:
        transport.close()


def test_g2_g3_history_by_two_workers_then_the_stream_by_one(tmp_path: Path) -> None:
    schema = tmp_path / "schema.toml"
    schema.write_text(SCHEMA, encoding="utf-8")
    assert load_schema(schema).fingerprint == samples.schema().fingerprint
    overrides = {
        "controller": {"initial_workers": 2, "unit_records": 100, "commit_interval_ms": 2_000},
        "worker": {
            "initial_batch_requests": 32,
            "batch_requests": 8,
            "first_batch_requests": 8,
            "batch_growth_requests": 4,
        },
    }
    with Stack(tmp_path / "home", StackOptions(schema=schema, replay=True, overrides=overrides)) as stack:
        stack.start(["kafka"])
        stack.wait_ready("kafka", timeout_s=180)
        produce(stack, HISTORY, transaction="history")
        stack.start(["shards", "controller", "worker"])
        wait_until("a commit of history", lambda: 0 < applied(stack) < len(HISTORY), 180)
        assert (controller_status(stack)["workers"], controller_status(stack)["initial"]["records"]) == (
            2,
            len(HISTORY) + 4,
        ), "the markers of the transaction count as records"
        stack.kill("controller")
        produce(stack, MORE)
        wait_until(
            "the stream",
            lambda: (
                (status := controller_status(stack))
                and status["seq"]
                and not status["initial"]
                and status["wanted_workers"] == 1
            ),
            180,
        )
        wait_until("every sample trained once", lambda: applied(stack) == len(HISTORY) + len(MORE), 120)
        last = newest(stack)
        assert last is not None and len(last.workers) == 1
        wait_until("the second worker's end", lambda: stack.state("worker-1") == "stopped", 60)
        assert applied(stack) == len(HISTORY) + len(MORE)


def exchanged_bytes(stack: Stack) -> float:
    """The bytes of rows exchanged between the workers, as worker 0 counts them."""
    with urllib.request.urlopen(stack.endpoints.metrics["worker"], timeout=5) as answer:
        text = answer.read().decode()
    found = re.search(r"^roostream_worker_exchanged_bytes_total ([\d.e+]+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_g3_history_with_rows_in_torchrecs_collections_then_the_stream_with_rows_at_shards(
    tmp_path: Path,
) -> None:
    """A worker is killed during the history. The stream then changes rows that the history has trained."""
    pytest.importorskip("torchrec")
    schema = tmp_path / "schema.toml"
    schema.write_text(to_toml(make_wide_schema()), encoding="utf-8")
    overrides = {
        "controller": {"initial_workers": 2, "unit_records": 250, "commit_interval_ms": 2_000},
        "worker": {
            "initial_rows": "torchrec",
            "initial_placement": "planner",
            "profile_share": 1.0,
            "batch_requests": 8,
            "first_batch_requests": 8,
        },
    }
    with Stack(tmp_path / "home", StackOptions(schema=schema, replay=True, overrides=overrides)) as stack:
        stack.start(["kafka"])
        stack.wait_ready("kafka", timeout_s=180)
        produce(stack, HISTORY, fingerprint=make_wide_schema().fingerprint)
        stack.start(["shards", "controller", "worker"])
        wait_until("a commit of history", lambda: 0 < applied(stack) < len(HISTORY), 180)
        assert exchanged_bytes(stack) > 0
        stack.kill("worker-1")
        produce(stack, MORE, fingerprint=make_wide_schema().fingerprint)
        wait_until(
            "the stream",
            lambda: (status := controller_status(stack)) and status["seq"] and not status["initial"],
            240,
        )
        wait_until("every sample trained once", lambda: applied(stack) == len(HISTORY) + len(MORE), 180)
        last = newest(stack)
        assert last is not None and set(last.shards) == set(range(stack.options.num_shards))
        transport = SocketTransport(stack.endpoints.shards[0])
        try:
            rows = transport.call("stats", {}, timeout_s=5.0)[0]["rows"]
        finally:
            transport.close()
        assert all(rows.values())
