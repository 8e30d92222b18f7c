"""One child process: how to start it (`Program`) and a running copy of it (`Child`). `infra.supervisor`
watches many of them."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from roostream.runtime import die_with_parent
from roostream.runtime.program import STOP_S

STOP_TIMEOUT_S = STOP_S + 5.0
"""A Roostream program that has not ended this long after SIGTERM is killed."""


class StopRank(enum.IntEnum):
    """Stop order of a stack: lowest rank first, programs of one rank in parallel (`infra/shutdown.py`
    explains the order)."""

    TRAFFIC = 1
    SERVING = 2
    JOINER = 3
    WORKER = 5  # 4 is the last commit, which needs everything that still runs
    CONTROLLER = 6
    SHARD = 7
    FEATURES = 8
    REDIS = 9
    FLINK = 10
    KAFKA = 11


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """How to start a program, tell that it is ready, and stop it. The supervisor's thread makes the three
    calls."""

    name: str
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str]
    needs: tuple[str, ...] = ()  # programs that are started with this one; it waits for them by itself
    after: tuple[str, ...] = ()  # programs that must be ready before the first start, if they are started too
    max_after_wait_s: float = math.inf
    prepare: Callable[[], None] = lambda: None  # called before every start: make folders, write files
    ready: Callable[[], bool] = lambda: True  # a probe that takes about a second at most
    on_ready: Callable[[], None] = lambda: None  # called once after each start, when `ready` is first True
    stop_rank: StopRank = StopRank.FEATURES
    stop_timeout_s: float = 10.0
    stop_signal: int = signal.SIGTERM
    metrics: str | None = None
    restart: bool = True  # False: the program ends by itself
    refused_code: int | None = None  # exit code for a configuration that no restart can fix
    watched_files: tuple[Path, ...] = ()  # after `refused_code`, a change of one causes a new start
    cwd: Path | None = None


class Child:
    """A running process of a program. It ends with the supervisor, and the terminal's Ctrl-C does not reach
    it."""

    def __init__(
        self, program: Program, process: subprocess.Popen[bytes], started_s: float, log_start: int
    ) -> None:
        self.program, self.process, self.started_s, self.log_start = program, process, started_s, log_start

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_code(self) -> int | None:
        """None while the process runs; a negative number is the signal that ended it."""
        return self.process.poll()

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)


def start_child(program: Program, now_s: float) -> Child:
    """Start a process of `program`. Its output is appended to `program.log`.

    Raises:
        OSError: the process can't be started (no memory, no descriptor). Nothing runs then.
    """
    program.prepare()
    program.log.parent.mkdir(parents=True, exist_ok=True)
    shim = (sys.executable, "-I", "-S", str(die_with_parent.__file__), str(os.getpid()))
    with program.log.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            (*shim, *program.command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(program.env),
            cwd=program.cwd,
            start_new_session=True,
        )
    return Child(program, process, now_s, log_start)
