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
from benchmarks.common.training_stack import Feed, Trainer, until
from benchmarks.harness.benchmark import Benchmark, Row, Subject, TurnResult, WholeTurn
from infra.options import StackOptions
from infra.stack import Stack
from roostream.errors import RoostreamError
from roostream.runtime.checkpoint_store import FileStore
from roostream.schema.registry import register
from roostream.warehouse.warehouse import Warehouse

INTERVAL_MS = 10_000  # between commits, as by default
_MORE = 4_000  # samples that only the topic has
_BATCH = 64  # requests
_NEAR = 3_000  # requests before the end of the files; from here on metrics are polled often
_RATE = 1e9  # samples are written at once
_READY_S, _TRAIN_S, _BACK_S = 120.0, 300.0, 120.0
_POLL_S, _SLOW_POLL_S = 0.01, 0.25


@dataclasses.dataclass(frozen=True)
class Pause:
    """A time without a training step, in seconds, and its consecutive parts."""

    before_s: float  # until the commit begins
    phases_s: Mapping[str, float]  # of the commit, as the controller has them
    restored_s: float  # from the commit until the worker has the next incarnation
    step_s: float  # until that has trained a batch

    @property
    def total_s(self) -> float:
        return self.before_s + sum(self.phases_s.values()) + self.restored_s + self.step_s

    def figures(self) -> dict[str, float]:
        return {
            "pause, ms": 1000 * self.total_s,
            "until the commit begins, ms": 1000 * self.before_s,
            **{f"{name}, ms": 1000 * seconds for name, seconds in self.phases_s.items()},
            "claimed and restored, ms": 1000 * self.restored_s,
            "first batch, ms": 1000 * self.step_s,
        }


class ArchivedStack:
    """A stack whose archive has the first `requests` samples of its topic; nothing is trained yet."""

    def __init__(self, stack: Stack, trainer: Trainer, requests: int) -> None:
        self.stack, self.trainer, self.requests = stack, trainer, requests

    def worker_value(self, name: str) -> float:
        """A metric of the worker; 0 if it does not answer."""
        return self.trainer.metrics("worker").value(name) or 0.0

    def train(self) -> None:
        """Write more samples to the topic than the files have, then start training."""
        feed = self.trainer.feed
        feed.ahead += _MORE
        until("more samples than files have", lambda: feed.num_sent >= self.requests + _MORE, _READY_S)
        feed.ahead = _MORE  # beyond the committed ones, so that feeding takes little CPU
        self.stack.start(("shards", "controller", "workers"))

    def wait_for_the_end(self) -> float:
        """Wait for the last step of the files. Returns the incarnation that trains them."""

        def left() -> float:
            return self.requests - self.worker_value("roostream_worker_requests_total")

        until("the first of the files is trained", lambda: left() < self.requests, _TRAIN_S, _POLL_S)
        incarnation = self.worker_value("roostream_worker_incarnation")
        until("the files are nearly trained", lambda: left() <= _NEAR, _TRAIN_S, _SLOW_POLL_S)
        until("the files are trained", lambda: left() <= 0, _TRAIN_S, _POLL_S)
        return incarnation

    def wait_for_news(self) -> None:
        """Wait until something is trained that is not committed."""
        until("something new is trained", lambda: self.trainer.call("status")["news"], _BACK_S)

    def pause(self, before: float, cause: Callable[[], object] = lambda: None) -> Pause:
        """The pause from the call of `cause` until an incarnation after `before` trains a batch.

        Raises:
            RuntimeError: none does within two minutes.
        """
        began_ms = time.time() * 1000
        cause()
        until(
            "the worker is restored",
            lambda: self.worker_value("roostream_worker_incarnation") > before,
            _BACK_S,
            _POLL_S,
        )
        restored_ms, restored_to = time.time() * 1000, self.trainer.newest()
        until(
            "training goes on",
            lambda: self.worker_value("roostream_worker_step") > restored_to.step,
            _BACK_S,
            _POLL_S,
        )
        trained_ms, status = time.time() * 1000, self.trainer.call("status")
        assert status["manifest"] == restored_to.name, (
            "there was another commit: the phases are not those of the pause"
        )
        committed_ms = float(status["committed_at_ms"])
        return Pause(
            before_s=(committed_ms - status["commit_ms"] - began_ms) / 1000,
            phases_s={name: ms / 1000 for name, ms in status["phases_ms"].items()},
            restored_s=(restored_ms - committed_ms) / 1000,
            step_s=(trained_ms - restored_ms) / 1000,
        )


@contextlib.contextmanager
def archived_stack(requests: int) -> Iterator[ArchivedStack]:
    """A stack with current samples in the topic and all of them in files."""
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
                until(
                    "all samples archived",
                    lambda: _rows(home / "warehouse") >= requests,
                    _READY_S,
                    _SLOW_POLL_S,
                )
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


def _handed_over(stack: ArchivedStack) -> Pause:
    stack.train()
    return stack.pause(stack.wait_for_the_end())


def _restarted(stack: ArchivedStack) -> Pause:
    """The worker commits, ends, and is started again."""

    def restart() -> None:
        stack.stack.stop_program("worker")
        stack.stack.start(["worker"])

    stack.wait_for_news()
    return stack.pause(stack.worker_value("roostream_worker_incarnation"), restart)


def _pause(stack: ArchivedStack, make_pause: Callable[[ArchivedStack], Pause]) -> WholeTurn:
    def turn() -> TurnResult:
        pause = make_pause(stack)
        stack.wait_for_news()  # the account must cover samples after the switch
        account = stack.trainer.audited(stack.trainer.commit())
        figures = {
            **pause.figures(),
            "samples in the books": account.below,
            "lost": account.lost,
            "trained twice": account.twice,
        }
        return TurnResult(1.0, pause.total_s, figures)

    return WholeTurn(turn)


@contextlib.contextmanager
def handed_over(requests: int) -> Iterator[WholeTurn]:
    """Time: from the last step of the files to the first step of the stream."""
    with _stack.open(requests) as stack:
        yield _pause(stack, _handed_over)


@contextlib.contextmanager
def restarted(requests: int) -> Iterator[WholeTurn]:
    """On the same stack after its hand-over. Time: from the worker's stop request to the next step."""
    with _stack.open(requests) as stack:
        yield _pause(stack, _restarted)


@contextlib.contextmanager
def committed(requests: int) -> Iterator[WholeTurn]:
    """The time of a requested commit on the same stack."""
    with _stack.open(requests) as stack:

        def turn() -> TurnResult:
            stack.wait_for_news()
            began_s = time.monotonic()
            stack.trainer.commit()
            return TurnResult(1.0, time.monotonic() - began_s)

        yield WholeTurn(turn)


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
Handed over: the time from the last step of the files to the first step of the stream, by the worker's
metrics. Its consecutive parts are the wait for the commit, the commit's phases (cut, freeze, write, link),
the next incarnation, and the first batch. All samples close within the run, so the worker reads the ids of
all of them from the files before it goes on: the expensive case. The alternative without a hand-over is to
end the worker and start it again, which the second stack measures. The limit is a requested commit, most of
which runs beside training. "Lost" and "trained twice" are counted after each pause.""",
)
