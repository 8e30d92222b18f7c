"""A stack as `roostream up` starts it, users who ask all the time, and the blocks of a page run beside both.

What a block cost: the longest time in which the worker trained nothing, beside that of a while without a
block; and requests that nobody answered. A machine that is busy answers 408, 429 or 504: those are answers.
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
from tests.contract.house import ROOT

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
_USERS = 1000  # none of those who are simulated; many, since the joiner bounds what a single one has open
_ANSWERS = frozenset({200, 408, 429, 504})
_COUNTED = re.compile(r"^roostream_worker_requests_total (\S+)$", re.MULTILINE)


def blocks() -> dict[str, str]:
    """Heading → its shell block, of the sections for one machine."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = {s.partition("\n")[0]: "\n".join(re.findall(r"```sh\n(.*?)```", s, re.DOTALL)) for s in sections}
    return {heading: block for heading, block in found.items() if heading != "In a cluster"}


class Watch:
    """Looks at what the worker has trained, ten times a second."""

    def __init__(self, home: Home) -> None:
        self.home, self.moved_s = home, [time.monotonic()]
        self._end, self._last = threading.Event(), ""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()

    def longest_s(self, since_s: float) -> float:
        """Between two looks at which more was trained, `since_s` (monotonic) and now among them."""
        times = [since_s, *(t for t in self.moved_s if t > since_s), time.monotonic()]
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
            ):  # it, or the stack, is being started
                continue
            if found and found != self._last:
                self._last = found
                self.moved_s.append(time.monotonic())

    def _trained(self) -> str:
        url = (self.home.read_stack() or {})["programs"]["worker"]["metrics"]
        with urllib.request.urlopen(url, timeout=2) as answer:
            counted = _COUNTED.search(answer.read().decode())
        return counted[1] if counted else ""


class Asker:
    """Asks serving ten times a second, each time over a new connection, once more where that was reset: Linux
    may do that to a connection which is being opened while a process that shares the port ends
    (docs/operations/upgrade.md)."""

    def __init__(self, home: Home) -> None:
        self.home, self.num_asked, self.failed = home, 0, list[str]()
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
            said = self._asked(address)
            if said and (said := self._asked(address)):
                self.failed.append(said)
            self.num_asked += 1

    def _asked(self, address: str) -> str:
        """What was wrong with the answer; "" = nothing."""
        connection = http.client.HTTPConnection(address, timeout=60)
        try:
            user = _FIRST_USER + self.num_asked % _USERS
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
    """`folder` is where the page's commands are run; the stack's home is `.roostream` in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, Home(folder / ".roostream")
        self._ports = Ports()
        drawn = {"9911": str(self._ports.draw()), "9912": str(self._ports.draw()), "991$n": "${PORT[$n]}"}
        self._instead = drawn
        (folder / "schema.toml").write_bytes(DEMO_SCHEMA.read_bytes())
        self.figures: dict[str, dict[str, float]] = {}
        self._users: subprocess.Popen[bytes] | None = None
        self.watch: Watch | None = None
        self.asker: Asker | None = None

    def run(self, heading: str, timeout_s: float = 300) -> str:
        """A block of the page, as a shell of a person runs it; what it said."""
        words = blocks()
        ports = f"PORT=(0 {self._instead['9911']} {self._instead['9912']})"
        quick = " ".join(f"--set {key}" for key in QUICK)
        program = f"{sys.executable} -m roostream.cli.main"
        ours = f'roostream() {{ if [ "$1" = up ]; then {program} "$@" {quick}; else {program} "$@"; fi; }}'
        text = words[heading].replace("991$n", self._instead["991$n"])
        done = subprocess.run(
            ("bash", "-euo", "pipefail", "-c", "\n".join((ports, ours, words["Shell functions"], text))),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{heading}: {done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        return done.stdout + done.stderr

    def drill(self, heading: str, *, trains: int = 40, timeout_s: float = 300) -> list[str]:
        """A block, then so many samples more than before in a commit; its figures are kept. What was asked
        without an answer."""
        assert self.watch and self.asker
        before, began_s = self.applied(), time.monotonic()
        asked, failed = self.asker.num_asked, len(self.asker.failed)
        self.run(heading, timeout_s)
        took_s = time.monotonic() - began_s
        self.until(f"{trains} more samples after {heading!r}", lambda: self.applied() >= before + trains)
        self.figures[heading] = {
            "took_s": round(took_s, 1),
            "pause_s": round(self.watch.longest_s(began_s), 1),
            "asked": self.asker.num_asked - asked,
            "failed": len(self.asker.failed) - failed,
        }
        return self.asker.failed[failed:]

    def start_watching(self) -> None:
        """From here on somebody asks, and it is seen when something is trained."""
        self.watch, self.asker = Watch(self.home), Asker(self.home)

    def stop_watching(self) -> None:
        if self.watch and self.asker:
            self.asker.stop()
            self.watch.stop()
            self.watch = self.asker = None

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
        """Samples that the newest commit contains."""
        manifest = self.newest()
        return sum(part.metrics["requests"] for part in manifest.workers.values()) if manifest else 0

    def audit(self) -> dict[str, Any]:
        """The sums of `roostream audit`."""
        command = (
            sys.executable,
            "-m",
            "roostream.cli.main",
            "audit",
            "--home",
            str(self.home.root),
            "--json",
        )
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return dict(json.loads(done.stdout)) if done.stdout.startswith("{") else {"state": done.stderr}

    def until(self, what: str, reached: Callable[[], Any], timeout_s: float = 180) -> None:
        end_s = time.monotonic() + timeout_s
        while not reached():
            assert time.monotonic() < end_s, f"not within {timeout_s:.0f} s: {what}"
            time.sleep(0.25)

    def close(self) -> None:
        """Whatever still runs ends; a stack that is down stays so."""
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
        ):  # whatever a block started in the background, also one that was cut off
            if process.info["cwd"] == str(self.folder):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
        self._ports.release()
