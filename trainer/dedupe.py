"""Skips samples that the joiner emits again within the horizon (guarantee G2). Exact, not probabilistic.

Time is the samples' close time: a replay of a month remembers one hour of it, however fast it runs. A single
sample cannot move the clock (`MedianEventTime`), and one with an odd time holds back no other id.

    claim ──► claimed: later claims see its ids ──► settle ──► trained ──► cut ──► runs, for the commit
              (ids older than the horizon
               are forgotten)

Letters: R requests, N ids of a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from roostream.runtime.event_time import NUM_RECENT, MedianEventTime
from roostream.runtime.manifest import StoredFile

_START = -(1 << 63)
_FORGETTING_STEPS = 64  # per horizon: ids are forgotten together with those of about the same time
_MAX_MERGED = 1 << 20  # ids; a run that has more live ones is not written again


class IdRun(NamedTuple):
    """Ids that were trained one after the other. Never changed, so that a commit can refer to the file of an
    earlier one."""

    id_N: np.ndarray  # int64
    time_ms_N: np.ndarray  # int64: forgotten a horizon after it, see `Dedupe`
    floor_ms: int = _START  # ids below it are forgotten
    newest_ms: int = _START  # largest of time_ms_N
    file: StoredFile | None = None  # None: in no commit yet

    @classmethod
    def of(cls, id_N: np.ndarray, time_ms_N: np.ndarray) -> IdRun:
        return cls(id_N, time_ms_N, newest_ms=int(time_ms_N.max(initial=_START)))

    @property
    def live_N(self) -> np.ndarray:
        """bool: which ids are not forgotten."""
        return self.time_ms_N >= self.floor_ms

    @property
    def num_live(self) -> int:
        return int(np.count_nonzero(self.live_N))

    def raised(self, floor_ms: int) -> IdRun:
        return self._replace(floor_ms=max(self.floor_ms, floor_ms))


def merged(runs: Sequence[IdRun]) -> IdRun:
    """One run of the live ids, in no file."""
    ids = [run.id_N[run.live_N] for run in runs]
    times = [run.time_ms_N[run.live_N] for run in runs]
    return IdRun.of(np.concatenate(ids), np.concatenate(times))


def plan_files(runs: Sequence[IdRun]) -> tuple[list[IdRun], IdRun | None]:
    """(runs that stay in their files, one new run to write). The new run has all ids that are in no file,
    and those of smaller runs: the number of files stays small, and an id is written again only as often as
    its run is merged with a larger one."""
    live = [run for run in runs if run.newest_ms >= run.floor_ms]
    new = [run for run in live if run.file is None]
    num_new = sum(run.num_live for run in new)
    kept: list[IdRun] = []
    for run in reversed([run for run in live if run.file is not None]):
        num_live = run.num_live
        is_small = num_live <= 2 * num_new and num_live + num_new <= _MAX_MERGED
        if num_new and (is_small or 2 * num_live <= len(run.id_N)):
            new.insert(0, run)
            num_new += num_live
        else:
            kept.insert(0, run)
    return kept, merged(new) if num_new else None


class DedupeSnapshot(NamedTuple):
    """State of a partition between two chunks."""

    runs: tuple[IdRun, ...] = ()
    recent_ms: tuple[int, ...] = ()  # newest close times, for the clock

    @classmethod
    def of(cls, sample_id: np.ndarray, close_ms: np.ndarray) -> DedupeSnapshot:
        """Ids with their close times, sorted by them."""
        return cls((IdRun.of(sample_id, close_ms),), tuple(close_ms[-NUM_RECENT:].tolist()))

    @property
    def num_ids(self) -> int:
        return sum(run.num_live for run in self.runs)


class _Claim(NamedTuple):
    new: IdRun
    floor_ms: int  # ids below it were forgotten with this claim
    recent_ms: tuple[int, ...]  # after the claim


class Dedupe:
    """Sample ids of one partition.

    The key of a sample decides its partition, so duplicates are in the same one. Ids are int64, times ms.
    An id is forgotten a horizon after its close time, or after the event time of its claim if that is later,
    at the end of a step of 1/64 horizon. Memory: about 130 bytes per id within the horizon.

    Everything is decided at the claim, in the order of the chunks. So the result does not depend on how many
    chunks are claimed ahead of training, nor on the times of the commits."""

    def __init__(self, horizon_ms: int) -> None:
        self.horizon_ms = horizon_ms
        self._step_ms = max(horizon_ms // _FORGETTING_STEPS, 1)
        # As of the newest claim.
        self._seen: set[int] = set()
        self._by_step: dict[int, list[np.ndarray]] = {}  # time // step → ids
        self._recent = MedianEventTime()
        self._floor_step = _START  # of the newest claim
        self._claims: deque[_Claim] = deque()  # not settled, oldest first
        # As of the newest settled claim.
        self._runs: tuple[IdRun, ...] = ()  # of the last cut
        self._floor_ms = _START  # for these: highest since the last cut
        self._tail: list[IdRun] = []  # since the last cut; each is over twice as long as the next one
        self._settled_ms: tuple[int, ...] = ()

    def claim(self, sample_id_R: np.ndarray, close_ms_R: np.ndarray) -> np.ndarray:
        """Claim ids. Returns bool [R]: True for the first occurrence of an id. The claim is in no `cut` until
        `settle`; claims are settled in their order."""
        new_R = np.zeros(len(sample_id_R), dtype=np.bool_)
        for r, id_ in enumerate(sample_id_R.tolist()):
            if id_ not in self._seen:
                self._seen.add(id_)
                new_R[r] = True
        self._recent.add(close_ms_R.tolist())
        now_ms = self._recent.middle_ms
        new = IdRun.of(sample_id_R[new_R], np.maximum(close_ms_R[new_R], now_ms))
        self._file(new)
        floor_ms = max((now_ms - self.horizon_ms) // self._step_ms * self._step_ms, _START)
        self._forget(floor_ms)
        self._claims.append(_Claim(new, floor_ms, tuple(self._recent.times_ms)))
        return new_R

    def settle(self) -> None:
        """The samples of the oldest claim are trained or skipped."""
        claim = self._claims.popleft()
        self._settled_ms, run = claim.recent_ms, claim.new.raised(claim.floor_ms)
        self._floor_ms = max(self._floor_ms, claim.floor_ms)
        tail = [earlier.raised(claim.floor_ms) for earlier in self._tail]
        while tail and len(tail[-1].id_N) <= 2 * len(run.id_N):
            run = merged([tail.pop(), run])
        self._tail = [run for run in (*tail, run) if run.newest_ms >= run.floor_ms]

    def cut(self) -> DedupeSnapshot:
        """All trained ids. Takes as long as the ids that were trained since the last cut."""
        tail = [merged(self._tail)] if self._tail else []
        runs = [*(run.raised(self._floor_ms) for run in self._runs), *tail]
        self._runs = tuple(run for run in runs if run.newest_ms >= run.floor_ms)
        self._tail, self._floor_ms = [], _START
        return DedupeSnapshot(self._runs, self._settled_ms)

    def committed(self, runs: Iterable[IdRun]) -> None:
        """A commit has stored the ids of the last cut in these runs."""
        self._runs = tuple(runs)

    def load(self, snapshot: DedupeSnapshot) -> None:
        """Load a snapshot, without claims."""
        self._runs, self._tail, self._floor_ms = tuple(snapshot.runs), [], _START
        self._settled_ms = snapshot.recent_ms
        self._recent = MedianEventTime()
        self._recent.add(snapshot.recent_ms)
        self._claims.clear()
        self._seen.clear()
        self._by_step.clear()
        self._floor_step = _START
        for run in snapshot.runs:
            live = merged([run])
            self._seen.update(live.id_N.tolist())
            self._file(live)

    def _file(self, run: IdRun) -> None:
        step_N = run.time_ms_N // self._step_ms
        for step in np.unique(step_N).tolist():
            self._by_step.setdefault(step, []).append(run.id_N[step_N == step])

    def _forget(self, floor_ms: int) -> None:
        """Forget the ids with a time before `floor_ms`. No claim adds an id below its own floor, so nothing
        is left to forget while the floor stays in the same step."""
        before, self._floor_step = self._floor_step, floor_ms // self._step_ms
        if self._floor_step == before:
            return
        for step in [step for step in self._by_step if step < self._floor_step]:
            for id_N in self._by_step.pop(step):
                self._seen.difference_update(id_N.tolist())
