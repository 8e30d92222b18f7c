"""Several workers' turns: every turn of every worker is one sum over one bucket.

    turn n     each says what it will train in turn n+1 (its weights), whether it wants a cut, how far it is
               ── sum ──► all know the same of turn n+1: does anybody train, and divided by which totals
    turn n+1   each trains what it said: gradients of its part of the loss, in the same bucket ── sum ──► the same step for all

A worker without data adds zeros, and asks for no rows: in a turn that trains all pull once, and all push once where there are
gradients, so that either may be a call of all (`param_server/row_exchange.py`). A cut is taken behind the turn in which all want the
same one; what was announced for the next turn stays announced, and is in no cut. While nobody trains, the bucket has the words
alone, and a turn waits for data as a poll does.

What isn't finite never reaches a sum: a worker whose part gives such numbers, or numbers whose sum over all workers could be
one, adds zeros, and its halves are its next parts.

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
from trainer.dead_letter_quarantine import NotFiniteError
from trainer.feed import ChunkPart, Claimed, Pulled
from trainer.loop import TrainLoop
from trainer.process_group import ProcessGroup
from trainer.read_bounds import ReadBounds
from trainer.rows import no_rows
from trainer.watermark import newest_of

_POLL_S = 0.1
_MAX_MS = 1 << 52  # exact in a float64, as everything else that is said
_DIGEST = (1 << 52) - 1


class TurnReport(NamedTuple):
    """What a worker says in a turn; it goes along as float64."""

    turn: int  # of this incarnation
    cut: int  # the commit that it would cut for behind this turn; 0 = none, or it stands within a chunk
    digest: int  # of its dense weights before this turn; 0 where it wants no cut
    leaving: bool  # nobody shall begin another chunk
    ready: bool  # it has a part for the next turn
    spare: bool  # it has no partition at all, or has trained all that it may read of them in this epoch
    epoch: int  # of what it may read; 0 = the stream
    weighted: bool  # and that one has weight
    requests: int  # new ones taken of its partitions since the beginning, with what it announces
    weight_T: tuple[float, ...]  # of that part
    times_ms: tuple[int, ...]  # the newest close times of the chunk that it begins in this turn

    def numbers(self) -> list[float]:
        times = [float(min(max(t, -_MAX_MS), _MAX_MS)) for t in self.times_ms[-NUM_RECENT:]]
        padding = [0.0] * (NUM_RECENT - len(times))
        return [*map(float, self[:9]), *self.weight_T, float(len(times)), *times, *padding]


def words_of(numbers: Sequence[float], num_tasks: int) -> TurnReport:
    """What `Words.numbers` gave."""
    turn, cut, digest, leaving, ready, spare, epoch, weighted, requests = map(int, numbers[:9])
    times = [int(t) for t in numbers[10 + num_tasks :]]
    return TurnReport(
        turn=turn,
        cut=cut,
        digest=digest,
        leaving=bool(leaving),
        ready=bool(ready),
        spare=bool(spare),
        epoch=epoch,
        weighted=bool(weighted),
        requests=requests,
        weight_T=tuple(numbers[9 : 9 + num_tasks]),
        times_ms=tuple(times[: int(numbers[9 + num_tasks])]),
    )


class TurnPlan(NamedTuple):
    """What all know behind a turn, of the next one."""

    trains: bool = False
    weighted: bool = False  # there are gradients
    total_T: tuple[float, ...] = ()
    leaving: bool = False
    cut: int = 0  # all cut for this commit now
    requests: int = -1  # taken by all, as far as the next chunks' size depends on it; -1 = not known yet


def agree(said_W: Sequence[TurnReport], before: TurnPlan, *, exact: bool) -> TurnPlan:
    """In exact mode a turn trains when everybody who has partitions has a part, and sizes follow such turns alone, so that
    neither depends on who was faster.

    Raises:
        UnavailableError: the workers are not where they should be: everyone must be restored.
    """
    if len({words.turn for words in said_W}) > 1:
        raise UnavailableError(f"the workers are not in step, at turns {[words.turn for words in said_W]}")
    digests = {words.digest for words in said_W if words.cut}
    if len(digests) > 1:
        raise UnavailableError("the workers' dense weights are not the same")
    trains = any(words.ready for words in said_W)
    if exact:
        newest = max(words.epoch for words in said_W)  # who doesn't know of it yet may have something in it
        trains = trains and all(words.ready or (words.spare and words.epoch == newest) for words in said_W)
    counts = trains or not exact or before.requests < 0
    cuts = {words.cut for words in said_W}
    return TurnPlan(
        trains=trains,
        weighted=trains and any(words.weighted for words in said_W),
        total_T=tuple(sum(totals) for totals in zip(*(words.weight_T for words in said_W), strict=True)),
        leaving=any(words.leaving for words in said_W),
        cut=cuts.pop() if len(cuts) == 1 else 0,
        requests=sum(words.requests for words in said_W) if counts else before.requests,
    )


class _Learned(NamedTuple):
    """A part whose gradients wait for the others'."""

    pulled: Pulled
    scored_BT: Tensor  # logits
    weighted: bool


class LockStep:
    """One worker's turns in one incarnation. **If `turn` raises**, its loop must be restored, and this one is over."""

    def __init__(self, loop: TrainLoop, reduction: ProcessGroup, reach: ReadBounds | None = None) -> None:
        """`reach`: how far this worker may read; None: as far as there is anything."""
        self.loop, self.reduction, self.reach = loop, reduction, reach or ReadBounds(loop)
        self.num_turns = 0
        self._agreed = TurnPlan()
        self._next: Claimed | None = None  # announced as a whole
        self._hand: Claimed | None = None  # begun, and not trained whole
        self._waiting: deque[ChunkPart] = deque()  # of it
        self._parameters = list(loop.optimizer.parameters.values())
        self._control = reduction.workers * len(self._words(0, leaving=False, times_ms=()).numbers())

    def turn(self, *, cut: int = 0, leaving: bool = False) -> TurnPlan:
        """One turn; `cut`: the commit that this worker wants to cut for, `leaving`: it wants nobody to begin another chunk. Of
        the answer `trains` says whether this turn trained, and `cut` for which commit all cut now.

        Raises:
            UnavailableError: a worker or a shard is away, or they are not in step.
        """
        plan, loop = self._agreed, self.loop
        pulled, times_ms = self._begin() if plan.trains else (None, ())
        if plan.trains and pulled is None:
            loop.rows.pull(no_rows(loop.schema))
        learned = self._learn(pulled, plan)
        self._claim_next(plan, wait=not plan.trains and not cut)
        words = self._words(cut, leaving=leaving, times_ms=times_ms)
        said_W = self._sum(words, gradients=plan.weighted)
        self.num_turns += 1
        self._agreed = agree(said_W, plan, exact=loop.config.exact)
        loop.share = self._agreed.requests // self.reduction.workers
        if plan.trains:
            loop.time.add(np.array(newest_of([words.times_ms for words in said_W]), np.int64))
            self._apply(learned, weighted=plan.weighted)
        return self._agreed._replace(trains=plan.trains)

    def _begin(self) -> tuple[Pulled | None, tuple[int, ...]]:
        """The part that was announced, with rows, and the times of its chunk if that begins with it."""
        if self._waiting:
            return self.loop.pull_part(self._waiting.popleft()), ()
        if self._next is None:
            return None, ()
        self._hand, self._next = self._next, None
        prepared = self.loop.feed.pulled(self._hand)
        self.loop.burial.begin(self._hand.chunk)
        self._waiting.extend(self._hand.parts[1:])
        return prepared.first, tuple(self._hand.chunk.close_ms_R[-NUM_RECENT:].tolist())

    def _learn(self, pulled: Pulled | None, plan: TurnPlan) -> _Learned | None:
        if plan.weighted:
            self.loop.optimizer.zero_grad()
        if pulled is None or self._hand is None:
            return None
        part, loop = pulled.part, self.loop
        logits, weighted = loop.descent.forward(pulled), part.has_weight
        if logits is None or (weighted and not self._backward(pulled, logits.trained_BT, plan)):
            loop.optimizer.zero_grad()
            self._waiting.extendleft(reversed(loop.halves(part)))
            return None
        return _Learned(pulled, logits.scored_BT, weighted)

    def _backward(self, pulled: Pulled, logits_BT: Tensor, plan: TurnPlan) -> bool:
        targets = self.loop.targets_of(pulled.part, torch.tensor(plan.total_T, dtype=torch.float64))
        return self.loop.descent.backward(pulled, logits_BT, targets, workers=self.reduction.workers)

    def _claim_next(self, plan: TurnPlan, *, wait: bool) -> None:
        """Not before it is known how many requests all have trained."""
        if self._next is None and not self._waiting and plan.requests >= 0 and not plan.leaving:
            self._next = self.loop.feed.claimed(_POLL_S if wait else 0.0)

    def _words(self, cut: int, *, leaving: bool, times_ms: tuple[int, ...]) -> TurnReport:
        part = (
            self._waiting[0]
            if self._waiting
            else self._next.parts[0]
            if self._next and self._next.parts
            else None
        )
        weighted = part is not None and part.has_weight
        cut = 0 if self._waiting else cut
        num_tasks = len(self.loop.schema.tasks)
        return TurnReport(
            turn=self.num_turns,
            cut=cut,
            digest=self._digest() if cut else 0,
            leaving=leaving,
            ready=bool(self._waiting) or self._next is not None,
            spare=not self.loop.own.progress or self.reach.is_trained,
            epoch=self.reach.epoch.number,
            weighted=weighted,
            requests=self._num_taken(),
            weight_T=tuple(part.batch.weight_BT.sum(axis=0, dtype=np.float64))
            if part and weighted
            else (0.0,) * num_tasks,
            times_ms=times_ms,
        )

    def _num_taken(self) -> int:
        """Requests, with what is announced."""
        return self.loop.own.num_requests + sum(its.num_requests for its in (self._hand, self._next) if its)

    def _digest(self) -> int:
        hashed = xxhash.xxh3_64()
        for parameter in self._parameters:
            hashed.update(parameter.detach().cpu().numpy().tobytes())
        return hashed.intdigest() & _DIGEST or 1

    def _sum(self, words: TurnReport, *, gradients: bool) -> list[TurnReport]:
        """What all say. With `gradients`, those of the dense weights become everybody's sum: of whoever has one."""
        workers, own, device = self.reduction.workers, words.numbers(), self.loop.config.device
        control_N = torch.zeros(self._control, dtype=torch.float64)
        at = self.reduction.index * len(own)
        control_N[at : at + len(own)] = torch.tensor(own, dtype=torch.float64)
        bucket_N = (
            torch.cat([control_N.to(device), *self._gradients()]) if gradients else control_N.to(device)
        )
        with self.loop.stages("reduce"):
            self.reduction.sum(bucket_N)
        if gradients:
            self._spread(bucket_N[self._control :])
        said_WN = bucket_N[: self._control].view(workers, -1).tolist()
        return [words_of(said_N, len(self.loop.schema.tasks)) for said_N in said_WN]

    def _gradients(self) -> list[Tensor]:
        has_P = torch.tensor(
            [p.grad is not None for p in self._parameters],
            dtype=torch.float64,
            device=self.loop.config.device,
        )
        flat = [
            (torch.zeros_like(p) if p.grad is None else p.grad).detach().to(torch.float64).flatten()
            for p in self._parameters
        ]
        return [has_P, *flat]

    def _spread(self, sum_N: Tensor) -> None:
        sizes = [len(self._parameters), *(p.numel() for p in self._parameters)]
        has_P, *flat = torch.split(sum_N, sizes)
        for parameter, has, gradient in zip(self._parameters, has_P.tolist(), flat, strict=True):
            parameter.grad = gradient.to(parameter.dtype).view_as(parameter) if has else None

    def _apply(self, learned: _Learned | None, *, weighted: bool) -> None:
        """What all do alike, then what is this worker's own."""
        loop = self.loop
        loop.num_steps += 1
        if weighted and not loop.optimizer.step():
            raise NotFiniteError(
                "the sum of the workers' gradients is not finite, and each was: everyone must be restored"
            )
        if learned:
            loop.tell(learned.pulled, learned.scored_BT)
        if weighted:
            loop.push(
                learned.pulled if learned and learned.weighted else None,
                clip_row_norm=loop.config.clip_row_norm,
            )
        if self._hand is not None and not self._waiting:
            loop.settle(self._hand)
            loop.feed.trained()
            self._hand = None
