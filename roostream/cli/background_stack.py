"""Run a local stack in the foreground or in the background, stop it, and delete its home."""

from __future__ import annotations

import logging
import logging.handlers
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.child_logs import last_lines
from infra.home import Home
from infra.options import StackOptions
from infra.shutdown import MAX_SHUTDOWN_S
from infra.stack import Stack
from roostream.cli.output import progress_bar
from roostream.cli.program_health import reason, unhealthy_programs
from roostream.errors import SetupError, printable
from roostream.runtime.program import MaskingFormatter

Programs = Mapping[str, Mapping[str, Any]]
"""The table `programs` of stack.json: name → state, pid, log and so on."""


def run_foreground(home: Path, options: StackOptions) -> int:
    """Run a stack without simulated users until a signal arrives."""
    stop = stop_on_signals()
    stack = Stack(home, options)
    log_to(stack.home)
    with stack:
        stack.start(["all"])
        stop.wait()
        print(stack.stop(), flush=True)
    return 0


def start(home: Path, arguments: Sequence[str], wait_s: float) -> int:
    """Run `roostream up --foreground` in the background and wait until all programs are ready.

    Returns 1 if no further program became ready for `wait_s`; a busy machine may need a while for each.

    Raises:
        SetupError: a program failed, or the stack ended.
    """
    place = Home(home)
    place.make()
    if place.is_locked():
        place.lock()  # raises, and names the process that holds the lock
    output = place.log("up")
    with output.open("wb") as log:
        process = subprocess.Popen(
            (sys.executable, "-m", "roostream.cli.main", *arguments, "--foreground"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    ready_wait = ReadyWait(wait_s)
    printed: set[str] = set()
    while True:
        if process.poll() is not None:
            lines = last_lines(output, 1) or [f"exit code {process.returncode}"]
            raise SetupError(printable(lines[-1].removeprefix("error: ")))
        stack = place.read_stack()
        programs = stack["programs"] if stack and stack["supervisor_pid"] == process.pid else {}
        for name, entry in programs.items():
            if entry["state"] == "failed":
                raise SetupError(
                    printable(
                        f"{name} cannot run: {reason(entry)}; its log: {entry['log']}; "
                        f"`roostream down --home {place.root}` stops the other programs"
                    )
                )
        settled = settled_programs(programs)
        for line in (*settled.values(), *restarting_programs(programs)):
            if line not in printed:
                printed.add(line)
                print(printable(line), flush=True)
        if programs and len(settled) == len(programs):
            print("\n".join(describe_endpoints(stack or {})))
            return 0
        if ready_wait.is_over(len(settled)):
            break
        time.sleep(0.25)
    waiting = "; ".join(f"{name}: {text}" for name, text in unhealthy_programs(programs).items())
    print(
        printable(
            f"not all programs are ready, and none became ready for {wait_s:.0f} s: "
            f"{waiting or 'no program was started'}; see `roostream status --home {place.root}`"
        ),
        file=sys.stderr,
    )
    return 1


class ReadyWait:
    """A wait that is over when the number of settled programs has not grown for `wait_s`."""

    def __init__(self, wait_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self.wait_s, self._now_s, self._max_settled, self._since_s = wait_s, now_s, 0, now_s()

    def is_over(self, num_settled: int) -> bool:
        if num_settled > self._max_settled:
            self._max_settled, self._since_s = num_settled, self._now_s()
        return self._now_s() >= self._since_s + self.wait_s


def restarting_programs(programs: Programs) -> list[str]:
    """One line for each program that died and is being restarted."""
    return [
        f"{name} died and is restarted: {entry['said']}; its log: {entry['log']}"
        for name, entry in programs.items()
        if entry.get("said") and entry["state"] in ("waiting", "starting")
    ]


def settled_programs(programs: Programs) -> dict[str, str]:
    """One line for each program that is ready, or stopped because training is held."""
    lines = {"ready": "is ready", "held": "is stopped, because training is held; see `roostream status`"}
    return {
        name: f"{name} {lines[entry['state']]}" for name, entry in programs.items() if entry["state"] in lines
    }


def absolute_location(text: str) -> str:
    """A path made absolute, because programs run in another working directory; a URL unchanged."""
    return text if "://" in text else str(Path(text).expanduser().absolute())


def stop(home: Path) -> int:
    """Ask the supervisor of `home` to stop, and wait until it has.

    Raises:
        SetupError: no stack runs there, or it did not stop in time.
    """
    place = Home(home)
    stack = place.running_stack()
    os.kill(int(stack["supervisor_pid"]), signal.SIGTERM)
    deadline_s = time.monotonic() + MAX_SHUTDOWN_S
    with progress_bar("stopping"):
        while place.is_locked():
            if time.monotonic() > deadline_s:
                raise SetupError(
                    f"process {stack['supervisor_pid']} did not stop within {MAX_SHUTDOWN_S:.0f} s; see "
                    f"{place.log('supervisor')}"
                )
            time.sleep(0.2)
    print("stopped; `roostream up` continues from the committed state")
    return 0


def delete(home: Path) -> int:
    """Delete a home.

    Raises:
        SetupError: a stack runs in it, or the directory is not the home of a stack.
    """
    place = Home(home)
    if not place.root.exists():
        print(f"there is no home {place.root}; nothing to delete")
        return 0
    if not place.stack_json.exists():
        raise SetupError(
            f"{place.root} has no stack.json, so it is not the home of a stack; nothing was deleted; "
            "give the --home of a stack, or delete the folder yourself"
        )
    place.lock()
    place.end_leftovers()
    place.unlock()
    shutil.rmtree(place.root)
    print(f"deleted {place.root}")
    return 0


def describe_endpoints(stack: Mapping[str, Any]) -> list[str]:
    """Addresses of a running stack, and commands to try."""
    shards = [p["pid"] for n, p in stack["programs"].items() if n.startswith("shard-") and p["pid"]]
    serving = stack["serving"]
    body = '{"user_id": 17, "candidates": [{"item_id": 1}, {"item_id": 2}, {"item_id": 3}]}'
    page = str(stack["programs"].get("controller", {}).get("metrics") or "").removesuffix("metrics")
    return [
        *([f"page        {page}"] if page else []),
        f"API docs    {serving}/docs",
        f"Flink       {stack['flink']}",
        f"logs        {stack['home']}/logs",
        f"rank        curl -s {serving}/v1/rank -H 'Content-Type: application/json' -d '{body}'",
        *([f"kill        kill -9 {shards[0]}    # a shard; the stack recovers by itself"] if shards else []),
    ]


def stop_on_signals() -> threading.Event:
    """An event that Ctrl-C, `down` or a closed terminal sets. A second signal does not interrupt the
    shutdown."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    return stop


def log_to(home: Home, console: logging.Handler | None = None) -> None:
    """Log to `logs/supervisor.log`, of bounded size, and to `console`."""
    home.make()
    handlers: list[logging.Handler] = [
        logging.handlers.RotatingFileHandler(home.log("supervisor"), maxBytes=4 << 20, backupCount=1)
    ]
    if console is not None:
        handlers.append(console)
    for handler in handlers:
        handler.setFormatter(MaskingFormatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level="INFO", handlers=handlers, force=True)
