"""Deferral: gradients of hot rows that hardly move any more wait at the worker and are pushed together (docs/selection.md).

Of each row that is looked at, all of this worker:

    v   visits: batches that brought it a gradient          b, c   gradients that wait, their sum and number
    m   movement a visit, .9 m + .1 d; d = ||w - w'|| / n at the first pull after a push of n visits, w' the row before it

    deferred iff v >= min_visits and m <= T and c < visits - 1 and less than expire_after / 4 since its last push
    T        the `share`-quantile of m over the last `window` visits of hot rows
    pushed   b + g; every `visits`-th visit pushes, so m stays alive: a row that moves again is pushed at once

Rows that aren't looked at (beyond `max_rows` the longest unvisited ones without a sum give way) are pushed at each visit. Steps
and event time decide, never clocks. Slipstream's insight (a hot row that has stopped moving needs no attention), on rows.

Letters: U rows of a batch, P those pushed, N rows looked at, M and K some of them, D width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from roostream.schema.schema import Schema
from roostream.wire.lookup import Lookup, StackLookup
from trainer.selection.config import DeferralConfig
from trainer.selection.deferral_kernels import (
    KEPT,
    VISITED,
    begin,
    free_rows,
    move,
    places,
    split,
    touch,
    visit,
)
from trainer.selection.row_numbers import RowNumbers, hashed

_JUDGED_EVERY = 8  # takes from one T to the next
_FIRST_PLACES = 1 << 16  # taken at once; what is never used takes no memory


class Pushed(NamedTuple):
    """What goes to the shards."""

    lookup: Lookup
    gradients: dict[str, np.ndarray]  # stack → float32 [U, D]


class _WatchedStack:
    """The rows of one stack that are looked at."""

    def __init__(self, config: DeferralConfig, width: int, expire_ms: Mapping[int, int]) -> None:
        """`expire_ms`: table id → `expire_after_ms`, of tables that have one."""
        self.config, self.width, self.expire_ms = config, width, dict(expire_ms)
        self.rows = RowNumbers(room=min(config.max_rows, _FIRST_PLACES))
        self._make_places(min(config.max_rows, _FIRST_PLACES))
        self.recent, self.num_recent = (
            np.zeros(config.window, np.float32),
            0,
        )  # m of visits of hot rows, in a ring
        self.T, self.num_takes = np.float32(-np.inf), 0
        self.num_visits = self.num_pushes = self.num_unfrozen = 0  # since the start

    def take(
        self, keys: StackLookup, row_UD: np.ndarray, gradient_UD: np.ndarray, now_ms: int
    ) -> tuple[StackLookup, np.ndarray]:
        """Which rows are pushed, P of U, and with which gradients, float32 [P, D]."""
        self.num_takes += 1
        config, number_U = self.config, self._numbered(keys)
        at = (self.recent, self.num_recent, self.num_takes, config.min_visits, self.T)
        touch(number_U, self.of_N, self.w_ND)
        self.num_recent, num_unfrozen = visit(number_U, row_UD, self.of_N, self.w_ND, *at)
        self.num_unfrozen += num_unfrozen
        self._choose_threshold()
        told = (config.min_visits, config.visits, self.T, config.choice == "random", now_ms)
        batch = (keys.table_U, keys.id_U, row_UD, gradient_UD)
        table_P, id_P, out_PD = split(number_U, *batch, self.of_N, self.w_ND, self.b_ND, *told)
        self.num_visits += len(number_U)
        self.num_pushes += len(id_P)
        return StackLookup(table_P, id_P, {}), out_PD

    def flush(self) -> tuple[StackLookup, np.ndarray]:
        """What waits: keys and sums; nothing waits any more."""
        n = np.flatnonzero(self.of_N["c"])
        keys, sum_ND = StackLookup(self.rows.table_N[n], self.rows.id_N[n], {}), self.b_ND[n]
        self.b_ND[n], self.of_N["c"][n] = 0, 0
        self.of_N["carried"][n] = 0  # what it moves was not seen before: nothing is said of m
        self.num_pushes += len(n)
        return keys, sum_ND

    @property
    def num_waiting(self) -> int:
        return int(np.count_nonzero(self.of_N["c"]))

    def _choose_threshold(self) -> None:
        """T, now and then."""
        if self.num_recent and (self.num_takes % _JUDGED_EVERY == 0 or self.num_takes < _JUDGED_EVERY):
            known = self.recent[: min(self.num_recent, self.config.window)]
            place = int(np.ceil(self.config.share * len(known) - 1e-9)) - 1
            self.T = np.partition(known, place)[place] if place >= 0 else np.float32(-np.inf)

    def _numbered(self, keys: StackLookup) -> np.ndarray:
        """int64 [U]; -1 = not looked at, for want of room. A row that wasn't has a place from now on that nobody has visited."""
        most, table_U, id_U = self.config.max_rows, keys.table_U, keys.id_U
        if len(self.rows) + len(id_U) > most:
            number_U = self.rows.find(table_U, id_U)
            need = len(self.rows) + int((number_U < 0).sum()) - most
            if need > 0:
                self._make_room(need, number_U[number_U >= 0])
        return self._placed(table_U, id_U, most)

    def _placed(self, table_U: np.ndarray, id_U: np.ndarray, most: int | None = None) -> np.ndarray:
        """As `RowNumbers.number`, with places."""
        first = len(self.rows)
        number_U = self.rows.number(table_U, id_U, most)
        if len(self.rows) > len(self.of_N):
            self._grow(first)
        begin(self.of_N, self.w_ND, first, len(self.rows))
        if self.expire_ms or self.config.choice == "random":
            self._judge_keys(first)
        return number_U

    def _judge_keys(self, first: int) -> None:
        """What follows from their keys alone, of rows from `first` on."""
        of_M, table_M, id_M = (
            self.of_N[first : len(self.rows)],
            self.rows.table_N[first:],
            self.rows.id_N[first:],
        )
        for table, expire_ms in self.expire_ms.items():
            of_M["late_ms"][table_M == table] = expire_ms // 4
        if self.config.choice == "random":
            of_M["calm"] = (hashed(table_M, id_M) >> np.uint64(11)) * 2.0**-53 < self.config.share

    def _grow(self, used: int) -> None:
        """Places for four times as many, of which `used` are copied: all copying together is linear."""
        before = self.of_N, self.b_ND, self.w_ND
        most = max(self.config.max_rows, len(self.rows))
        self._make_places(min(max(len(self.rows), 4 * len(self.of_N)), most))
        for old, new in zip(before, (self.of_N, self.b_ND, self.w_ND), strict=True):
            new[:used] = old[:used]

    def _make_places(self, num: int) -> None:
        """Of numbers, and for more."""
        self.of_N = places((num,), VISITED)
        self.b_ND, self.w_ND = (places((num, self.width), np.dtype(np.float32)) for _ in range(2))

    def _make_room(self, need: int, in_use: np.ndarray) -> None:
        """Forget rows that nothing waits for, the longest unvisited first, of equals the lower numbers: an eighth of all at a
        time."""
        free_M, seen_M = free_rows(self.of_N, len(self.rows), in_use)
        num_gone = min(max(need, self.config.max_rows // 8), len(free_M))
        if not num_gone:
            return
        last = np.partition(seen_M, num_gone - 1)[num_gone - 1]
        is_older, is_last = seen_M < last, np.flatnonzero(seen_M == last)
        is_older[is_last[: num_gone - int(is_older.sum())]] = True
        self._forget(free_M[is_older])

    def forget_others(self, tables: Collection[int]) -> None:
        """Rows of tables that are none of these, and what waits for them."""
        self._forget(np.flatnonzero(~np.isin(self.rows.table_N, list(tables))))

    def _forget(self, gone_M: np.ndarray) -> None:
        """int64, rising numbers."""
        move(self.of_N, self.w_ND, self.b_ND, gone_M, *self.rows.drop(gone_M))

    def state(self) -> dict[str, np.ndarray]:
        recent = self.recent[: min(self.num_recent, self.config.window)].copy()
        numbers = np.array(
            [self.num_recent, self.num_takes, self.num_visits, self.num_pushes, self.num_unfrozen], np.int64
        )
        n = len(self.rows)
        own = {"table": self.rows.table_N, "id": self.rows.id_N, "b": self.b_ND[:n], "w": self.w_ND[:n]}
        columns = {name: self.of_N[name][:n] for name in KEPT}
        copied = {name: value.copy() for name, value in {**own, **columns}.items()}
        return {**copied, "recent": recent, "numbers": numbers, "T": np.array(self.T)}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Of a stack of which nothing is known. Rows of another width are forgotten."""
        if state["b"].shape[1] != self.width:
            return
        number_N = self._placed(state["table"], state["id"])
        for name in KEPT:
            self.of_N[name][number_N] = state[name]
        self.b_ND[number_N], self.w_ND[number_N] = state["b"], state["w"]
        recent = state["recent"][-self.config.window :]
        self.recent[: len(recent)] = recent
        self.num_recent, self.num_takes, self.num_visits, self.num_pushes, self.num_unfrozen = state[
            "numbers"
        ].tolist()
        self.T = np.float32(state["T"])


class Deferral:
    """Of one worker, which is the only one."""

    def __init__(self, config: DeferralConfig, schema: Schema) -> None:
        self.config, self.schema = config, schema
        self.begin()

    def begin(self) -> None:
        """Nothing was visited, nothing waits."""
        self.stacks = {
            stack: _WatchedStack(
                self.config, tables[0].dim, {t.id: t.expire_after_ms for t in tables if t.expire_after_ms}
            )
            for stack, tables in self.schema.stacks.items()
        }

    def take(
        self, lookup: Lookup, rows: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray], now_ms: int
    ) -> Pushed:
        """A batch's gradients, clipped; `rows`: as pulled for it. What is to be pushed of it now, with what waited for that."""
        stacks, out = dict(lookup.stacks), {}
        for stack, gradient_UD in gradients.items():
            keys = lookup.stacks[stack]
            stacks[stack], out[stack] = self.stacks[stack].take(keys, rows[stack], gradient_UD, now_ms)
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
        return sum(its.num_waiting for its in self.stacks.values())

    def report(self) -> dict[str, float | None]:
        """`row_visits`, `row_pushes`, the share between, rows that wait now, and how often one that waited moved again."""
        visits, pushes = (
            sum(getattr(its, name) for its in self.stacks.values()) for name in ("num_visits", "num_pushes")
        )
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
        return {
            f"deferral.{stack}.{name}": value
            for stack, state in states.items()
            for name, value in state.items()
        }

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Become what `state` gave, nothing where it gave nothing. Tables that are gone and widths of before are forgotten."""
        self.begin()
        for stack, its in self.stacks.items():
            prefix = f"deferral.{stack}."
            if state := {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}:
                its.load(state)
                its.forget_others([table.id for table in self.schema.stacks[stack]])
