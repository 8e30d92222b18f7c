"""How long is nothing trained between the archive and the stream?

A stack trains an archive first and then its topic: the pause between the two, and the time of a restart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import samples as data
from benchmarks.common.shared_setup import SharedSetup
from benchmarks.common.training_stack import AuditorLoop, Feed, Trainer, until
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from benchmarks.train_warehouse import Turns
from infra.options import StackOptions
from infra.stack import Stack
from roostream.errors import RoostreamError
from roostream.runtime.checkpoint_store import FileStore
from roostream.schema.registry import register
from roostream.warehouse.warehouse import Warehouse

INTERVAL_MS = 10_000  # between commits, as by default
_MORE = 4_000  # samples that only the topic has
_BATCH = 64  # from the first one on: what is asked about begins when the files end
_NEAR = 3_000  # requests before that: from here on it is looked at often, which slows training
_RATE = 1e9  # what there may be is there at once
_READY_S, _TRAIN_S, _BACK_S = 120.0, 300.0, 120.0
_LOOK_S, _FAR_S = 0.01, 0.25


@dataclasses.dataclass(frozen=True)
class Pause:
    """A time without a step, in seconds: its parts follow each other."""

    before_s: float  # until the commit begins
    phases_s: Mapping[str, float]  # of the commit, as the controller has them
    restored_s: float  # from the commit until the worker has the next incarnation
    step_s: float  # until that has trained a batch

    @property
    def all_s(self) -> float:
        return self.before_s + sum(self.phases_s.values()) + self.restored_s + self.step_s

    def figures(self) -> dict[str, float]:
        return {
            "pause, ms": 1000 * self.all_s,
            "until the commit begins, ms": 1000 * self.before_s,
            **{f"{name}, ms": 1000 * seconds for name, seconds in self.phases_s.items()},
            "claimed and restored, ms": 1000 * self.restored_s,
            "first batch, ms": 1000 * self.step_s,
        }


class ArchivedStack:
    """A stack whose archive has the first `requests` samples of its topic; nothing is trained yet."""

    def __init__(self, stack: Stack, trainer: Trainer, requests: int) -> None:
        self.stack, self.trainer, self.requests = stack, trainer, requests

    def of_worker(self, name: str) -> float:
        """0 where it doesn't answer."""
        return self.trainer.seen("worker").value(f"roostream_worker_{name}") or 0.0

    def train(self) -> None:
        """Have the topic go on behind the files, and begin with these."""
        feed = self.trainer.feed
        feed.ahead += _MORE
        until("more samples than files have", lambda: feed.num_sent >= self.requests + _MORE, _READY_S)
        feed.ahead = _MORE  # from now on before what is committed: who is timed has the machine
        self.stack.start(("shards", "controller", "workers"))

    def wait_for_the_end(self) -> float:
        """Until the last step of the files; the incarnation that trains them."""

        def left() -> float:
            return self.requests - self.of_worker("requests")

        until("the first of the files is trained", lambda: left() < self.requests, _TRAIN_S, _LOOK_S)
        incarnation = self.of_worker("incarnation")
        until("the files are nearly trained", lambda: left() <= _NEAR, _TRAIN_S, _FAR_S)
        until("the files are trained", lambda: left() <= 0, _TRAIN_S, _LOOK_S)
        return incarnation

    def wait_for_news(self) -> None:
        """Until something is trained that isn't committed."""
        until("something new is trained", lambda: self.trainer.ask("status")["news"], _BACK_S)

    def pause(self, before: float, cause: Callable[[], object] = lambda: None) -> Pause:
        """From here, by way of `cause`, until a batch is trained in the incarnation behind `before`.

        Raises:
            RuntimeError: none is within two minutes.
        """
        began_ms = time.time() * 1000
        cause()
        until("the worker is restored", lambda: self.of_worker("incarnation") > before, _BACK_S, _LOOK_S)
        restored_ms, restored_to = time.time() * 1000, self.trainer.newest()
        until("training goes on", lambda: self.of_worker("step") > restored_to.step, _BACK_S, _LOOK_S)
        trained_ms, status = time.time() * 1000, self.trainer.ask("status")
        assert status["manifest"] == restored_to.name, "another commit came: the figures would be its own"
        committed_ms = float(status["committed_at_ms"])
        return Pause(
            before_s=(committed_ms - status["commit_ms"] - began_ms) / 1000,
            phases_s={name: ms / 1000 for name, ms in status["phases_ms"].items()},
            restored_s=(restored_ms - committed_ms) / 1000,
            step_s=(trained_ms - restored_ms) / 1000,
        )


@contextlib.contextmanager
def archived_stack(requests: int) -> Iterator[ArchivedStack]:
    """Samples of now in the topic, and all of them in files."""
    with tempfile.TemporaryDirectory(prefix="roostream-bench-", ignore_cleanup_errors=True) as folder:
        home = Path(folder).resolve() / "home"
        overrides: dict[str, dict[str, Any]] = {
            "controller": {"commit_interval_ms": INTERVAL_MS, "warehouse": str(home / "warehouse")},
            "archiver": {"flush_interval_ms": 2_000},
            "worker": {"batch_requests": _BATCH, "first_batch_requests": _BATCH},
        }
        with Stack(home, StackOptions(num_archivers=1, overrides=overrides)) as stack:
            register(FileStore(stack.home.store), data.demo_schema())  # as a joiner would
            stack.start(("kafka", "archiver"))
            stack.wait_ready("archiver", timeout_s=_READY_S)
            trainer = Trainer(stack, Feed(stack, _RATE, ahead=requests).open())
            try:
                until("all samples archived", lambda: _rows(home / "warehouse") >= requests, _READY_S, _FAR_S)
                stack.stop_program("archiver")
                yield ArchivedStack(stack, trainer, requests)
            finally:
                trainer.close()


def _rows(place: Path) -> int:
    try:
        return sum(file.rows for file in Warehouse(place).samples.snapshot().files)
    except RoostreamError:  # the archiver hasn't made it yet
        return 0


_stack = SharedSetup(archived_stack)


class Once:
    """The first step is none; the second is what is timed, and the books behind it are looked at."""

    def __init__(self, it: ArchivedStack, pause: Callable[[ArchivedStack], Pause]) -> None:
        self.it, self._pause = it, pause
        self._is_first = True
        self._found: Pause | None = None
        self._books = AuditorLoop(0, 0)

    def step(self) -> None:
        if self._is_first:
            self._is_first = False
            return
        self._found = self._pause(self.it)
        self.it.wait_for_news()  # books that end at the switch would tell nothing of it
        self._books = self.it.trainer.audited(self.it.trainer.commit())

    def took_s(self) -> float:
        return self._found.all_s if self._found else 1.0

    def figures(self) -> dict[str, float]:
        if self._found is None:
            return {}
        its = self._books
        return {
            **self._found.figures(),
            "samples in the books": its.below,
            "lost": its.lost,
            "trained twice": its.twice,
        }

    def work(self) -> Work:
        return Work(self.step, lambda: 1.0, self.figures, self.took_s)


def _handed_over(it: ArchivedStack) -> Pause:
    it.train()
    return it.pause(it.wait_for_the_end())


def _restarted(it: ArchivedStack) -> Pause:
    """The worker commits, ends, and is started again."""

    def restart() -> None:
        it.stack.stop_program("worker")
        it.stack.start(["worker"])

    it.wait_for_news()
    return it.pause(it.of_worker("incarnation"), restart)


@contextlib.contextmanager
def handed_over(requests: int) -> Iterator[Work]:
    """Units: one. Time: from the last step of the files to the first of the stream."""
    with _stack.open(requests) as it:
        yield Once(it, _handed_over).work()


@contextlib.contextmanager
def restarted(requests: int) -> Iterator[Work]:
    """Of the same stack, behind its hand-over. Time: from when the worker is asked to end to the next step of
    the new one."""
    with _stack.open(requests) as it:
        yield Once(it, _restarted).work()


@contextlib.contextmanager
def committed(requests: int) -> Iterator[Work]:
    """The same, of a commit that is asked for."""
    with _stack.open(requests) as it:

        def turn() -> tuple[float, float]:
            it.wait_for_news()
            began_s = time.monotonic()
            it.trainer.commit()
            return 1.0, time.monotonic() - began_s

        yield Turns(turn).work()


_HERE = "benchmarks.handover"
_FEW, _MANY = 2_000, 16_000


def _row(requests: int, *others: Subject) -> Row:
    return Row(
        name=f"{requests // 1000} 000 samples from files, then the topic",
        unit="pauses",
        shows="cost",
        subjects=(
            Subject("handed over", f"{_HERE}:handed_over", (requests,)),
            *others,
            Subject("a commit alone, while training goes on", f"{_HERE}:committed", (requests,), "limit"),
        ),
        time="without a step",
    )


BENCHMARK = Benchmark(
    name="handover",
    summary="How long is nothing trained between the archive and the stream?",
    rows=(
        _row(_FEW),
        _row(_MANY, Subject("the worker ended and started again", f"{_HERE}:restarted", (_MANY,), "stage")),
    ),
    rounds=1,
    interpretation="""\
A stack's own programs: broker, two shards, controller, one worker, and before them an archiver until all samples lie in files.
They close within the minutes of the run, so all of their ids are among those of the last hour that the worker reads from the
files before it goes on with the stream: as many as an hour of a site can bring is the dear case.

Handed over: from the last step of the files until the first of the stream, as the worker's metrics show it, looked at about fifty
times a second. Its parts follow each other: until the controller begins the commit; that commit's phases, in which all of it is
trained and the offsets are those of the table's version (cut, freeze, write, link); the next incarnation, claimed and restored
from that commit; the first batch. Whoever trains an archive and has no hand-over ends the program and begins another one: that
restart is timed in the second stack, with the same parts, from when the worker is asked to end. A hand-over can't take less than
a commit. The last line is one that is asked for: most of it runs beside training (page of `commit`).

`lost` and `trained twice` are of the books behind each pause: all samples below the offsets that are committed, what parameters
contain by their own count, and predictions in the topic by their samples' ids.""",
)
