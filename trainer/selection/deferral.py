"""Deferral: gradients of hot rows that hardly move any more wait at the worker and are pushed together (docs/selection.md).

Of each row that is looked at, all of this worker:

    v   visits: batches that brought it a gradient          b, c   gradients that wait, their sum and number
    m   movement a visit, .9 m + .1 d; d = ||w - w'|| / n at the first pull after a push of n visits, w' the row before it

    deferred iff v >= min_visits and m <= T and c < visits - 1 and less than expire_after / 4 since its last push
    T        the `share`-quantile of m over the last `window` visits of hot rows
    pushed   b + g; every `visits`-th visit pushes, so m stays alive: a row that moves again is pushed at once

Rows that aren't looked at (beyond `max_rows` the longest unvisited ones without a sum give way) are pushed at each visit. Steps
and event time decide, never clocks. Slipstream's insight (a hot row that has stopped moving needs no attention), on rows.

Letters: U rows of a batch, N rows looked at, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from roo.lookup import Lookup, StackLookup
from roo.schema import Schema
from trainer.selection.config import DeferralConfig
from trainer.selection.row_numbers import RowNumbers, hashed

_FADE = np.float32(0.9)
_JUDGED_EVERY = 8  # takes from one T to the next
_COLUMNS = {"v": np.int64, "m": np.float32, "c": np.int64, "carried": np.int64, "pushed_ms": np.int64, "seen": np.int64}


def _first(column: str) -> float:
    """Of a row that was not visited."""
    return np.inf if column == "m" else 0


class Pushed(NamedTuple):
    """What goes to the shards."""

    lookup: Lookup
    gradients: dict[str, np.ndarray]  # stack → float32 [U, D]


class _WatchedStack:
    """The rows of one stack that are looked at."""

    def __init__(self, config: DeferralConfig, width: int, expire_ms: Mapping[int, int]) -> None:
        """`expire_ms`: table id → `expire_after_ms`, of tables that have one."""
        self.config, self.width, self.expire_ms = config, width, dict(expire_ms)
        self.rows = RowNumbers()
        self.of = {name: np.zeros(0, kind) for name, kind in _COLUMNS.items()}  # of numbers, and of places for more
        self.b_ND, self.w_ND = (np.zeros((0, width), np.float32) for _ in range(2))
        self.recent, self.num_recent = np.zeros(config.window, np.float32), 0  # m of visits of hot rows, in a ring
        self.T, self.num_takes = np.float32(-np.inf), 0
        self.num_visits = self.num_pushes = self.num_unfrozen = 0  # since the start

    def take(self, keys: StackLookup, row_UD: np.ndarray, gradient_UD: np.ndarray, now_ms: int) -> tuple[np.ndarray, np.ndarray]:
        """bool [U], which rows are pushed, and with which gradients, float32 [U, D]."""
        self.num_takes += 1
        number_U = self._numbered(keys)
        known_U = number_U >= 0
        n, w_ND, g_ND = number_U[known_U], row_UD[known_U], gradient_UD[known_U]
        of = self.of
        self._move(n, w_ND)
        of["v"][n] += 1
        of["seen"][n] = self.num_takes
        hot_N = of["v"][n] >= self.config.min_visits
        self._remember(of["m"][n[hot_N]])
        waits_N = hot_N & self._is_calm(n) & (of["c"][n] < self.config.visits - 1)
        waits_N &= ~self._must_be_stamped(n, now_ms)
        sum_ND = self.b_ND[n] + g_ND
        out_UD, pushed_U = gradient_UD.copy(), ~known_U
        pushed_U[known_U] = ~waits_N
        out_UD[known_U] = sum_ND
        self.b_ND[n] = np.where(waits_N[:, None], sum_ND, 0)
        p = n[~waits_N]
        of["carried"][p], of["pushed_ms"][p], self.w_ND[p] = of["c"][p] + 1, now_ms, w_ND[~waits_N]
        of["c"][n] = np.where(waits_N, of["c"][n] + 1, 0)
        self.num_visits += len(keys.id_U)
        self.num_pushes += int(pushed_U.sum())
        return pushed_U, out_UD

    def flush(self) -> tuple[StackLookup, np.ndarray]:
        """What waits: keys and sums; nothing waits any more."""
        n = np.flatnonzero(self.of["c"])
        keys, sum_ND = StackLookup(self.rows.table_N[n], self.rows.id_N[n], {}), self.b_ND[n]
        self.b_ND[n], self.of["c"][n] = 0, 0
        self.of["carried"][n] = 0  # what it moves was not seen before: nothing is said of m
        self.num_pushes += len(n)
        return keys, sum_ND

    def _move(self, n: np.ndarray, w_ND: np.ndarray) -> None:
        """The first pull after a push: what it moved the row."""
        carried_N = self.of["carried"][n]
        after = np.flatnonzero(carried_N)
        if not len(after):
            return
        moved_ND = w_ND[after].astype(np.float64) - self.w_ND[n[after]]
        d_N = (np.sqrt((moved_ND * moved_ND).sum(axis=1)) / carried_N[after]).astype(np.float32)
        at = n[after]
        old_N = self.of["m"][at]
        self.of["m"][at] = np.where(np.isinf(old_N), d_N, _FADE * old_N + (1 - _FADE) * d_N)
        self.of["carried"][at] = 0
        self.num_unfrozen += int(((old_N <= self.T) & (self.of["m"][at] > self.T)).sum())

    def _remember(self, m_N: np.ndarray) -> None:
        """Visits of hot rows; T now and then."""
        m_N = m_N[np.isfinite(m_N)][-self.config.window :]
        at = (self.num_recent + np.arange(len(m_N))) % self.config.window
        self.recent[at] = m_N
        self.num_recent += len(m_N)
        if self.num_recent and (self.num_takes % _JUDGED_EVERY == 0 or self.num_takes < _JUDGED_EVERY):
            known = self.recent[: min(self.num_recent, self.config.window)]
            place = int(np.ceil(self.config.share * len(known) - 1e-9)) - 1
            self.T = np.partition(known, place)[place] if place >= 0 else np.float32(-np.inf)

    def _is_calm(self, n: np.ndarray) -> np.ndarray:
        """bool: what the share is taken by."""
        if self.config.choice == "stale":
            return np.asarray(self.of["m"][n] <= self.T)
        return (hashed(self.rows.table_N[n], self.rows.id_N[n]) >> np.uint64(11)) * 2.0**-53 < self.config.share

    def _must_be_stamped(self, n: np.ndarray, now_ms: int) -> np.ndarray:
        """bool: a row that waits for longer could expire."""
        late_N = np.zeros(len(n), np.bool_)
        for table, expire_ms in self.expire_ms.items():
            late_N |= (self.rows.table_N[n] == table) & (now_ms - self.of["pushed_ms"][n] >= expire_ms // 4)
        return late_N

    def _numbered(self, keys: StackLookup) -> np.ndarray:
        """int64 [U]; -1 = not looked at, for want of room."""
        number_U = self.rows.find(keys.table_U, keys.id_U)
        new_U = np.flatnonzero(number_U < 0)
        if not len(new_U):
            return number_U
        if len(self.rows) + len(new_U) > self.config.max_rows:
            self._make_room(len(new_U), number_U[number_U >= 0])
            number_U = self.rows.find(keys.table_U, keys.id_U)
            new_U = np.flatnonzero(number_U < 0)
        new_U = new_U[: self.config.max_rows - len(self.rows)]
        number_U[new_U] = self.rows.add(keys.table_U[new_U], keys.id_U[new_U])
        self._grow()
        return number_U

    def _grow(self) -> None:
        """A place for each row: twice as many as before, so that all copying together is linear."""
        before = len(self.b_ND)
        if len(self.rows) <= before:
            return
        by = min(max(len(self.rows), 2 * before), max(self.config.max_rows, len(self.rows))) - before
        for name, kind in _COLUMNS.items():
            self.of[name] = np.concatenate([self.of[name], np.full(by, _first(name), kind)])
        more = np.zeros((by, self.width), np.float32)
        self.b_ND, self.w_ND = np.concatenate([self.b_ND, more]), np.concatenate([self.w_ND, more])

    def _make_room(self, need: int, in_use: np.ndarray) -> None:
        """Drop rows that nothing waits for, the longest unvisited first: an eighth of all at a time."""
        n = len(self.rows)
        free_N = self.of["c"][:n] == 0
        free_N[in_use] = False
        order = np.argsort(np.where(free_N, self.of["seen"][:n], np.iinfo(np.int64).max), kind="stable")
        gone = order[: min(max(need, self.config.max_rows // 8), int(free_N.sum()))]
        kept_N = np.ones(len(self.rows), np.bool_)
        kept_N[gone] = False
        self.keep(kept_N)

    def keep(self, kept_N: np.ndarray) -> None:
        """Forget the other rows, and what waits for them."""
        n = len(self.rows)
        self.rows = RowNumbers(self.rows.table_N[kept_N], self.rows.id_N[kept_N])
        self.of = {name: column_N[:n][kept_N] for name, column_N in self.of.items()}
        self.b_ND, self.w_ND = self.b_ND[:n][kept_N], self.w_ND[:n][kept_N]

    def state(self) -> dict[str, np.ndarray]:
        recent = self.recent[: min(self.num_recent, self.config.window)].copy()
        numbers = np.array([self.num_recent, self.num_takes, self.num_visits, self.num_pushes, self.num_unfrozen], np.int64)
        n = len(self.rows)
        own = {"table": self.rows.table_N, "id": self.rows.id_N, "b": self.b_ND[:n].copy(), "w": self.w_ND[:n].copy()}
        columns = {name: column_N[:n].copy() for name, column_N in self.of.items()}
        return {**own, **columns, "recent": recent, "numbers": numbers, "T": np.array(self.T)}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Rows of another width are forgotten."""
        if state["b"].shape[1] != self.width:
            return
        self.rows = RowNumbers(state["table"], state["id"])
        self.of = {name: state[name].astype(kind) for name, kind in _COLUMNS.items()}
        self.b_ND, self.w_ND = state["b"].copy(), state["w"].copy()
        recent = state["recent"][-self.config.window :]
        self.recent[: len(recent)] = recent
        self.num_recent, self.num_takes, self.num_visits, self.num_pushes, self.num_unfrozen = state["numbers"].tolist()
        self.T = np.float32(state["T"])


class Deferral:
    """Of one worker, which is the only one."""

    def __init__(self, config: DeferralConfig, schema: Schema) -> None:
        self.config, self.schema = config, schema
        self.begin()

    def begin(self) -> None:
        """Nothing was visited, nothing waits."""
        self.stacks = {
            stack: _WatchedStack(self.config, tables[0].dim, {t.id: t.expire_after_ms for t in tables if t.expire_after_ms})
            for stack, tables in self.schema.stacks.items()
        }

    def take(self, lookup: Lookup, rows: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray], now_ms: int) -> Pushed:
        """A batch's gradients, clipped; `rows`: as pulled for it. What is to be pushed of it now, with what waited for that."""
        stacks, out = dict(lookup.stacks), {}
        for stack, gradient_UD in gradients.items():
            keys = lookup.stacks[stack]
            pushed_U, sum_UD = self.stacks[stack].take(keys, rows[stack], gradient_UD, now_ms)
            stacks[stack] = StackLookup(keys.table_U[pushed_U], keys.id_U[pushed_U], {})
            out[stack] = sum_UD[pushed_U]
        return Pushed(Lookup(stacks), out)

    def flush(self) -> Pushed | None:
        """All that waits; None: nothing does."""
        if not self.num_waiting:
            return None
        flushed = {stack: its.flush() for stack, its in self.stacks.items()}
        lookup = Lookup({stack: keys for stack, (keys, _) in flushed.items()})
        return Pushed(lookup, {stack: sum_ND for stack, (_, sum_ND) in flushed.items()})

    @property
    def num_waiting(self) -> int:
        """Rows for which gradients wait."""
        return sum(int((its.of["c"] > 0).sum()) for its in self.stacks.values())

    def report(self) -> dict[str, float | None]:
        """`row_visits`, `row_pushes`, the share between, rows that wait now, and how often one that waited moved again."""
        visits, pushes = (sum(getattr(its, name) for its in self.stacks.values()) for name in ("num_visits", "num_pushes"))
        return {
            "row_visits": visits,
            "row_pushes": pushes,
            "row_deferred_share": 1 - pushes / visits if visits else None,
            "deferred_rows": self.num_waiting,
            "unfrozen_rows": sum(its.num_unfrozen for its in self.stacks.values()),
        }

    def state(self) -> dict[str, np.ndarray]:
        """All that `load` needs, under `deferral.<stack>.`."""
        states = {stack: its.state() for stack, its in self.stacks.items()}
        return {f"deferral.{stack}.{name}": value for stack, state in states.items() for name, value in state.items()}

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Become what `state` gave, nothing where it gave nothing. Tables that are gone and widths of before are forgotten."""
        self.begin()
        for stack, its in self.stacks.items():
            prefix = f"deferral.{stack}."
            if state := {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}:
                its.load(state)
                its.keep(np.isin(its.rows.table_N, [table.id for table in self.schema.stacks[stack]]))
