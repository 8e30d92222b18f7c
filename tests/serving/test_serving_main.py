"""A real serving process (uvicorn on a free port) while Kafka, Redis and the shards are unavailable."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from roostream.errors import ConfigError, SetupError
from roostream.runtime.store_identity import init_store, open_checkpoint_store
from roostream.runtime.thread_group import StopBudget, ThreadGroup
from roostream.schema.registry import to_toml
from roostream.schema.settings import load
from roostream.wire import records as wire
from serving.build import build_process
from serving.config import ServingConfig
from serving.feature_log.format import LogRecord
from serving.feature_log.log import FeatureLog
from serving.feature_log.sender import LogSender
from serving.main import serve, stop_process
from tests.runtime.manifest_cases import a_manifest
from tests.serving.serving_cases import BODY, SCHEMA
from tests.serving.serving_fakes import FakeSink

ROOT = Path(__file__).parents[2]
_RUN_SERVING = """
import sys
from roostream.runtime.program import leave
from infra.program_specs import find_spec
from roostream.schema.settings import load
from serving.config import ServingConfig
code = find_spec("serving").run_until_signal(load(ServingConfig, sys.argv[1]))
assert not [m for m in ("torchrec", "pyflink", "pandas") if m in sys.modules]
leave(code)
"""


def write_config(home: Path, /, **changes: object) -> Path:
    (home / "schema.toml").write_text(to_toml(SCHEMA))
    init_store(home / "store")
    settings: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "schema": str(home / "schema.toml"),
        "store": str(home / "store"),
        "home": str(home),
        "bootstrap": "127.0.0.1:1",
        "shards": ["127.0.0.1:1"],
        "redis": "redis://127.0.0.1:1/0",
        "stop_ms": 5_000,
        **changes,
    }
    path = home / "serving.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    return path


class ServingProcess:
    """A serving process and the lines of its log."""

    def __init__(self, config: Path) -> None:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", _RUN_SERVING, str(config)]
        self.child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ, cwd=ROOT)
        self.lines: list[str] = []
        self.url = ""

    def __iter__(self) -> Iterator[str]:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(line)
            yield line

    def wait_for_address(self) -> str:
        return self.wait_for_line(r"serving on (http://\S+),")[1]

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        for line in self:
            if found := re.search(pattern, line):
                return found
        raise AssertionError("".join(self.lines))

    def end(self) -> int:
        """Wait for the end of the process and return its exit code."""
        assert self.child.stderr is not None
        if self.child.stderr.closed:
            return self.child.wait()
        drain = threading.Thread(target=lambda: [None for _ in self])
        drain.start()
        code = self.child.wait(60)
        drain.join()
        self.child.stderr.close()
        return code


def test_a_process_without_its_peers_answers_degraded_and_stops_cleanly(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    config = write_config(tmp_path, admin_listen="127.0.0.1:0", admin_token_file=str(tmp_path / "token"))
    (tmp_path / "store").rename(tmp_path / "unmounted")
    running = ServingProcess(config)
    metrics_url = running.wait_for_line(r"metrics at (http://\S+)/metrics")[1]
    running.wait_for_line("waiting for the checkpoint store: ")
    assert httpx2.get(f"{metrics_url}/livez").status_code == 200
    assert httpx2.get(f"{metrics_url}/readyz").status_code == 503
    (tmp_path / "unmounted").rename(tmp_path / "store")
    with httpx2.Client(base_url=running.wait_for_address(), timeout=30) as http:
        admin = re.findall(r"admin interface on (http://\S+)", "".join(running.lines))[0]
        assert http.get(f"{admin}/versions").status_code == 401
        versions = http.get(f"{admin}/versions", headers={"authorization": "Bearer 0123456789abcdef"}).json()
        assert versions["served"] == "0-0" and versions["refused"] == []
        assert http.get("/healthz").status_code == 200
        ready = http.get("/readyz")
        assert ready.status_code == 503 and ready.json()["waiting_for"] == ["rows of the shards"]
        answer = http.post("/v1/rank", json={**BODY, "ro": {}})
        assert answer.status_code == 200
        assert answer.json()["degraded"] is True and answer.json()["model_version"] == "0-0"
        click = {"request_id": "r-1", "user_id": 17, "session_id": 4, "item_id": 8, "action": "click"}
        assert http.post("/v1/engagements", json=click).json()["accepted"] == 1
        metrics = http.get("/metrics").text
        assert "roostream_serving_ready 0.0" in metrics and 'model_version{version="0-0"} 1.0' in metrics
        assert (
            "roostream_serving_replica_rows 0.0" in metrics
            and "roostream_serving_log_backlog_records" in metrics
        )
        assert 'versions_refused_total{reason="warm_up"} 0.0' in metrics
        running.wait_for_line(r" I roostream waiting for topics rows at 127\.0\.0\.1:1: ")
        running.child.send_signal(signal.SIGTERM)
        while (
            "another process: this one is stopping"
            not in (ready := http.get("/readyz").json())["waiting_for"]
        ):
            assert ready["waiting_for"] == ["rows of the shards"]
    assert running.end() == 0, "".join(running.lines)
    text = "".join(running.lines)
    left = re.findall(rf"(\d+) records of the feature log .* they stay in {tmp_path / 'log'}\b", text)
    assert left == ["2"], "the impression and the engagement; heartbeats do not count"
    assert "Traceback" not in text
    assert list((tmp_path / "store" / "schemas").iterdir()), "the schema is registered"
    log = FeatureLog.open(tmp_path / "log")
    kinds = [wire.decode(e.record.value)[0] for e in log.read(log.cursor, 1 << 30) if e.record]
    assert kinds.count(wire.IMPRESSION) == kinds.count(wire.ENGAGEMENT) == 1
    assert kinds.count(wire.HEARTBEAT) >= 8 and kinds.count(wire.HEARTBEAT) % 8 == 0
    log.close()


def test_the_feature_log_is_sent_although_another_thread_hangs(tmp_path: Path) -> None:
    config = load(ServingConfig, write_config(tmp_path), environ={})
    process = build_process(config, open_checkpoint_store(config.store), CollectorRegistry())
    delivered: list[LogRecord] = []
    process = dataclasses.replace(process, sender=LogSender(process.context.log, lambda: FakeSink(delivered)))
    record = LogRecord("impressions", -1, 1, b"userkey!", b"impression")
    process.context.log.append(record)
    stop, may_end = threading.Event(), threading.Event()
    threads = ThreadGroup(stop)
    threads.start("rows", may_end.wait)
    stop.set()
    stop_process(process, threads, threading.Event(), StopBudget(stop, 60.0))
    assert delivered == [record] and process.context.log.backlog_records == 0
    may_end.set()
    assert threads.join(10.0) == []
    process.close()


def test_a_process_is_not_ready_while_every_commit_is_of_another_schema(tmp_path: Path) -> None:
    config = load(ServingConfig, write_config(tmp_path), environ={})
    store = open_checkpoint_store(config.store)
    shape = {"num_shards": 1, "num_buckets": config.buckets, "num_partitions": config.partitions}
    manifest = a_manifest(1, schema="00000000000000aa", **shape)
    assert store.create(manifest.name, manifest.encode())
    process = build_process(config, store, CollectorRegistry())
    process.version_follower.poll()
    assert any("serving waits for a commit of its schema" in text for text in process.context.waiting_for())
    process.close()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"order_task": "clik"}, ConfigError, "did you mean 'click'"),
        ({"home": "/proc/home"}, SetupError, "feature log /proc/home/log"),
        ({"listen": "taken"}, SetupError, "stop what uses it or choose another listen"),
        ({"model": "absent.toml"}, ConfigError, "absent.toml: no such file"),
    ],
    ids=["a task", "a home", "a port", "a model"],
)
def test_user_errors_are_reported_in_one_sentence(
    tmp_path: Path, changes: dict[str, object], error: type[Exception], text: str
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        if "listen" in changes:
            changes = {"listen": f"127.0.0.1:{other.getsockname()[1]}"}
        with pytest.raises(error, match=text):
            serve(load(ServingConfig, write_config(tmp_path, **changes), environ={}), threading.Event())
