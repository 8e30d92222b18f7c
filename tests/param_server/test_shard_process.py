"""A real shard process over sockets, with this test as its controller: killed, restored, stopped."""

from __future__ import annotations

import json
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from param_server.client import Client
from param_server.config import ShardConfig
from roostream.errors import ConfigError
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.program import AWAY_CODE
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import Header
from roostream.runtime.store_identity import init_store, open_checkpoint_store
from tests.param_server.shard_support import (
    ITEM,
    TOPIC,
    gradients_of,
    link_manifest,
    lookup_of,
    small_schema,
)
from tests.runtime import s3_server
from tests.trainer.memory_store import MemoryStore

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


class FakeController:
    """The controller's side of heartbeats. It sends one command at a time and waits for the result."""

    def __init__(self) -> None:
        self.server = RpcServer(self.handle).start()
        self.outbox: list[dict[str, Any]] = []
        self.results: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.sessions: list[int] = []
        self.last_id, self.may_leave, self.reported_leaving = 0, True, False
        self.notice: dict[str, float] = {}
        self.changed = threading.Condition()

    def handle(
        self, method: str, header: Header, arrays: Sequence[np.ndarray]
    ) -> tuple[Header, Sequence[np.ndarray]]:
        with self.changed:
            self.reported_leaving |= bool(header["report"].get("leaving"))
            if header["session"] not in self.sessions:
                self.sessions.append(header["session"])
            for result in header["results"]:
                known = [c for c in self.outbox if c["id"] == result["id"]]  # a result may be reported twice
                if known:
                    self.outbox.remove(known[0])
                    self.results.put(result)
            self.changed.notify_all()
            self.changed.wait_for(lambda: bool(self.outbox), 0.2)
            return {
                "commands": list(self.outbox),
                "incarnation": 0,
                "free": self.may_leave,
                **self.notice,
            }, ()

    def execute(self, kind: str, incarnation: int, **fields: Any) -> dict[str, Any]:
        with self.changed:
            self.last_id += 1
            self.outbox.append({"id": self.last_id, "kind": kind, "incarnation": incarnation, **fields})
            self.changed.notify_all()
        result = self.results.get(timeout=60)
        assert result.pop("id") == self.last_id
        return result

    def wait_for_process(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.sessions) >= number, 60)


class ShardProcess:
    """Starts the shard's process, any number of times on the same data."""

    def __init__(self, directory: Path, controller: FakeController) -> None:
        self.directory, self.controller = directory, controller
        (directory / "schema.toml").write_text(SCHEMA)
        init_store(directory / "store")
        self.log = directory / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, code: str = START, **settings: Any) -> None:
        values = {
            "controller": self.controller.server.address,
            "schema": str(self.directory / "schema.toml"),
            "store": str(self.directory / "store"),
            "home": str(self.directory / "shard-0"),
        } | settings
        config = self.directory / "shard.toml"
        config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "shard", "--config", str(config)], stderr=log
            )

    def wait_for_line(self, words: str) -> str:
        """Wait for a log line with these words and return the last one."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            lines = [line for line in self.log.read_text().splitlines() if words in line]
            if lines:
                return lines[-1]
            assert self.process is not None and self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(f"the shard never logged {words!r}: {self.log.read_text()}")

    def stop_with(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(30)
        return code


@pytest.fixture
def controller() -> Iterator[FakeController]:
    controller = FakeController()
    yield controller
    controller.server.stop(0.1)


@pytest.fixture
def shard(tmp_path: Path, controller: FakeController) -> Iterator[ShardProcess]:
    shard = ShardProcess(tmp_path, controller)
    yield shard
    if shard.process and shard.process.poll() is None:
        shard.process.kill()
        shard.process.wait(10)


def client_to(line: str, incarnation: int) -> tuple[Client, SocketTransport]:
    transport = SocketTransport(line.split("listens on ")[1].split(",")[0])
    client = Client(small_schema(), [transport], worker=0)
    client.set_incarnation(incarnation)
    return client, transport


def wait_for_probe(port: str, path: str, expected: str) -> None:
    deadline = time.monotonic() + 60
    while (answer := probe(port, path)) != expected:
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)


def probe(port: str, path: str) -> str:
    """The body of the answer to a GET of `path`, whatever its status; "" if nothing answers."""
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10).read().decode().strip()
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode().strip()
    except OSError:
        return ""


def test_a_killed_shard_restores_its_committed_rows(
    shard: ShardProcess, controller: FakeController, tmp_path: Path
) -> None:
    shard.start()
    line = shard.wait_for_line("listens on")
    port = line.rsplit(" ", 1)[1]
    wait_for_probe(port, "/readyz", "waiting for the controller to restore it")
    assert probe(port, "/livez") == "ok"
    assert controller.execute("restore", 1, manifest="") == {"ok": True, "rows": 0}
    client, transport = client_to(line, 1)
    lookup = lookup_of({ITEM: range(200), TOPIC: range(20)})
    client.push(lookup, gradients_of(lookup, 1.0), step=0, time_ms=0)
    committed = {stack: rows.tobytes() for stack, rows in client.pull(lookup).items()}

    assert controller.execute("freeze", 1, seq=1, watermark_ms=0)["rows"] == 220
    client.push(lookup, gradients_of(lookup, 2.0), step=1, time_ms=0)
    written = controller.execute("write", 1, seq=1)
    memory = MemoryStore()
    name = link_manifest(memory, 1, 1, [written])
    FileStore(tmp_path / "store").create(name, memory.get(name))
    assert controller.execute("commit", 1, seq=1) == {"ok": True}
    assert not FileStore(tmp_path / "store").list("segments"), "a store in a folder must get no copies"

    wait_for_probe(port, "/readyz", "ok")
    wait_for_probe(port, "/livez", "ok")
    exported = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    for sample_line in (
        'roostream_shard_rows{stack="d4-adagrad"} 200.0',
        "roostream_shard_committed_seq 1.0",
        "roostream_shard_incarnation 1.0",
        "roostream_shard_pushes_total 2.0",
        'roostream_shard_call_seconds_count{stage="push"}',
    ):
        assert sample_line in exported
    transport.close()

    shard.stop_with(signal.SIGKILL)
    shard.log.write_text("")
    shard.start()
    controller.wait_for_process(2)
    assert controller.execute("restore", 2, manifest=name) == {"ok": True, "rows": 220}
    client, transport = client_to(shard.wait_for_line("listens on"), 2)
    assert {stack: rows.tobytes() for stack, rows in client.pull(lookup).items()} == committed

    refused = controller.execute("restore", 3, manifest="manifests/00000009")
    assert refused["ok"] is False and refused["away"] is True and "manifests/00000009" in refused["error"]
    transport.close()
    assert shard.stop_with(signal.SIGTERM) == 0
    assert "Traceback" not in shard.log.read_text() and "shard 0 stopped" in shard.log.read_text()


def test_a_port_in_use_ends_in_one_sentence(shard: ShardProcess, controller: FakeController) -> None:
    shard.start(listen=controller.server.address)
    assert shard.process is not None and shard.process.wait(60) == AWAY_CODE, (
        "the port may become free, so the program may be started again"
    )
    text = shard.log.read_text()
    assert "choose another port, or 0 for any" in text and "Traceback" not in text


def test_an_index_beyond_the_number_of_shards_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"key 'index': expected 0\.\.0 \(num_shards - 1\), got 3"):
        ShardConfig(controller="c:1", schema="s", store="s", home="h", index=3)


@pytest.mark.parametrize(
    ("store", "setting", "copies"),
    [
        ("store", "auto", False),
        ("s3://b/x", "auto", True),
        ("store", "always", True),
        ("s3://b/x", "never", False),
    ],
)
def test_segments_are_copied_to_an_object_store_unless_the_settings_say_otherwise(
    store: str, setting: Any, copies: bool
) -> None:
    config = ShardConfig(controller="c:1", schema="s", store=store, home="h", upload_segments=setting)
    assert config.uploads is copies


def test_a_shard_that_still_compiles_its_kernels_is_alive_and_not_ready(shard: ShardProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe_socket:
        port = probe_socket.getsockname()[1]
    slow = f"import time, param_server.main as m; m.precompile = lambda: time.sleep(600); {START}"
    shard.start(slow, metrics_port=port)
    wait_for_probe(str(port), "/livez", "ok")
    assert probe(str(port), "/readyz") not in ("", "ok")


# A real shard process whose checkpoint store is a bucket, so that its disk is only a cache


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server.running() as url:
        yield url


@pytest.mark.usefixtures("s3")
def test_a_shard_whose_home_was_deleted_is_restored_bit_equal_and_leaves_after_the_last_commit(
    shard: ShardProcess, controller: FakeController, tmp_path: Path
) -> None:
    url = f"s3://{s3_server.BUCKET}/deleted-home"
    store_id = init_store(url)
    store = open_checkpoint_store(url)
    shard.start(store=url)
    controller.execute("restore", 1, manifest="", store=store_id)
    client, transport = client_to(shard.wait_for_line("listens on"), 1)
    lookup = lookup_of({ITEM: range(200), TOPIC: range(20)})
    for seq in (1, 2, 3):
        client.push(lookup, gradients_of(lookup, float(seq)), step=seq, time_ms=0)
        controller.execute("freeze", 1, seq=seq, watermark_ms=0)
        written = controller.execute("write", 1, seq=seq)
        memory = MemoryStore()
        name = link_manifest(memory, seq, 1, [written])
        assert store.create(name, memory.get(name))
        assert controller.execute("commit", 1, seq=seq) == {"ok": True}
    committed = {stack: rows.tobytes() for stack, rows in client.pull(lookup).items()}
    assert store.list("segments") == [f"segments/0-{seq}-1" for seq in (1, 2, 3)]
    transport.close()

    shard.stop_with(signal.SIGKILL)
    shutil.rmtree(tmp_path / "shard-0")
    shard.log.write_text("")
    shard.start(store=url)
    controller.wait_for_process(2)
    assert controller.execute("restore", 2, manifest=name, store=store_id) == {"ok": True, "rows": 220}
    client, transport = client_to(shard.wait_for_line("listens on"), 2)
    assert {stack: rows.tobytes() for stack, rows in client.pull(lookup).items()} == committed
    assert "fetched 3 segments from the checkpoint store: 660 rows" in shard.wait_for_line("fetched")
    transport.close()

    # asked to leave, the shard still takes part in the last commit
    controller.may_leave, controller.notice = False, {"leave_s": 60.0}
    with controller.changed:
        assert controller.changed.wait_for(lambda: controller.reported_leaving, 30)
    assert controller.execute("freeze", 2, seq=4, watermark_ms=0)["ok"] is True
    assert shard.process is not None and shard.process.poll() is None
    controller.may_leave = True
    assert shard.process.wait(30) == 0
    assert "Traceback" not in shard.log.read_text() and "shard 0 stopped" in shard.log.read_text()
