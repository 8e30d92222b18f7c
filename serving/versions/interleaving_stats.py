"""Counts which of two interleaved rankers wins: the one whose team has more items that were engaged with.

Interleaved lists are kept in bounded memory, and engagements are matched by request id. An engagement after
MAX_CANDIDATES other candidates, or in another process, is not counted. Each item counts once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from roostream.runtime.kafka.topics import ENGAGEMENTS
from roostream.schema.ids import sample_id, signed
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from serving.feature_log.format import LogRecord
from serving.ordering import OURS, RIVAL

MAX_CANDIDATES = 200_000
MAX_PAIRS = 32  # pairs of versions whose counts are kept, the newest
OUTCOMES = ("served", "rival", "tie")


class Pair(NamedTuple):
    """The names of two versions whose orders are interleaved."""

    served: str
    rival: str


class _InterleavedList:
    """An interleaved list: the team of each item, and the items with an engagement."""

    __slots__ = ("engaged", "pair", "team_of")

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.team_of: dict[int, int] = {}  # item → team
        self.engaged: set[int] = set()

    @property
    def outcome(self) -> str:
        """One of OUTCOMES, or "" while there is no engagement."""
        if not self.engaged:
            return ""
        teams = [self.team_of[item] for item in self.engaged]
        ours, rival = teams.count(OURS), teams.count(RIVAL)
        return "served" if ours > rival else "rival" if rival > ours else "tie"


class InterleavingStats:
    """Counts engagements of one action. Thread-safe."""

    def __init__(self, action: str, max_candidates: int = MAX_CANDIDATES) -> None:
        self.action, self.max_candidates = action, max_candidates
        self.num_lists = self.num_engaged = self.num_failed = 0
        self._lock = threading.Lock()
        self._lists: dict[int, _InterleavedList] = {}  # sample id → list, oldest first
        self._num_candidates = 0
        self._sums: dict[Pair, Counter[str]] = {}

    def record_list(
        self, key: bytes, request_id: str, pair: Pair, item_ids: Sequence[int], team_n: Sequence[int]
    ) -> None:
        """Store a list before it is shown. A further page of the request is added to it; a repeated one
        changes nothing."""
        id_ = sample_id(key, request_id)
        with self._lock:
            known = self._lists.get(id_)
            before = 0 if known is None else len(known.team_of)
            if known is None or known.pair != pair:
                known = self._lists[id_] = _InterleavedList(pair)
                self.num_lists += 1
            known.team_of = {**dict(zip(item_ids, team_n, strict=True)), **known.team_of}
            self._num_candidates += len(known.team_of) - before
            while self._num_candidates > self.max_candidates:
                oldest = self._lists.pop(next(iter(self._lists)))
                self._num_candidates -= len(oldest.team_of)

    def record_failure(self) -> None:
        """Count a request that is not interleaved because the rival could not score it."""
        self.num_failed += 1

    def record_engagements(self, records: Iterable[LogRecord]) -> None:
        """Count engagements as they are logged; those of unknown requests are ignored."""
        if not self._lists:
            return
        for record in records:
            if record.topic == ENGAGEMENTS:
                _, message = wire.decode(record.value)
                assert isinstance(message, pb.Engagement)
                if message.action == self.action:
                    self._credit(sample_id(record.key, message.header.request_id), signed(message.item_id))

    def outcomes(self) -> dict[str, int]:
        """Return outcome → requests with an engagement, over all pairs that are kept."""
        with self._lock:
            return {outcome: sum(sums[outcome] for sums in self._sums.values()) for outcome in OUTCOMES}

    def outcomes_by_pair(self) -> dict[Pair, dict[str, int]]:
        """The same by pair, the newest pair last."""
        with self._lock:
            return {
                pair: {outcome: sums[outcome] for outcome in OUTCOMES} for pair, sums in self._sums.items()
            }

    def _credit(self, id_: int, item: int) -> None:
        with self._lock:
            list_ = self._lists.get(id_)
            if list_ is None or item not in list_.team_of or item in list_.engaged:
                return
            before = list_.outcome
            list_.engaged.add(item)
            self.num_engaged += 1
            sums = self._sums.setdefault(list_.pair, Counter())
            sums[before] -= sums[before] > 0
            sums[list_.outcome] += 1
            if len(self._sums) > MAX_PAIRS:
                del self._sums[next(iter(self._sums))]
