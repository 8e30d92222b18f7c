"""Synchronous training by several workers: in every turn, all workers sum one bucket.

    turn n     each worker reports what it will train in turn n+1 (its weights), whether it wants a cut, and
               its progress ── sum ──► all know the plan of turn n+1: who trains, and the totals to divide by
    turn n+1   each trains what it reported: gradients of its part of the loss, in the same bucket
               ── sum ──► one step for all

A worker without data adds zeros and pulls no rows. In a turn that trains, all workers pull once, and all push
once if there are gradients, so that both may be collective calls (`trainer/torchrec_rows.py`). A cut
happens after the turn in which all workers want the same one. What was announced for the next turn stays
announced, and is not part of the cut. While no worker trains, the bucket contains the reports alone, and a
turn waits for data as a poll does.

Non-finite numbers never reach a sum: a worker whose part gives non-finite numbers, or numbers that could
overflow the sum over all workers, adds zeros and trains the halves of its part next.

Letters: W workers, T tasks, P dense parameters, N numbers of a bucket, R requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from roostream.errors import UnavailableError
from roostream.runtime.event_time import NUM_RECENT
from trainer.chunks import ChunkPart, ClaimedChunk, PulledPart
from trainer.dead_letter_quarantine import NotFiniteError
from trainer.loop import TrainLoop
from trainer.process_group import ProcessGroup
from trainer.read_bounds import ReadBounds
from trainer.rows import empty_lookup
from trainer.watermark import merge_newest_times

_POLL_S = 0.1
_MAX_MS = 1 << 52  # exact in a float64, as all other fields of a report
_DIGEST = (1 << 52) - 1


class TurnReport(NamedTuple):
    """What a worker reports in a turn, sent as float64."""

    turn: int  # of this incarnation
    cut: int  # the commit that it wants to cut for after this turn; 0 = none, or it is within a chunk
    digest: int  # of its dense weights before this turn; 0 if it wants no cut
    leaving: bool  # no worker shall begin another chunk
    ready: bool  # it has a part for the next turn
    spare: bool  # it has no partition, or has trained everything that it may read in this epoch
    epoch: int  # epoch of its work units; 0 = the stream
    weighted: bool  # that part has weight
    requests: int  # new requests of its partitions since the beginning, including the announced ones
    weight_T: tuple[float, ...]  # of that part
    times_ms: tuple[int, ...]  # newest close times of the chunk that it begins in this turn

    def encode(self) -> list[float]:
        times = [float(min(max(t, -_MAX_MS), _MAX_MS)) for t in self.times_ms[-NUM_RECENT:]]
        padding = [0.0] * (NUM_RECENT - len(times))
        return [*map(float, self[:9]), *self.weight_T, float(len(times)), *times, *padding]


def decode_report(numbers: Sequence[float], num_tasks: int) -> TurnReport:
    """Decode what `TurnReport.encode` returned."""
    turn, cut, digest, leaving, ready, spare, epoch, weighted, requests = map(int, numbers[:9])
    times = [int(t) for t in numbers[10 + num_tasks :]]
    flags = bool(leaving), bool(ready), bool(spare)
    weight_T, times_ms = tuple(numbers[9 : 9 + num_tasks]), tuple(times[: int(numbers[9 + num_tasks])])
    return TurnReport(turn, cut, digest, *flags, epoch, bool(weighted), requests, weight_T, times_ms)


class TurnPlan(NamedTuple):
    """What all workers know after a turn about the next one."""

    trains: bool = False
    weighted: bool = False  # there are gradients
    total_T: tuple[float, ...] = ()
    leaving: bool = False
    cut: int = 0  # all workers cut for this commit now
    requests: int = -1  # by all workers, for the size of the next chunks; -1 = unknown yet


def plan_turn(reports_W: Sequence[TurnReport], before: TurnPlan, *, exact: bool) -> TurnPlan:
    """Derive the next turn from the reports of all workers. In exact mode a turn trains only when every
    worker with partitions has a part. Chunk sizes change only in such turns. So neither depends on which
    worker was faster. Raises UnavailableError: the workers have diverged, and all members must be
    restored."""
    if len({report.turn for report in reports_W}) > 1:
        raise UnavailableError(
            f"expected all workers at the same turn, got turns {[report.turn for report in reports_W]}"
        )
    digests = {report.digest for report in reports_W if report.cut}
    if len(digests) > 1:
        raise UnavailableError("expected the same dense weights at all workers, got different ones")
    trains = any(report.ready for report in reports_W)
    if exact:
        # A worker that does not know the newest epoch yet may have data in it.
        newest = max(report.epoch for report in reports_W)
        trains = trains and all(
            report.ready or (report.spare and report.epoch == newest) for report in reports_W
        )
    counts = trains or not exact or before.requests < 0
    cuts = {report.cut for report in reports_W}
    return TurnPlan(
        trains=trains,
        weighted=trains and any(report.weighted for report in reports_W),
        total_T=tuple(sum(totals) for totals in zip(*(report.weight_T for report in reports_W), strict=True)),
        leaving=any(report.leaving for report in reports_W),
        cut=cuts.pop() if len(cuts) == 1 else 0,
        requests=sum(report.requests for report in reports_W) if counts else before.requests,
    )


class _TrainedPart(NamedTuple):
    """A part whose gradients wait for those of the other workers."""

    pulled: PulledPart
    scored_BT: Tensor  # logits
    weighted: bool


class LockStep:
    """One worker's turns in one incarnation. **If `turn` raises**, the loop must be restored, and this object
    is unusable."""

    def __init__(self, loop: TrainLoop, group: ProcessGroup, read_bounds: ReadBounds | None = None) -> None:
        """`read_bounds`: how far this worker may read; None: no bounds."""
        self.loop, self.group, self.read_bounds = loop, group, read_bounds or ReadBounds(loop)
        self.num_turns = 0
        self._plan = TurnPlan()
        self._next: ClaimedChunk | None = None  # claimed and announced
        self._current: ClaimedChunk | None = None  # begun and not fully trained
        self._parts: deque[ChunkPart] = deque()  # remaining parts of it
        self._parameters = list(loop.optimizer.parameters.values())
        self._num_report_numbers = group.workers * len(self._report(0, leaving=False, times_ms=()).encode())

    def turn(self, *, cut: int = 0, leaving: bool = False) -> TurnPlan:
        """Run one turn. `cut`: the commit that this worker wants to cut for. `leaving`: no worker shall begin
        another chunk. In the result, `trains` says whether this turn trained, and `cut` for which commit all
        workers cut now. Raises UnavailableError: a worker or a shard is unavailable, or the workers have
        diverged."""
        plan, loop = self._plan, self.loop
        pulled, times_ms = self._begin() if plan.trains else (None, ())
        if plan.trains and pulled is None:
            loop.rows.pull(empty_lookup(loop.schema))
        trained = self._train(pulled, plan)
        self._claim_next(plan, wait=not plan.trains and not cut)
        report = self._report(cut, leaving=leaving, times_ms=times_ms)
        reports_W = self._sum(report, gradients=plan.weighted)
        self.num_turns += 1
        self._plan = plan_turn(reports_W, plan, exact=loop.config.exact)
        loop.requests_per_worker = self._plan.requests // self.group.workers
        if plan.trains:
            times = merge_newest_times([report.times_ms for report in reports_W])
            loop.watermark.add(np.array(times, np.int64))
            self._apply(trained, weighted=plan.weighted)
        return self._plan._replace(trains=plan.trains)

    def _begin(self) -> tuple[PulledPart | None, tuple[int, ...]]:
        """The announced part with its rows, and the close times of its chunk if the part is its first."""
        if self._parts:
            return self.loop.pull_part(self._parts.popleft()), ()
        if self._next is None:
            return None, ()
        self._current, self._next = self._next, None
        prepared = self.loop.feed.prepare(self._current)
        self.loop.quarantine.begin(self._current.chunk)
        self._parts.extend(self._current.parts[1:])
        return prepared.first, tuple(self._current.chunk.close_ms_R[-NUM_RECENT:].tolist())

    def _train(self, pulled: PulledPart | None, plan: TurnPlan) -> _TrainedPart | None:
        if plan.weighted:
            self.loop.optimizer.zero_grad()
        if pulled is None or self._current is None:
            return None
        part, loop = pulled.part, self.loop
        logits, weighted = loop.dense_trainer.forward(pulled), part.has_weight
        if logits is None or (weighted and not self._backward(pulled, logits.trained_BT, plan)):
            loop.optimizer.zero_grad()
            self._parts.extendleft(reversed(loop.split_non_finite(part)))
            return None
        return _TrainedPart(pulled, logits.scored_BT, weighted)

    def _backward(self, pulled: PulledPart, logits_BT: Tensor, plan: TurnPlan) -> bool:
        targets = self.loop.targets(pulled.part, torch.tensor(plan.total_T, dtype=torch.float64))
        return self.loop.dense_trainer.backward(pulled, logits_BT, targets, workers=self.group.workers)

    def _claim_next(self, plan: TurnPlan, *, wait: bool) -> None:
        """Claim the next chunk, once the number of requests trained by all workers is known."""
        if self._next is None and not self._parts and plan.requests >= 0 and not plan.leaving:
            self._next = self.loop.feed.next_claimed(_POLL_S if wait else 0.0)

    def _report(self, cut: int, *, leaving: bool, times_ms: tuple[int, ...]) -> TurnReport:
        announced = self._parts or (self._next.parts if self._next else ())
        part = announced[0] if announced else None
        weighted = part is not None and part.has_weight
        cut = 0 if self._parts else cut
        weight_T = (0.0,) * len(self.loop.schema.tasks)
        if part and weighted:
            weight_T = tuple(part.batch.weight_BT.sum(axis=0, dtype=np.float64))
        return TurnReport(
            turn=self.num_turns,
            cut=cut,
            digest=self._digest() if cut else 0,
            leaving=leaving,
            ready=bool(self._parts) or self._next is not None,
            spare=not self.loop.partitions.progress or self.read_bounds.is_trained,
            epoch=self.read_bounds.epoch.number,
            weighted=weighted,
            requests=self._num_taken(),
            weight_T=weight_T,
            times_ms=times_ms,
        )

    def _num_taken(self) -> int:
        """Number of requests taken, including the announced ones."""
        claimed = [chunk for chunk in (self._current, self._next) if chunk]
        return self.loop.partitions.num_requests + sum(chunk.num_requests for chunk in claimed)

    def _digest(self) -> int:
        hashed = xxhash.xxh3_64()
        for parameter in self._parameters:
            hashed.update(parameter.detach().cpu().numpy().tobytes())
        return hashed.intdigest() & _DIGEST or 1

    def _sum(self, report: TurnReport, *, gradients: bool) -> list[TurnReport]:
        """Exchange the reports of all workers. With `gradients`, the dense gradients are replaced by their
        sum over the workers that have them."""
        workers, own, device = self.group.workers, report.encode(), self.loop.config.device
        reports_N = torch.zeros(self._num_report_numbers, dtype=torch.float64)
        at = self.group.index * len(own)
        reports_N[at : at + len(own)] = torch.tensor(own, dtype=torch.float64)
        bucket_N = reports_N.to(device)
        if gradients:
            bucket_N = torch.cat([bucket_N, *self._gradients()])
        with self.loop.stages("reduce"):
            self.group.sum(bucket_N)
        if gradients:
            self._set_gradients(bucket_N[self._num_report_numbers :])
        numbers_WN = bucket_N[: self._num_report_numbers].view(workers, -1).tolist()
        return [decode_report(numbers_N, len(self.loop.schema.tasks)) for numbers_N in numbers_WN]

    def _gradients(self) -> list[Tensor]:
        known_P = [p.grad is not None for p in self._parameters]
        has_P = torch.tensor(known_P, dtype=torch.float64, device=self.loop.config.device)
        flat = [
            (torch.zeros_like(p) if p.grad is None else p.grad).detach().to(torch.float64).flatten()
            for p in self._parameters
        ]
        return [has_P, *flat]

    def _set_gradients(self, sum_N: Tensor) -> None:
        sizes = [len(self._parameters), *(p.numel() for p in self._parameters)]
        has_P, *flat = torch.split(sum_N, sizes)
        for parameter, has, gradient in zip(self._parameters, has_P.tolist(), flat, strict=True):
            parameter.grad = gradient.to(parameter.dtype).view_as(parameter) if has else None

    def _apply(self, trained: _TrainedPart | None, *, weighted: bool) -> None:
        """Apply the dense step, which is the same for all workers, then record and push this worker's
        part."""
        loop = self.loop
        loop.num_steps += 1
        if weighted and not loop.optimizer.step():
            raise NotFiniteError(
                "expected a finite sum of the workers' finite gradients, got a non-finite one: "
                "all members must be restored"
            )
        if trained:
            loop.record_scores(trained.pulled, trained.scored_BT)
        if weighted:
            own_part = trained.pulled if trained and trained.weighted else None
            loop.push(own_part, clip_row_norm=loop.config.clip_row_norm)
        if self._current is not None and not self._parts:
            loop.settle(self._current)
            loop.feed.mark_trained()
            self._current = None
