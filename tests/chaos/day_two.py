"""Runs the commands of docs/operations/day-two.md on a real stack while users send requests.

The figures of a block are the longest time without training, to be compared with a time in which no block
runs, and the number of unanswered requests. A busy machine may answer 408, 429 or 504; those count as
answers.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from infra.home import Home
from infra.options import DEMO_SCHEMA
from infra.ports import Ports
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import FileStore
from tests.contract.source_tree import ROOT

PAGE = ROOT / "docs/operations/day-two.md"
QUICK = (
    *(
        "joiner.window=4s",
        "joiner.lateness=1s",
        "joiner.checkpoint_interval=2s",
        "shard.publish_interval=300ms",
    ),
    *("controller.commit_interval=2s", "auditor.settle=10s"),
)
RATE = 5.0
_EVERY_S = 0.1
_CANDIDATES = [{"item_id": 1}, {"item_id": 2}]
_FIRST_USER = 10**9
# none of the simulated users; many of them, because the joiner bounds the open requests of a single user
_USERS = 1000
_ANSWERS = frozenset({200, 408, 429, 504})
_COUNTED = re.compile(r"^roostream_worker_requests_total (\S+)$", re.MULTILINE)


def blocks() -> dict[str, str]:
    """Heading → shell block, for the sections about one machine."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = {s.partition("\n")[0]: "\n".join(re.findall(r"```sh\n(.*?)```", s, re.DOTALL)) for s in sections}
    return {heading: block for heading, block in found.items() if heading != "In a cluster"}


class TrainingWatch:
    """Polls ten times a second how many requests the worker has trained."""

    def __init__(self, home: Home) -> None:
        self.home, self.progress_s = home, [time.monotonic()]
        self._end, self._last = threading.Event(), ""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()

    def longest_s(self, since_s: float) -> float:
        """The longest time without training from `since_s` (monotonic) to now."""
        times = [since_s, *(t for t in self.progress_s if t > since_s), time.monotonic()]
        return max(b - a for a, b in itertools.pairwise(times))

    def _run(self) -> None:
        while not self._end.wait(_EVERY_S):
            try:
                found = self._trained()
            except (
                OSError,
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
            ):  # the worker or the stack is starting
                continue
            if found and found != self._last:
                self._last = found
                self.progress_s.append(time.monotonic())

    def _trained(self) -> str:
        url = (self.home.read_stack() or {})["programs"]["worker"]["metrics"]
        with urllib.request.urlopen(url, timeout=2) as answer:
            counted = _COUNTED.search(answer.read().decode())
        return counted[1] if counted else ""


class RequestSender:
    """Sends requests to serving ten times a second, each over a new connection. A reset connection is tried
    once more: Linux may reset a connection that is being opened while a process that shares the port ends
    (docs/operations/upgrade.md)."""

    def __init__(self, home: Home) -> None:
        self.home, self.num_sent, self.failed = home, 0, list[str]()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(_EVERY_S):
            stack = self.home.read_stack()
            if stack is None:
                continue
            address = str(stack["serving"]).removeprefix("http://")
            problem = self._send_request(address)
            if problem and (problem := self._send_request(address)):
                self.failed.append(problem)
            self.num_sent += 1

    def _send_request(self, address: str) -> str:
        """Send one request. Returns what was wrong with the answer, or ""."""
        connection = http.client.HTTPConnection(address, timeout=60)
        try:
            user = _FIRST_USER + self.num_sent % _USERS
            body = json.dumps({"user_id": user, "session_id": 1, "candidates": _CANDIDATES})
            connection.request("POST", "/v1/rank", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
            return "" if answer.status in _ANSWERS else f"{answer.status} {text[:200]}"
        except (OSError, http.client.HTTPException) as error:
            return repr(error)
        finally:
            connection.close()


class DayTwo:
    """A stack operated with the commands of the page. Commands run in `folder`; the stack's home is
    `.roostream` in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, Home(folder / ".roostream")
        self._ports = Ports()
        drawn = {"9911": str(self._ports.draw()), "9912": str(self._ports.draw()), "991$n": "${PORT[$n]}"}
        self._port_replacements = drawn
        (folder / "schema.toml").write_bytes(DEMO_SCHEMA.read_bytes())
        self.figures: dict[str, dict[str, float]] = {}
        self._users: subprocess.Popen[bytes] | None = None
        self.watch: TrainingWatch | None = None
        self.sender: RequestSender | None = None

    def run(self, heading: str, timeout_s: float = 300) -> str:
        """Run a block of the page in a shell and return its output."""
        shell_blocks = blocks()
        ports = f"PORT=(0 {self._port_replacements['9911']} {self._port_replacements['9912']})"
        quick = " ".join(f"--set {key}" for key in QUICK)
        program = f"{sys.executable} -m roostream.cli.main"
        wrapper = f'roostream() {{ if [ "$1" = up ]; then {program} "$@" {quick}; else {program} "$@"; fi; }}'
        text = shell_blocks[heading].replace("991$n", self._port_replacements["991$n"])
        completed = subprocess.run(
            (
                "bash",
                "-euo",
                "pipefail",
                "-c",
                "\n".join((ports, wrapper, shell_blocks["Shell functions"], text)),
            ),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert completed.returncode == 0, f"{heading}: {completed.stdout[-1500:]}\n{completed.stderr[-1500:]}"
        return completed.stdout + completed.stderr

    def drill(self, heading: str, *, trains: int = 40, timeout_s: float = 300) -> list[str]:
        """Run a block and wait until a commit has `trains` more samples. Stores the block's figures and
        returns the unanswered requests."""
        assert self.watch and self.sender
        before, began_s = self.applied(), time.monotonic()
        num_sent_before, num_failed_before = self.sender.num_sent, len(self.sender.failed)
        self.run(heading, timeout_s)
        took_s = time.monotonic() - began_s
        self.until(f"{trains} more samples after {heading!r}", lambda: self.applied() >= before + trains)
        self.figures[heading] = {
            "took_s": round(took_s, 1),
            "pause_s": round(self.watch.longest_s(began_s), 1),
            "asked": self.sender.num_sent - num_sent_before,
            "failed": len(self.sender.failed) - num_failed_before,
        }
        return self.sender.failed[num_failed_before:]

    def start_watching(self) -> None:
        """Start to send requests and to observe training."""
        self.watch, self.sender = TrainingWatch(self.home), RequestSender(self.home)

    def stop_watching(self) -> None:
        if self.watch and self.sender:
            self.sender.stop()
            self.watch.stop()
            self.watch = self.sender = None

    def start_users(self) -> None:
        command = (
            sys.executable,
            "-m",
            "roostream.cli.main",
            "simulate",
            "--home",
            str(self.home.root),
            "--rate",
            str(RATE),
        )
        with (self.folder / "users.log").open("ab") as log:
            self._users = subprocess.Popen(
                command, cwd=self.folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
            )

    def stop_users(self) -> None:
        if self._users is not None:
            self._users.terminate()
            self._users.wait(60)
            self._users = None

    def newest(self) -> manifests.Manifest | None:
        found = manifests.newest(FileStore(self.home.store))
        return found.manifest if found else None

    def applied(self) -> int:
        """The number of samples in the newest commit."""
        manifest = self.newest()
        return sum(part.metrics["requests"] for part in manifest.workers.values()) if manifest else 0

    def audit(self) -> dict[str, Any]:
        """The output of `roostream audit --json`."""
        command = (
            sys.executable,
            "-m",
            "roostream.cli.main",
            "audit",
            "--home",
            str(self.home.root),
            "--json",
        )
        completed = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return (
            dict(json.loads(completed.stdout))
            if completed.stdout.startswith("{")
            else {"state": completed.stderr}
        )

    def until(self, event: str, condition: Callable[[], Any], timeout_s: float = 180) -> None:
        end_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end_s, f"not within {timeout_s:.0f} s: {event}"
            time.sleep(0.25)

    def close(self) -> None:
        """Stop everything that still runs. A stack that is down stays down."""
        self.stop_users()
        self.stop_watching()
        command = (sys.executable, "-m", "roostream.cli.main", "down", "--home", str(self.home.root))
        subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
            capture_output=True,
            timeout=180,
        )
        for process in psutil.process_iter(
            ["cwd"]
        ):  # also what a block left in the background when it was cut off
            if process.info["cwd"] == str(self.folder):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
        self._ports.release()
