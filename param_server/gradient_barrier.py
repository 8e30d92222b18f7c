"""The pushes of one step by several workers: held until all are there, then one update.

    first push ──► open ──► every worker's is there: applied ──► all are answered
                    └─────► ended: a fence, a restore, a freeze that can't be, the time limit ──► all are told why

Since a worker's pushes are one after the other and every worker pushes at every step, one step is open at a time. Gradients of
equal keys are added in the order of workers, in float64, whatever the order of arrival: the sum is the same to the bit.

Letters: U unique keys of all pushes, M keys of one of them, D width.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np

from param_server import kernels
from param_server.embedding_table import KeyIndex, Keys, join_keys
from param_server.rules import MAX_GRADIENT
from param_server.table import GradientPush, StackTable
from roostream.errors import FencedError, UnavailableError, WireError
from roostream.runtime.deployment import MAX_WORKERS

PUSH_WAIT_S = 20.0  # below a client's own limit: it is told why, instead of hearing nothing

_MAX_WAITERS = 2  # of one worker: its push, and one sent again; the connections of those before them are gone

Part: TypeAlias = tuple[StackTable, Keys, np.ndarray]


class PendingStep:
    """One step's. Holds at most `workers` pushes. Not thread-safe."""

    def __init__(self, first: GradientPush) -> None:
        self.step, self.workers, self.clip_row_norm = first.step, first.workers, first.clip_row_norm
        self.applied = False
        self.ended = ""  # why it was given up
        self._pushes: dict[int, GradientPush] = {}
        self._sent: Counter[int] = Counter()

    def join(self, update: GradientPush) -> int:
        """Take a push, or one that is sent again; a ticket for `waits`.

        Raises:
            FencedError: it is of another step, or of another number of workers: somebody missed a step.
        """
        mine = (self.step, self.workers, self.clip_row_norm)
        got = (update.step, update.workers, update.clip_row_norm)
        if got != mine:
            raise FencedError(
                f"expected a push of (step, workers, clip_row_norm) {mine}, as the others', got {got} from worker "
                f"{update.worker}: the workers are not in step and must be restored"
            )
        self._pushes.setdefault(update.worker, update)
        self._sent[update.worker] += 1
        return self._sent[update.worker]

    @property
    def num_waiting(self) -> int:
        return len(self._pushes)

    @property
    def missing(self) -> list[int]:
        """Workers whose push isn't there."""
        return [worker for worker in range(self.workers) if worker not in self._pushes]

    def in_order(self) -> list[GradientPush]:
        """The pushes, worker by worker."""
        return [self._pushes[worker] for worker in sorted(self._pushes)]

    def waits(self, worker: int, ticket: int) -> bool:
        """Whether the push with this ticket has nothing to be told yet."""
        return not self.applied and not self.ended and self.is_wanted(worker, ticket)

    def is_wanted(self, worker: int, ticket: int) -> bool:
        """False: it was sent again so often that nobody can be waiting for this answer."""
        return ticket > self._sent[worker] - _MAX_WAITERS


class GradientBarrier:
    """The open step of a shard, under the shard's lock."""

    def __init__(self, lock: threading.Lock, wait_s: float = PUSH_WAIT_S) -> None:
        self.wait_s = wait_s
        self._changed = threading.Condition(lock)
        self._open: PendingStep | None = None

    @property
    def num_waiting(self) -> int:
        return self._open.num_waiting if self._open else 0

    def push(self, update: GradientPush, apply: Callable[[Sequence[GradientPush]], None]) -> None:
        """Inside the lock, which is given back while the others are waited for. Returns when all of the step was applied, by
        `apply` in the thread whose push came last.

        Raises:
            FencedError: the workers are not in step.
            UnavailableError: the step was given up; nothing of it was applied.

        **If `apply` fails**: its error here, and UnavailableError for all that wait.
        """
        its = self._open = self._open or PendingStep(update)
        ticket = its.join(update)
        if not its.missing:
            return self._apply(its, apply)
        if not self._changed.wait_for(lambda: not its.waits(update.worker, ticket), self.wait_s):
            self._end(
                its, f"no push of step {its.step} came from {_named(its.missing)} for {self.wait_s:g} s"
            )
        if its.applied:
            return
        raise UnavailableError(
            its.ended or f"the push of step {its.step} by worker {update.worker} was sent again"
        )

    def end(self, reason: str) -> None:
        """Inside the lock: whoever waits is told why."""
        if self._open:
            self._end(self._open, f"step {self._open.step} was given up: {reason}")

    def _apply(self, its: PendingStep, apply: Callable[[Sequence[GradientPush]], None]) -> None:
        try:
            apply(its.in_order())
        except BaseException as error:
            self._end(its, f"step {its.step} could not be applied ({error!r:.200})")
            raise
        its.applied = True
        self._close(its)

    def _end(self, its: PendingStep, reason: str) -> None:
        its.ended = its.ended or reason
        self._close(its)

    def _close(self, its: PendingStep) -> None:
        if self._open is its:
            self._open = None
        self._changed.notify_all()


def check_workers(worker: int, workers: int) -> None:
    """Raises WireError: there is no such worker, or there are more than a shard waits for."""
    if not 1 <= workers <= MAX_WORKERS or not 0 <= worker < max(workers, 1):
        raise WireError(
            "bad_shape",
            f"expected a push of one of 1 to {MAX_WORKERS} workers, got worker {worker} of {workers}; use fewer",
        )


def added(updates: Sequence[GradientPush]) -> GradientPush:
    """One update of several workers' pushes of a step: unique keys in the order in which they first come, gradients of equal
    keys added, each row's sum brought to a norm of `clip_row_norm` at most (0 = as it is) and within `MAX_GRADIENT`. It is as
    late as the latest, and its events as old as the oldest."""
    stacks: dict[str, list[Part]] = {}
    for update in updates:
        for part in update.parts:
            stacks.setdefault(part[0].name, []).append(part)
    first = updates[0]
    return first._replace(
        time_ms=max(update.time_ms for update in updates),
        oldest_engagement_ms=_oldest(update.oldest_engagement_ms for update in updates),
        oldest_close_ms=_oldest(update.oldest_close_ms for update in updates),
        parts=[_sum(stacks[name], first.clip_row_norm) for name in sorted(stacks)],
    )


def _sum(parts: Sequence[Part], clip_row_norm: float) -> Part:
    table = parts[0][0]
    keys = join_keys(*(its for _, its, _ in parts))
    index = KeyIndex(table.num_buckets)
    index.reserve(len(keys))
    row_M, _ = index.add(keys)
    sum_UD = np.zeros((index.used, table.width), np.float64)
    kernels.add_rows(sum_UD, row_M, np.concatenate([gradient_MD for *_, gradient_MD in parts]))
    out_UD = np.empty(sum_UD.shape, np.float32)
    table.num_limited += kernels.round_rows(sum_UD, clip_row_norm, MAX_GRADIENT, out_UD)
    return table, index.keys_at(np.arange(index.used)), out_UD


def _oldest(times_ms: Iterable[int]) -> int:
    """0 = unknown."""
    return min((time_ms for time_ms in times_ms if time_ms), default=0)


def _named(workers: Sequence[int]) -> str:
    return ", ".join(f"worker {worker}" for worker in workers)
