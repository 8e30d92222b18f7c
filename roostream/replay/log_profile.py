"""Statistics of a log, collected while it is read: coverage of features, actions, list lengths, times.

They are part of the reports of a replay and of `roostream check`, and the basis of the warnings in
log_advice.py.

Letters: n rows, F floats, K lists of a side, L = n x K lists.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy as np

from roostream.errors import WireError, printable
from roostream.replay.events import Event, Request
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import Columns, Side, columns_of, missing_bits

_ROWS_AT_ONCE = 4096
_MAX_ACTIONS = 1000
_MAX_ORIGINS = 1 << 18
_MAX_ENGAGED = 1 << 16
_MAX_EARLY_MS = 1_000  # an engagement that is earlier than its request by more has the time of another clock
OTHER = "(more)"


class LogProfile:
    """Call `add` with every event, in time order. Memory: a few numbers per feature, the file positions of
    the newest 262,144 events, and the engagement times of the newest 65,536 requests."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.num_impressions = self.num_candidates = self.num_with_repeats = 0
        self.num_anonymous = self.num_without_user = 0
        self.first_ms = self.last_ms = 0
        self.num_unlogged_clicks = (0, 0)  # before the log begins, and after
        self.num_early = self.max_early_ms = 0  # engagements more than a second before their request
        self._engaged_ms: dict[tuple[int, int, str], list[int]] = {}  # user, session, request → times
        self.actions: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter()
        self.origins = Origins()
        self._sides: dict[Side, _Side] = {"ro": _Side(schema, "ro"), "nro": _Side(schema, "nro")}

    def add(self, event: Event, ro: bytes | None = None, nro: bytes = b"") -> None:
        """Count an event. `ro`, `nro`: encoded blocks of an impression with its online features; `ro` is None
        for a further page."""
        self.first_ms = self.first_ms or event.time_ms
        self.last_ms = event.time_ms
        self.origins.add(event)
        request = event.user_id, event.session_id, event.request_id
        if not isinstance(event, Request):
            self._engaged_ms.setdefault(request, []).append(event.time_ms)
            if len(self._engaged_ms) > _MAX_ENGAGED:
                del self._engaged_ms[next(iter(self._engaged_ms))]
            action = printable(event.action)
            self.actions[action if action in self.actions or len(self.actions) < _MAX_ACTIONS else OTHER] += 1
            return
        num_rows = len(event.items_n)
        self.num_impressions += 1
        self.num_candidates += num_rows
        self.num_anonymous += not (event.user_id or event.session_id)
        self.num_without_user += not event.user_id
        self.num_with_repeats += len(set(event.items_n.tolist())) < num_rows
        self.lengths[num_rows] += 1
        if ro is not None:
            self._sides["ro"].add(ro, 1)
            early_ms = [event.time_ms - ms for ms in self._engaged_ms.pop(request, ())]
            early_ms = [ms for ms in early_ms if ms > _MAX_EARLY_MS]
            self.num_early += len(early_ms)
            self.max_early_ms = max(self.max_early_ms, *early_ms, 0)
        self._sides["nro"].add(nro, num_rows)

    def features(self) -> dict[str, dict[str, Any]]:
        """Feature → `side`, `kind`, `share` of rows with a value, and `min`, `mean`, `max`.

        The last three describe the value of a float or the length of a list; they are None where no row has a
        value.
        """
        return self._sides["ro"].report() | self._sides["nro"].report()

    def zero_ids(self) -> dict[str, int]:
        """Feature of kind ids → number of rows whose first id is 0, which counters take as unknown; only
        features with some."""
        return self._sides["ro"].zero_ids() | self._sides["nro"].zero_ids()

    def report(self) -> dict[str, Any]:
        """All statistics, with stable keys."""
        lengths_N = np.repeat(list(self.lengths), list(self.lengths.values()))
        shown = (0, 25, 50, 75, 95, 100) if len(lengths_N) else ()
        quantiles = {f"p{q}": int(np.percentile(lengths_N, q, method="lower")) for q in shown}
        return {
            "impressions": self.num_impressions,
            "candidates": self.num_candidates,
            "actions": dict(self.actions),
            "first_ms": self.first_ms,
            "last_ms": self.last_ms,
            "list_lengths": {**quantiles, "with_an_item_twice": self.num_with_repeats},
            "without_user": self.num_without_user,
            "without_user_and_session": self.num_anonymous,
            "clicks_elsewhere": dict(zip(("before", "within"), self.num_unlogged_clicks, strict=True)),
            "features": self.features(),
        }


class _Side:
    """Statistics of the features of one side."""

    def __init__(self, schema: Schema, side: Side) -> None:
        self.side, self._floats, self._lists = side, schema.floats(side), schema.lists(side)
        self.num_rows = 0
        self._float_sums, self._list_sums = _Coverage(len(self._floats)), _Coverage(len(self._lists))
        self._zero_ids_K = np.zeros(len(self._lists), np.int64)
        self._waiting: list[tuple[Columns, int]] = []
        self._num_waiting = 0

    def add(self, block: bytes, num_rows: int) -> None:
        self.num_rows += num_rows
        if block:
            self._waiting.append((columns_of(block), num_rows))
            self._num_waiting += num_rows
            if self._num_waiting >= _ROWS_AT_ONCE:
                self._count()

    def report(self) -> dict[str, dict[str, Any]]:
        self._count()
        out = {}
        for features, sums in ((self._floats, self._float_sums), (self._lists, self._list_sums)):
            for i, f in enumerate(features):
                out[f.name] = {"side": self.side, "kind": f.kind, **sums.report(i, self.num_rows)}
        return out

    def zero_ids(self) -> dict[str, int]:
        self._count()
        counts = zip(self._lists, self._zero_ids_K.tolist(), strict=True)
        return {f.name: count for f, count in counts if count and f.kind == "ids"}

    def _count(self) -> None:
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        if not waiting:
            return
        if self._floats:
            none = np.full(len(self._floats), np.nan, np.float32)
            parts = [c.floats if len(c.floats) else np.tile(none, n) for c, n in waiting]
            self._float_sums.add(np.concatenate(parts).reshape(-1, len(self._floats)).astype(np.float64))
        if self._lists:
            lengths = np.concatenate([_lengths(c, n * len(self._lists)) for c, n in waiting])
            self._list_sums.add(lengths.reshape(-1, len(self._lists)))
            for columns, _ in waiting:
                length_L = columns.lengths.astype(np.int64)
                has_id_L = length_L > 0
                first_L = np.cumsum(length_L) - length_L
                is_zero_L = np.zeros(len(length_L), np.int64)
                is_zero_L[has_id_L] = columns.ids[first_L[has_id_L]] == 0
                self._zero_ids_K += is_zero_L.reshape(-1, len(self._lists)).sum(axis=0)


def _lengths(columns: Columns, count: int) -> np.ndarray:
    """float64 [count], NaN where the list is missing."""
    if not len(columns.lengths):
        return np.full(count, np.nan)
    return np.where(missing_bits(columns, count), np.nan, columns.lengths.astype(np.float64))


class _Coverage:
    """Statistics of columns in which NaN means missing."""

    def __init__(self, width: int) -> None:
        self.present, self.sum = np.zeros(width, np.int64), np.zeros(width)
        self.min, self.max = np.full(width, np.inf), np.full(width, -np.inf)

    def add(self, values_NF: np.ndarray) -> None:
        present_NF = ~np.isnan(values_NF)
        self.present += present_NF.sum(axis=0)
        self.sum += np.where(present_NF, values_NF, 0.0).sum(axis=0)
        self.min = np.minimum(self.min, np.where(present_NF, values_NF, np.inf).min(axis=0))
        self.max = np.maximum(self.max, np.where(present_NF, values_NF, -np.inf).max(axis=0))

    def report(self, i: int, num_rows: int) -> dict[str, float | None]:
        n = int(self.present[i])
        share = n / num_rows if num_rows else None
        if not n:
            return {"share": share, "min": None, "mean": None, "max": None}
        smallest, mean, largest = (float(x) for x in (self.min[i], self.sum[i] / n, self.max[i]))
        return {"share": share, "min": smallest, "mean": mean, "max": largest}


class Origins:
    """File positions of the newest events by id, to locate dead letters in the log."""

    def __init__(self, max_size: int = _MAX_ORIGINS) -> None:
        self._where: dict[int | str, str] = {}
        self._order: deque[int | str] = deque()
        self._max_size = max_size

    def add(self, event: Event) -> None:
        key = event.request_id if isinstance(event, Request) else event.event_id
        if event.where and key not in self._where:
            self._where[key] = event.where
            self._order.append(key)
            if len(self._order) > self._max_size:
                del self._where[self._order.popleft()]

    def find(self, letter: pb.DeadLetter) -> str:
        """`file:line` of the event behind a dead letter, or "" if it is not known."""
        request_id = letter.request_id
        if not (letter.event_id or request_id):
            try:
                message = wire.decode(letter.raw)[1]
            except WireError:
                return ""
            request_id = message.header.request_id if isinstance(message, (pb.Impression, pb.Sample)) else ""
        return self._where.get(letter.event_id or request_id, "")
