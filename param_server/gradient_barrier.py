"""Barrier for the pushes of one step by several workers: pushes wait until all are there, then they form one
update.

    first push ──► open ──► the push of every worker has come: applied ──► all are answered
                    └─────► aborted: new incarnation, defect, stop, time limit ──► all get the reason

A worker's pushes are sequential and every worker pushes at every step, so one step is open at a time.
Gradients of equal keys are added in the order of workers, in float64, whatever the order of arrival; so the
sum is the same to the bit.

Letters: U unique keys of all pushes, M keys of one push, D width.
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

PUSH_WAIT_S = 20.0  # less than the client's time limit, so that the client gets a reason

_MAX_WAITERS = 2  # of one worker: its push and one repetition; earlier connections are gone

StackGradient: TypeAlias = tuple[StackTable, Keys, np.ndarray]


class PendingStep:
    """The pushes of one step, at most one a worker. Not thread-safe."""

    def __init__(self, first: GradientPush) -> None:
        self.step, self.workers, self.clip_row_norm = first.step, first.workers, first.clip_row_norm
        self.applied = False
        self.aborted = ""  # the reason
        self._pushes: dict[int, GradientPush] = {}
        self.num_sent: Counter[int] = Counter()  # calls by worker

    def join(self, update: GradientPush) -> int:
        """Add a push, also one that is sent again; return a ticket for `waits`.

        Raises:
            FencedError: it belongs to another step or number of workers: a worker missed a step.
        """
        expected = (self.step, self.workers, self.clip_row_norm)
        got = (update.step, update.workers, update.clip_row_norm)
        if got != expected:
            raise FencedError(
                f"expected a push of (step, workers, clip_row_norm) {expected} as from the others, got {got} "
                f"from worker {update.worker}: the workers are not at the same step and must be restored"
            )
        self._pushes.setdefault(update.worker, update)
        self.num_sent[update.worker] += 1
        return self.num_sent[update.worker]

    @property
    def num_waiting(self) -> int:
        return len(self._pushes)

    @property
    def missing(self) -> list[int]:
        """Workers whose push has not come."""
        return [worker for worker in range(self.workers) if worker not in self._pushes]

    def in_order(self) -> list[GradientPush]:
        """The pushes in the order of workers."""
        return [self._pushes[worker] for worker in sorted(self._pushes)]

    def waits(self, worker: int, ticket: int) -> bool:
        """Whether the push with this ticket must still wait."""
        return not self.applied and not self.aborted and self.is_wanted(worker, ticket)

    def is_wanted(self, worker: int, ticket: int) -> bool:
        """False: the push was sent again so often that no caller can be waiting for this answer."""
        return ticket > self.num_sent[worker] - _MAX_WAITERS


class GradientBarrier:
    """Collects the pushes that workers send to a shard for one step, and applies them together. `lock` is
    that of the shard and protects this object; each method says whether its caller must hold it."""

    def __init__(self, lock: threading.Lock, wait_s: float = PUSH_WAIT_S) -> None:
        self.wait_s = wait_s
        self.lock, self.changed = lock, threading.Condition(lock)
        self.open_step: PendingStep | None = None

    @property
    def num_waiting(self) -> int:
        """Any thread; needs no lock."""
        step = self.open_step
        return step.num_waiting if step else 0

    def push(self, update: GradientPush, apply: Callable[[Sequence[GradientPush]], None]) -> None:
        """Add a push and wait for the others; called with the lock held, which is released while waiting.

        Returns when `apply` has applied the whole step, in the thread whose push came last.

        Raises:
            FencedError: the workers are not at the same step.
            UnavailableError: the step was aborted; nothing of it was applied.

        **If `apply` fails**: its error here, and UnavailableError for all that wait.
        """
        step = self.open_step = self.open_step or PendingStep(update)
        ticket = step.join(update)
        if not step.missing:
            return self._apply(step, apply)
        if not self.changed.wait_for(lambda: not step.waits(update.worker, ticket), self.wait_s):
            self._abort(
                step, f"no push of step {step.step} came from {_named(step.missing)} for {self.wait_s:g} s"
            )
        if step.applied:
            return
        raise UnavailableError(
            step.aborted
            or f"the push of step {step.step} by worker {update.worker} was sent again; "
            "the newer call is answered"
        )

    def abort(self, reason: str) -> None:
        """Abort the open step with this reason; called with the lock held."""
        if self.open_step:
            self._abort(self.open_step, f"step {self.open_step.step} was aborted: {reason}")

    def _apply(self, step: PendingStep, apply: Callable[[Sequence[GradientPush]], None]) -> None:
        try:
            apply(step.in_order())
        except BaseException as error:
            self._abort(step, f"step {step.step} could not be applied ({error!r:.200})")
            raise
        step.applied = True
        self._close(step)

    def _abort(self, step: PendingStep, reason: str) -> None:
        step.aborted = step.aborted or reason
        self._close(step)

    def _close(self, step: PendingStep) -> None:
        if self.open_step is step:
            self.open_step = None
        self.changed.notify_all()


def check_workers(worker: int, workers: int) -> None:
    """Raises WireError: there is no such worker, or there are more than a shard waits for."""
    if not 1 <= workers <= MAX_WORKERS or not 0 <= worker < max(workers, 1):
        raise WireError(
            "bad_shape",
            f"expected a push of one of 1 to {MAX_WORKERS} workers, got worker {worker} of {workers}; "
            "use fewer",
        )


def sum_pushes(updates: Sequence[GradientPush]) -> GradientPush:
    """Sum several workers' pushes of a step into one update.

    Keys come in the order of their first appearance. Gradients of equal keys are added; each row of the sum
    is clipped to a norm of `clip_row_norm` (0 = not) and to `MAX_GRADIENT`. The update's time is the latest,
    its events are as old as the oldest.
    """
    stacks: dict[str, list[StackGradient]] = {}
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


def _sum(parts: Sequence[StackGradient], clip_row_norm: float) -> StackGradient:
    table = parts[0][0]
    keys = join_keys(*(keys for _, keys, _ in parts))
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
