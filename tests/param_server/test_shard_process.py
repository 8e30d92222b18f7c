"""A real shard process behind its socket, led by this test as its controller: killed, restored, stopped."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from param_server.client import Client
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.program import AWAY_CODE, REFUSED_CODE
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import Header
from roostream.runtime.store_identity import init_store
from tests.param_server.shard_support import (
    ITEM,
    TOPIC,
    MemoryStore,
    gradients_of,
    link_manifest,
    lookup_of,
    small_schema,
)

SCHEMA = """
[tables.item]
dim = 4
[tables.user]
dim = 4
init_scale = 0.5
[tables.topic]
dim = 3
rule = "rowwise_adagrad"
[[label]]
name = "click"
action = "click"
"""
START = "import sys; from roostream.cli.main import main; sys.exit(main())"


class Lead:
    """The controller's side of `beat`: one command at a time, until its result is there."""

    def __init__(self) -> None:
        self.server = RpcServer(self.handle).start()
        self.outbox: list[dict[str, Any]] = []
        self.results: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.sessions: list[int] = []
        self.ids, self.frees, self.said_it_leaves = 0, True, False
        self.notice: dict[str, float] = {}
        self.changed = threading.Condition()

    def handle(
        self, method: str, header: Header, arrays: Sequence[np.ndarray]
    ) -> tuple[Header, Sequence[np.ndarray]]:
        with self.changed:
            self.said_it_leaves |= bool(header["report"].get("leaving"))
            if header["session"] not in self.sessions:
                self.sessions.append(header["session"])
            for result in header["results"]:
                known = [c for c in self.outbox if c["id"] == result["id"]]  # a result may be told twice
                if known:
                    self.outbox.remove(known[0])
                    self.results.put(result)
            self.changed.notify_all()
            self.changed.wait_for(lambda: bool(self.outbox), 0.2)
            return {"commands": list(self.outbox), "incarnation": 0, "free": self.frees, **self.notice}, ()

    def do(self, kind: str, incarnation: int, **fields: Any) -> dict[str, Any]:
        with self.changed:
            self.ids += 1
            self.outbox.append({"id": self.ids, "kind": kind, "incarnation": incarnation, **fields})
            self.changed.notify_all()
        result = self.results.get(timeout=60)
        assert result.pop("id") == self.ids
        return result

    def wait_for_process(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.sessions) >= number, 60)


class Shard:
    """Starts the process again and again on the same data."""

    def __init__(self, directory: Path, lead: Lead) -> None:
        self.directory, self.lead = directory, lead
        (directory / "schema.toml").write_text(SCHEMA)
        init_store(directory / "store")
        self.log = directory / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **settings: Any) -> None:
        values = {
            "controller": self.lead.server.address,
            "schema": str(self.directory / "schema.toml"),
            "store": str(self.directory / "store"),
            "home": str(self.directory / "shard-0"),
        } | settings
        config = self.directory / "shard.toml"
        config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, "shard", "--config", str(config)], stderr=log
            )

    def said(self, words: str) -> str:
        """The last line of the log with these words; waits for it."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            lines = [line for line in self.log.read_text().splitlines() if words in line]
            if lines:
                return lines[-1]
            assert self.process is not None and self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(f"the shard never said {words!r}: {self.log.read_text()}")

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(30)
        return code


def client_to(line: str, incarnation: int) -> tuple[Client, SocketTransport]:
    transport = SocketTransport(line.split("listens on ")[1].split(",")[0])
    client = Client(small_schema(), [transport], worker=0)
    client.set_incarnation(incarnation)
    return client, transport


def wait_for_probe(port: str, path: str, said: str) -> None:
    deadline = time.monotonic() + 60
    while (got := probe(port, path)) != said:
        assert time.monotonic() < deadline, got
        time.sleep(0.05)


def probe(port: str, path: str) -> str:
    """What `path` says, whatever its status."""
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10).read().decode().strip()
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode().strip()


def test_a_shard_is_not_ready_before_it_is_restored(shard: Shard, lead: Lead) -> None:
    shard.start()
    port = shard.said("listens on").rsplit(" ", 1)[1]
    wait_for_probe(port, "/readyz", "waiting for the controller to restore it")
    assert probe(port, "/livez") == "ok"
    lead.do("restore", 1, manifest="")
    wait_for_probe(port, "/readyz", "ok")


def test_a_killed_shard_restores_its_committed_rows(shard: Shard, lead: Lead, tmp_path: Path) -> None:
    shard.start()
    assert lead.do("restore", 1, manifest="") == {"ok": True, "rows": 0}
    line = shard.said("listens on")
    client, transport = client_to(line, 1)
    lookup = lookup_of({ITEM: range(200), TOPIC: range(20)})
    client.push(lookup, gradients_of(lookup, 1.0), step=0, time_ms=0)
    committed = {stack: rows.tobytes() for stack, rows in client.pull(lookup).items()}

    assert lead.do("freeze", 1, seq=1, watermark_ms=0)["rows"] == 220
    client.push(lookup, gradients_of(lookup, 2.0), step=1, time_ms=0)
    written = lead.do("write", 1, seq=1)
    memory = MemoryStore()
    name = link_manifest(memory, 1, 1, [written])
    FileStore(tmp_path / "store").create(name, memory.get(name))
    assert lead.do("commit", 1, seq=1) == {"ok": True}

    port = line.rsplit(" ", 1)[1]
    wait_for_probe(port, "/readyz", "ok")
    wait_for_probe(port, "/livez", "ok")
    exported = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    for wanted in (
        'roostream_shard_rows{stack="d4-adagrad"} 200.0',
        "roostream_shard_committed_seq 1.0",
        "roostream_shard_incarnation 1.0",
        "roostream_shard_pushes_total 2.0",
        'roostream_shard_call_seconds_count{stage="push"}',
    ):
        assert wanted in exported
    transport.close()

    shard.end(signal.SIGKILL)
    shard.log.write_text("")
    shard.start()
    lead.wait_for_process(2)
    assert lead.do("restore", 2, manifest=name) == {"ok": True, "rows": 220}
    client, transport = client_to(shard.said("listens on"), 2)
    assert {stack: rows.tobytes() for stack, rows in client.pull(lookup).items()} == committed

    refused = lead.do("restore", 3, manifest="manifests/00000009")
    assert refused["ok"] is False and refused["damaged"] is True and "absent" in refused["error"]
    transport.close()
    assert shard.end(signal.SIGTERM) == 0
    assert "Traceback" not in shard.log.read_text() and "shard stopped" in shard.log.read_text()


@pytest.mark.parametrize("asked", ["signal", "notice"])
def test_a_stopping_shard_takes_part_in_the_last_commit(shard: Shard, lead: Lead, asked: str) -> None:
    lead.frees = False
    shard.start()
    lead.do("restore", 1, manifest="")
    assert shard.process is not None
    if asked == "signal":
        shard.process.send_signal(signal.SIGTERM)
    else:
        lead.notice = {"leave_s": 60.0}
    with lead.changed:
        assert lead.changed.wait_for(lambda: lead.said_it_leaves, 30)
    assert lead.do("freeze", 1, seq=1, watermark_ms=0)["ok"] is True
    assert shard.process.poll() is None
    lead.frees = True
    assert shard.process.wait(30) == 0 and "shard stopped" in shard.log.read_text()


@pytest.mark.parametrize(
    ("settings", "message", "code"),
    [
        ({"schema": "absent.toml"}, "absent.toml: no such file", REFUSED_CODE),
        ({"index": 3}, "key 'index': expected 0..0 (num_shards - 1), got 3", REFUSED_CODE),
        ({"lisen": "127.0.0.1:0"}, "did you mean 'listen'?", REFUSED_CODE),
        ({"listen": "taken"}, "choose another port, or 0 for any", AWAY_CODE),  # by another, who may leave
    ],
)
def test_a_wrong_setting_ends_in_one_sentence(
    shard: Shard, lead: Lead, tmp_path: Path, settings: dict[str, Any], message: str, code: int
) -> None:
    if settings.get("listen") == "taken":
        settings = {"listen": lead.server.address}
    shard.start(**settings)
    assert shard.process is not None and shard.process.wait(60) == code
    text = shard.log.read_text()
    assert message in text and "Traceback" not in text


def test_a_shard_that_still_compiles_its_kernels_is_alive_and_not_ready(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "shard.toml").write_text(
        f'schema = "{tmp_path}/schema.toml"\nstore = "{tmp_path}/store"\nhome = "{tmp_path}/home"\n'
        f'controller = "127.0.0.1:1"\nmetrics_port = {port}\n'
    )
    slow = f"import time, param_server.main as m; m.precompile = lambda: time.sleep(600); {START}"
    with subprocess.Popen(
        [sys.executable, "-c", slow, "shard", "--config", str(tmp_path / "shard.toml")]
    ) as process:
        try:
            deadline_s = time.monotonic() + 60
            while status_of(port, "livez") == 0 and time.monotonic() < deadline_s:
                time.sleep(0.1)
            assert (status_of(port, "livez"), status_of(port, "readyz")) == (200, 503)
        finally:
            process.kill()


def status_of(port: int, path: str) -> int:
    """0 = nothing answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
