"""`up`, `down` and `reset`: a stack in the background, in the foreground, and its end."""

from __future__ import annotations

import logging
import logging.handlers
import os
import re
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
from roostream.cli.asked import AskedController
from roostream.cli.troubles import troubles, why
from roostream.errors import ConfigError, SetupError, printable
from roostream.runtime.program import MaskingFormatter


def serve(home: Path, options: StackOptions) -> int:
    """Run a stack without traffic until a signal asks to stop."""
    stop = stop_on_signals()
    stack = Stack(home, options)
    log_to(stack.home)
    with stack:
        stack.start(["all"])
        stop.wait()
        print(stack.stop(), flush=True)
    return 0


def start_detached(home: Path, arguments: Sequence[str], wait_s: float) -> int:
    """Start `roostream up --foreground` in the background and wait until all programs are ready, or none has become so for
    `wait_s`: a busy machine takes its time for each."""
    place = Home(home)
    place.make()
    if place.is_locked():
        place.lock()  # says who holds it
    command = (sys.executable, "-m", "roostream.cli.main", *arguments, "--foreground")
    output = place.log("up")
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    patience = ReadyWait(wait_s)
    said: set[str] = set()
    while True:
        if process.poll() is not None:
            lines = last_lines(output, 1) or [f"exit code {process.returncode}"]
            raise SetupError(printable(lines[-1].removeprefix("error: ")))
        stack = place.read_stack()
        programs = stack["programs"] if stack and stack["supervisor_pid"] == process.pid else {}
        if failed := [n for n, its in programs.items() if its["state"] == "failed"]:
            name = failed[0]
            words = f"{name} can't run: {why(programs[name])}; its log: {programs[name]['log']}"
            raise SetupError(printable(f"{words}; `roostream down --home {place.root}` stops the rest"))
        done = settled(programs)
        news = [line for line in (*done.values(), *dying(programs)) if line not in said]
        for line in news:
            print(printable(line), flush=True)
        said.update(news)
        if programs and len(done) == len(programs):
            print("\n".join(about(stack or {})))
            return 0
        if patience.ends(len(done)):
            break
        time.sleep(0.25)
    late = (
        "; ".join(f"{name}: {words}" for name, words in troubles(programs).items()) or "none has been started"
    )
    more = f"`roostream status --home {place.root}` tells more"
    print(
        printable(f"not all programs are ready, and for {wait_s:.0f} s none has become so: {late}; {more}"),
        file=sys.stderr,
    )
    return 1


class ReadyWait:
    """With what gets done by and by: it ends when for `wait_s` no more was done than before."""

    def __init__(self, wait_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self.wait_s, self._now_s, self._most, self._since_s = wait_s, now_s, 0, now_s()

    def ends(self, num_done: int) -> bool:
        if num_done > self._most:
            self._most, self._since_s = num_done, self._now_s()
        return self._now_s() >= self._since_s + self.wait_s


def dying(programs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of stack.json: who died and is tried again, a line each."""
    again = [
        (name, its)
        for name, its in programs.items()
        if its.get("said") and its["state"] in ("waiting", "starting")
    ]
    return [f"{name} died and is tried again: {its['said']}; its log: {its['log']}" for name, its in again]


def place_of(text: str) -> str:
    """A place as programs take it, whose working directory isn't the caller's: a directory from the root on, a URL as it is."""
    return text if "://" in text else str(Path(text).expanduser().absolute())


def settled(programs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Those of stack.json that are where they are to be, with a line about each: ready, or resting since training is held."""
    lines = {"ready": "is ready", "held": "rests, since training is held; `roostream status` says why"}
    return {name: f"{name} {lines[its['state']]}" for name, its in programs.items() if its["state"] in lines}


def stop_detached(home: Path) -> int:
    """Ask the supervisor of `home` to stop, and wait until it has.

    Raises:
        SetupError: nothing runs there, or it did not stop in time.
    """
    place = Home(home)
    stack = place.running_stack()
    os.kill(int(stack["supervisor_pid"]), signal.SIGTERM)
    deadline_s = time.monotonic() + MAX_SHUTDOWN_S
    while place.is_locked():
        if time.monotonic() > deadline_s:
            raise SetupError(
                f"process {stack['supervisor_pid']} did not stop within {MAX_SHUTDOWN_S:.0f} s; see {place.log('supervisor')}"
            )
        time.sleep(0.2)
    print("stopped; `roostream up` goes on from the committed state")
    return 0


def wipe(home: Path) -> int:
    """Delete a home.

    Raises:
        SetupError: a stack runs in it, or the folder is no home.
    """
    place = Home(home)
    if not place.root.exists():
        print(f"there is no home {place.root}; nothing to delete")
        return 0
    if not place.stack_json.exists():
        raise SetupError(f"{place.root} has no stack.json, so it is no home of a stack; nothing was deleted")
    place.lock()
    place.end_leftovers()
    place.unlock()
    shutil.rmtree(place.root)
    print(f"deleted {place.root}")
    return 0


def scale(controller: AskedController, count: int, wait_s: float) -> int:
    """Train with `count` workers; 0 once they do, 1 if the wait ended before.

    Raises:
        ConfigError: there can't be so many. TransportError: no controller answers.
    """
    answer = controller.ask("scale", {"workers": count, "timeout_s": wait_s}, wait_s + 5)
    if answer["running"]:
        print(f"training with workers={count}")
        return 0
    print(
        f"workers={count} is wanted, {answer['workers']} are in use: {printable(str(answer['why']))}; the wish stands",
        file=sys.stderr,
    )
    return 1


def release(controller: AskedController) -> int:
    """End the hold of training; also where there is none. Raises TransportError: no controller answers."""
    answer = controller.ask("release", {}, 5.0)
    print(
        f"released; training was held: {printable(str(answer['reason']))}"
        if answer["held"]
        else "training is not held"
    )
    return 0


def preempt(controller: AskedController, name: str, notice_s: float) -> int:
    """Have a job of the trainer go within `notice_s`; 0 if what was trained is committed first, 1 if it is trained again.

    Raises:
        ConfigError: no job of the trainer has such a name, or the notice is too short. UnavailableError: it isn't there.
        TransportError: no controller answers.
    """
    role, index = job_of(name)
    answer = controller.ask("preempt", {"role": role, "index": index, "notice_s": notice_s}, notice_s + 5)
    if answer["committed"]:
        print(
            f"{name} goes; everything trained is committed (commit {answer['seq']}), and training waits until it is back"
        )
        return 0
    why = f"{printable(str(answer['why']))}; what was trained since commit {answer['seq']} is trained again"
    print(f"{name} was asked to go, and nothing was committed within {notice_s:g} s: {why}", file=sys.stderr)
    return 1


def job_of(name: str) -> tuple[str, int]:
    """Role and index of a program of the trainer, by its name in a stack, or in a set whose members count from 0.

    Raises:
        ConfigError: it has no other name there, or keeps nothing that a commit would save.
    """
    match = re.fullmatch(r"(controller)|(worker)(?:-(\d+))?|(shard)-(\d+)", name)
    if match is None:
        raise ConfigError(
            f"expected controller, worker, worker-N or shard-N, got {name!r}: other programs lose nothing that is trained; "
            "end the process, and its stack starts it again"
        )
    controller, worker, number, shard, index = match.groups()
    return controller or worker or shard, int(number or index or 0)


def about(stack: dict[str, Any]) -> list[str]:
    """Where to look and what to try, of a stack that runs."""
    shards = [p["pid"] for n, p in stack["programs"].items() if n.startswith("shard-") and p["pid"]]
    serving = stack["serving"]
    body = '{"user_id": 17, "candidates": [{"item_id": 1}, {"item_id": 2}, {"item_id": 3}]}'
    page = str(stack["programs"].get("controller", {}).get("metrics") or "").removesuffix("metrics")
    return [
        *([f"page        {page}"] if page else []),
        f"API docs    {serving}/docs",
        f"Flink       {stack['flink']}",
        f"logs        {stack['home']}/logs",
        f"ask         curl -s {serving}/v1/rank -H 'Content-Type: application/json' -d '{body}'",
        *([f"break it    kill -9 {shards[0]}    # a shard: the loop goes on by itself"] if shards else []),
    ]


def stop_on_signals() -> threading.Event:
    """An event that Ctrl-C, `down` or a closed terminal sets; the stop order that follows is not cut short by a second one."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    return stop


def log_to(home: Home, console: logging.Handler | None = None) -> None:
    """Log to `logs/supervisor.log` (bounded) and to `console`."""
    home.make()
    handlers: list[logging.Handler] = [
        logging.handlers.RotatingFileHandler(home.log("supervisor"), maxBytes=4 << 20, backupCount=1)
    ]
    if console is not None:
        handlers.append(console)
    for handler in handlers:
        handler.setFormatter(MaskingFormatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level="INFO", handlers=handlers, force=True)
