"""A stack as `roostream up` starts it, users who ask all the time, and the blocks of a page run beside both.

What a block cost: the longest time in which the worker trained nothing, beside that of a while without a block; requests that
users had to ask again, and those that nobody answered.
"""

from __future__ import annotations

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

from infra.home import Home
from infra.options import DEMO_SCHEMA
from infra.ports import Ports
from runtime import manifest as manifests
from runtime.checkpoint_store import FileStore
from tests.contract.house import ROOT

PAGE = ROOT / "docs/operations/one-machine.md"
QUICK = (
    *("joiner.window=4s", "joiner.lateness=1s", "joiner.checkpoint_interval=2s", "shard.publish_interval=300ms"),
    *("controller.commit_interval=2s", "auditor.settle=10s"),
)
RATE = 15.0
_EVERY_S = 0.1
_COUNTED = re.compile(r"^roostream_worker_requests(?:_total)? (\S+)$", re.MULTILINE)


def blocks() -> dict[str, str]:
    """Heading → what stands in its shell block."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {s.partition("\n")[0]: "\n".join(re.findall(r"```sh\n(.*?)```", s, re.DOTALL)) for s in sections}


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
            except (OSError, ValueError, KeyError, TypeError, AttributeError):  # it, or the stack, is being started
                continue
            if found and found != self._last:
                self._last = found
                self.moved_s.append(time.monotonic())

    def _trained(self) -> str:
        url = (self.home.read_stack() or {})["programs"]["worker"]["metrics"]
        with urllib.request.urlopen(url, timeout=2) as answer:
            counted = _COUNTED.search(answer.read().decode())
        return counted[1] if counted else ""


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
        self._asked: dict[str, int] = {}  # how calls had gone when the last block had been run
        self.watch = Watch(self.home)

    def run(self, heading: str, timeout_s: float = 300) -> str:
        """A block of the page, as a shell of a person runs it; what it said."""
        words = blocks()
        ports = f"PORT=(0 {self._instead['9911']} {self._instead['9912']})"
        quick = " ".join(f"--set {key}" for key in QUICK)
        ours = f'roostream() {{ if [ "$1" = up ]; then {sys.executable} -m command.main "$@" {quick}; else '
        ours += f'{sys.executable} -m command.main "$@"; fi; }}'
        text = words[heading].replace("991$n", self._instead["991$n"])
        done = subprocess.run(
            ("bash", "-euo", "pipefail", "-c", "\n".join((ports, ours, words["Words"], text))),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{heading}: {done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        return done.stdout + done.stderr

    def drill(self, heading: str, *, trains: int = 40, timeout_s: float = 300) -> str:
        """A block, then so many samples more than before in a commit; its figures are kept."""
        before, began_s, asked = self.applied(), time.monotonic(), self._asked
        said = self.run(heading, timeout_s)
        took_s = time.monotonic() - began_s
        self.until(f"{trains} more samples after {heading!r}", lambda: self.applied() >= before + trains)
        self._asked = now = self.asked()
        self.figures[heading] = {
            "took_s": round(took_s, 1),
            "pause_s": round(self.watch.longest_s(began_s), 1),
            "asked_again": now.get("retried", 0) - asked.get("retried", 0),
            "failed": now.get("gave_up", 0) + now.get("refused", 0) - asked.get("gave_up", 0) - asked.get("refused", 0),
        }
        return said

    def start_users(self) -> None:
        command = (sys.executable, "-m", "command.main", "simulate", "--home", str(self.home.root), "--rate", str(RATE))
        with (self.folder / "users.log").open("ab") as log:
            self._users = subprocess.Popen(
                (*command, "--report", str(self.folder / "users.json")),
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
            )

    def stop_users(self) -> None:
        if self._users is not None:
            self._users.terminate()
            self._users.wait(60)
            self._users = None

    def asked(self) -> dict[str, int]:
        """How users' calls went until the last report, which is written every ten seconds."""
        report = self.folder / "users.json"
        time.sleep(11 if report.exists() else 0)
        return dict(json.loads(report.read_text(encoding="utf-8"))["counts"]["http"]) if report.exists() else {}

    def newest(self) -> manifests.Manifest | None:
        found = manifests.newest(FileStore(self.home.store))
        return found.manifest if found else None

    def applied(self) -> int:
        """Samples that the newest commit contains."""
        manifest = self.newest()
        return sum(part.metrics["requests"] for part in manifest.workers.values()) if manifest else 0

    def audit(self) -> dict[str, Any]:
        """The sums of `roostream audit`."""
        command = (sys.executable, "-m", "command.main", "audit", "--home", str(self.home.root), "--json")
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False
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
        self.watch.stop()
        for file in self.home.root.glob("more-*.pid"):
            subprocess.run(("kill", "-TERM", file.read_text(encoding="utf-8").strip()), check=False, capture_output=True)
        command = (sys.executable, "-m", "command.main", "down", "--home", str(self.home.root))
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, capture_output=True, timeout=180)
        self._ports.release()
