"""`roostream serving` in its own process, without Kafka, Redis and shards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from benchmarks.common import samples as data
from benchmarks.common.open_load import rank_request
from benchmarks.serving_request import body_of
from roostream.runtime.store_identity import init_store

CORES = sorted(os.sched_getaffinity(0))
_NUM_BODIES = 64
_STOP_MS = 1000


class ServingProgram(NamedTuple):
    """A running program."""

    address: tuple[str, int]
    store: Path  # the checkpoint store that it follows
    pid: int

    def cpu_s(self) -> float:
        """CPU time so far, with that of child processes."""
        return sum(sum(process.cpu_times()[:2]) for process in self._processes())

    def suspend(self) -> None:
        for process in self._processes():
            process.suspend()

    def resume(self) -> None:
        for process in reversed(self._processes()):
            process.resume()

    def _processes(self) -> list[psutil.Process]:
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]


@contextlib.contextmanager
def serving_program(**settings: int | bool) -> Iterator[ServingProgram]:
    """A listening program. It gets the first core, and this process the last one."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serving.toml"
        files = {
            "schema": str(data.DEMO),
            "store": f"{folder}/store",
            "home": folder,
            "bootstrap": "127.0.0.1:1",
        }
        table = {"listen": "127.0.0.1:0", **files, "max_log_bytes": 4 << 30, "stop_ms": _STOP_MS, **settings}
        init_store(files["store"])
        config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()))
        command = [sys.executable, "-m", "roostream.cli.main", "serving", "--config", str(config)]
        os.sched_setaffinity(0, CORES[:1])
        try:
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
                os.sched_setaffinity(0, CORES[-1:])
                try:
                    yield ServingProgram(_address(child), Path(folder) / "store", child.pid)
                finally:
                    child.kill()
        finally:
            os.sched_setaffinity(0, CORES)


def bodies_of(candidates: int) -> list[bytes]:
    """JSON bodies of different users and request ids."""
    one = msgspec.json.decode(body_of(data.demo_schema(), candidates))
    bodies = ({**one, "request_id": f"r-{n}", "user_id": 17 + n} for n in range(_NUM_BODIES))
    return [msgspec.json.encode(body) for body in bodies]


def requests_of(candidates: int) -> list[bytes]:
    """The same as complete HTTP requests."""
    return [rank_request(body) for body in bodies_of(candidates)]


def _address(child: subprocess.Popen[str]) -> tuple[str, int]:
    assert child.stderr is not None
    lines: list[str] = []
    for line in child.stderr:
        lines.append(line)
        if match := re.search(r"serving on http://([^:]+):(\d+)", line):
            # Keep reading, so that the program can go on writing.
            threading.Thread(target=lines.extend, args=(child.stderr,), daemon=True).start()
            return match[1], int(match[2])
    raise RuntimeError("serving ended before it listened:\n" + "".join(lines))
