"""One program as a child process: what it is (`Program`) and a running copy of it (`Child`)."""

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

from infra import pdeath
from roostream.runtime.program import STOP_S

GRACE_S = STOP_S + 5.0
"""A program of ours that has not ended by then is killed."""


def _nothing() -> None:
    return None


def _at_once() -> bool:
    return True


class StopRank(enum.IntEnum):
    """When a program is ended, lowest first; those of one rank side by side (`infra/stopping.py` says why in this order)."""

    TRAFFIC = 1
    SERVING = 2
    JOINER = 3
    WORKER = 5  # 4 is the last commit, which needs everything that is left
    CONTROLLER = 6
    SHARD = 7
    FEATURES = 8
    REDIS = 9
    FLINK = 10
    KAFKA = 11


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """How to start one program, know that it is ready, and end it. The three calls are made from the supervisor's thread."""

    name: str
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str]
    needs: tuple[str, ...] = ()  # programs that are wanted with this one; it waits for them by itself
    after: tuple[str, ...] = ()  # of the wanted ones, those that are ready before this one is first started
    after_s: float = math.inf  # no longer than this is waited for them
    prepare: Callable[[], None] = _nothing  # before every start: directories, generated files
    ready: Callable[[], bool] = _at_once  # a probe of at most a second or so
    on_ready: Callable[[], None] = _nothing  # once after each start, when `ready` first said yes
    stop_rank: StopRank
    stop_timeout_s: float = 10.0
    stop_signal: int = signal.SIGTERM
    metrics: str | None = None
    restarted: bool = True  # False: a program that ends by itself
    refusal: int | None = None  # the exit code by which it says that no start mends what it was told
    reads: tuple[
        Path, ...
    ] = ()  # of what it was told: files that somebody may mend; a change of one is worth another start
    place: Path | None = None  # working directory


class Child:
    """A running process of a program. It dies with the supervisor, and never hears the terminal's Ctrl-C."""

    def __init__(
        self, program: Program, process: subprocess.Popen[bytes], started_s: float, log_start: int
    ) -> None:
        self.program, self.process, self.started_s, self.log_start = program, process, started_s, log_start

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self.process.poll()

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)


def start(program: Program, now_s: float) -> Child:
    """Start a process of `program`.

    Raises:
        OSError: it can't be started (no memory, no descriptor); nothing runs then.
    """
    program.prepare()
    program.log.parent.mkdir(parents=True, exist_ok=True)
    shim = (sys.executable, "-I", "-S", str(pdeath.__file__), str(os.getpid()))
    with program.log.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            (*shim, *program.command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(program.env),
            cwd=program.place,
            start_new_session=True,
        )
    return Child(program, process, now_s, log_start)
