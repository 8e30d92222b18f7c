"""The Flink engine and the local engine write the same samples for the same events, also after kills.

Flink's task manager and the local `roostream joiner` are killed halfway. Both engines write at least once, so
copies of a sample id count once and must be equal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topic_admin import TopicAdmin
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS, TopicSettings
from roostream.runtime.store_identity import init_store
from roostream.schema.registry import to_toml
from tests.joiner import generated
from tests.joiner.cases import SCHEMA
from tests.joiner.joined_topics import SETTINGS, count, distinct, produce, wait

ROOT = Path(__file__).resolve().parent.parent.parent
LOCAL = "local."  # prefix of the local engine's topics
OUTPUTS = ("samples", "corrections", "dead_letters")
RECORDS = generated.arrivals(11)
HALF = len(RECORDS) // 2
_WAIT_S = 90

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from infra.options import StackOptions
    from infra.stack import Stack

    home = tmp_path_factory.mktemp("engines")
    (home / "schema.toml").write_text(to_toml(SCHEMA), encoding="utf-8")
    overrides = {"joiner": {**SETTINGS, "checkpoint_interval_ms": 1_000}}
    options = StackOptions(schema=home / "schema.toml", replay=True, overrides=overrides)
    with Stack(home / "stack", options) as running:
        running.start(["kafka", "joiner"])
        running.wait_ready("kafka", timeout_s=60)
        yield running


def num_requests() -> int:
    return len({m.header.request_id for m in generated.messages(11) if hasattr(m, "nro")})


def start_local(stack: Any, home: Path) -> subprocess.Popen[bytes]:
    """Start `roostream joiner` with the local engine."""
    lines = [f"{k} = {str(v).lower() if isinstance(v, bool) else v!r}" for k, v in SETTINGS.items()]
    config = home / "local.toml"
    init_store(home / "store")
    paths = {
        "bootstrap": stack.endpoints.kafka,
        "prefix": LOCAL,
        "schema": stack.options.schema,
        "store": home / "store",
        "home": home,
    }
    lines += [f'{k} = "{v}"' for k, v in paths.items()] + [
        'engine = "local"',
        "checkpoint_interval_ms = 300",
        "replay = true",
    ]
    config.write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "roostream.cli.main", "joiner", "--config", str(config)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "ROOSTREAM_LOG": "WARNING"})


@pytest.fixture(scope="module")
def local_outputs(stack: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """The outputs of the local engine, which is killed halfway."""
    bootstrap, home = stack.endpoints.kafka, tmp_path_factory.mktemp("local")
    TopicAdmin(
        clients.admin(Broker(bootstrap)), LOCAL, DEFAULT_PARTITIONS, TopicSettings(replay=True)
    ).create()
    produce(bootstrap, LOCAL, RECORDS[:HALF])
    first = start_local(stack, home)
    wait(
        "first samples and a snapshot",
        lambda: count(bootstrap, LOCAL, "samples") > 20 and any(home.glob("snapshots/*")),
    )
    first.kill()
    first.wait()
    second = start_local(stack, home)
    try:
        produce(bootstrap, LOCAL, RECORDS[HALF:])
        wait("the last sample", lambda: len(distinct(bootstrap, LOCAL, "samples")) == num_requests())
        wait("topics without new records", lambda: _is_quiet(bootstrap, LOCAL))
    finally:
        second.send_signal(signal.SIGTERM)
        assert second.wait(20) == 0
    return {topic: distinct(bootstrap, LOCAL, topic) for topic in OUTPUTS}


@pytest.fixture(scope="module")
def flink_outputs(stack: Any) -> dict[str, dict]:
    """The outputs of Flink, whose task manager is killed halfway."""
    bootstrap = stack.endpoints.kafka
    produce(bootstrap, "", RECORDS[:HALF])
    stack.wait_ready("joiner", timeout_s=_WAIT_S)
    wait("a first sample", lambda: count(bootstrap, "", "samples") > 20)
    stack.kill("flink-tm-0")
    produce(bootstrap, "", RECORDS[HALF:])
    wait("the last sample", lambda: len(distinct(bootstrap, "", "samples")) == num_requests())
    wait("topics without new records", lambda: _is_quiet(bootstrap, ""))
    return {topic: distinct(bootstrap, "", topic) for topic in OUTPUTS}


def _is_quiet(bootstrap: str, prefix: str) -> bool:
    before = [count(bootstrap, prefix, topic) for topic in OUTPUTS]
    time.sleep(1.0)
    return before == [count(bootstrap, prefix, topic) for topic in OUTPUTS]


@pytest.mark.parametrize("topic", OUTPUTS)
def test_both_engines_write_the_same_bytes(topic: str, local_outputs: dict, flink_outputs: dict) -> None:
    assert local_outputs[topic]
    assert set(flink_outputs[topic]) == set(local_outputs[topic])
    assert flink_outputs[topic] == local_outputs[topic]
