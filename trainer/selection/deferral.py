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

Compiled loops of deferral, one row after another: what a batch's visits change of the rows that are looked at.

Letters: U rows of a batch, N rows looked at, D width, K tables that expire, M visits of hot rows, P rows pushed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from numba import njit

from roostream.schema.schema import Schema
from roostream.wire.lookup import Lookup, StackLookup
from trainer.selection.config import DeferralConfig
from trainer.selection.row_index import RowIndex, hashed

_JUDGED_EVERY = 8  # takes from one T to the next
_FIRST_PLACES = 1 << 16  # taken at once; what is never used takes no memory


class GradientPush(NamedTuple):
    """What goes to the shards."""

    lookup: Lookup
    gradients: dict[str, np.ndarray]  # stack → float32 [U, D]


class _DeferredStack:
    """The rows of one stack that are looked at."""

    def __init__(self, config: DeferralConfig, width: int, expire_ms: Mapping[int, int]) -> None:
        """`expire_ms`: table id → `expire_after_ms`, of tables that have one."""
        self.config, self.width, self.expire_ms = config, width, dict(expire_ms)
        self.rows = RowIndex(capacity=min(config.max_rows, _FIRST_PLACES))
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
            stack: _DeferredStack(
                self.config, tables[0].dim, {t.id: t.expire_after_ms for t in tables if t.expire_after_ms}
            )
            for stack, tables in self.schema.stacks.items()
        }

    def take(
        self, lookup: Lookup, rows: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray], now_ms: int
    ) -> GradientPush:
        """A batch's gradients, clipped; `rows`: as pulled for it. What is to be pushed of it now, with what waited for that."""
        stacks, out = dict(lookup.stacks), {}
        for stack, gradient_UD in gradients.items():
            keys = lookup.stacks[stack]
            stacks[stack], out[stack] = self.stacks[stack].take(keys, rows[stack], gradient_UD, now_ms)
        return GradientPush(Lookup(stacks), out)

    def flush(self) -> GradientPush | None:
        """All that waits; None: nothing does."""
        if not self.num_waiting:
            return None
        flushed = {stack: its.flush() for stack, its in self.stacks.items()}
        lookup = Lookup({stack: keys for stack, (keys, _) in flushed.items()})
        return GradientPush(lookup, {stack: sum_ND for stack, (_, sum_ND) in flushed.items()})

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


KEPT = {"v": "i8", "c": "i8", "carried": "i8", "pushed_ms": "i8", "seen": "i8", "m": "f4"}
"""Of a row: visits, gradients that wait, visits that its last push carried until it was pulled again, when that was, in which
batch it was visited last, and movement a visit."""
_OF_ROW = {**KEPT, "calm": "u1", "late_ms": "i8"}
VISITED = np.dtype({"names": [*_OF_ROW], "formats": [*_OF_ROW.values()], "itemsize": 64}, align=True)
"""And what follows from its key: whether chance has chosen it, and for how long nothing may wait. A line of a cache each."""
_LINE, _NEVER_MS = 64, np.iinfo(np.int64).max
_FADE = np.float32(0.9)


def places(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that begin with a line of a cache; what nobody touches takes no memory."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(num_bytes + _LINE, np.uint8)
    first = -raw.ctypes.data % _LINE
    return raw[first : first + num_bytes].view(dtype).reshape(shape)


@njit(cache=True, nogil=True)
def begin(of_N: np.ndarray, w_ND: np.ndarray, first: int, ends: int) -> None:
    """Rows `first` to `ends` - 1, for which nothing waits, are as if nobody had visited them, and never expire."""
    for n in range(first, ends):
        of = of_N[n]
        of.v = of.c = of.carried = of.pushed_ms = of.seen = of.calm = 0
        of.m, of.late_ms = np.inf, _NEVER_MS
        for j in range(w_ND.shape[1]):
            w_ND[n, j] = 0


@njit(cache=True, nogil=True)
def move(
    of_N: np.ndarray,
    w_ND: np.ndarray,
    b_ND: np.ndarray,
    gone_M: np.ndarray,
    from_K: np.ndarray,
    to_K: np.ndarray,
) -> None:
    """Nothing waits any more for the rows `gone_M`; those of `from_K` become those of `to_K`."""
    for n in gone_M:
        if of_N[n].c > 0:
            b_ND[n] = 0
    for k in range(len(from_K)):
        old, new = from_K[k], to_K[k]
        of_N[new] = of_N[old]
        w_ND[new] = w_ND[old]
        if of_N[old].c > 0:
            b_ND[new] = b_ND[old]
            b_ND[old] = 0


@njit(cache=True, nogil=True)
def free_rows(of_N: np.ndarray, num_rows: int, in_use: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [M], rising numbers; int64 [M], when each was visited last): of rows that nothing waits for, but for those `in_use`
    (int64, their numbers)."""
    taken_N = np.zeros(num_rows, np.bool_)
    taken_N[in_use] = True
    number_M, seen_M, num = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64), 0
    for n in range(num_rows):
        if of_N[n].c == 0 and not taken_N[n]:
            number_M[num], seen_M[num] = n, of_N[n].seen
            num += 1
    return number_M[:num], seen_M[:num]


@njit(cache=True, nogil=True)
def touch(number_U: np.ndarray, of_N: np.ndarray, w_ND: np.ndarray) -> float:
    """Reads what `visit` will, as `roostream.wire.lookup.touch_keys` does and for its reason; there is a row at least."""
    sum_ = 0.0
    for u in range(len(number_U)):
        n = max(number_U[u], 0)
        sum_ += of_N[n].m + w_ND[n, 0]
    return sum_


@njit(cache=True, nogil=True)
def visit(
    number_U: np.ndarray,
    row_UD: np.ndarray,
    of_N: np.ndarray,
    w_ND: np.ndarray,
    recent: np.ndarray,
    num_recent: int,
    take: int,
    min_visits: int,
    T: np.float32,
) -> tuple[int, int]:
    """Rows are pulled for batch `take`: count the visits and measure, of rows that were pushed since their last pull, how far
    that moved them. (`num_recent` with the visits of hot rows that have an m; how many rows have left T behind.)

    Read and changed:
        number_U, row_UD    int64, -1 = not looked at; float32, as pulled
        of_N, w_ND          VISITED; float32: the row before its last push
        recent, num_recent  float32, a ring: m at visits of hot rows, in their order; how many there were so far
    """
    num_unfrozen = 0
    for u in range(len(number_U)):
        n = number_U[u]
        if n < 0:
            continue
        of = of_N[n]
        if of.carried > 0:
            squares = 0.0
            for j in range(row_UD.shape[1]):
                moved = float(row_UD[u, j]) - float(w_ND[n, j])
                squares += moved * moved
            d, old = np.float32(np.sqrt(squares) / of.carried), of.m
            of.m = d if np.isinf(old) else _FADE * old + (np.float32(1) - _FADE) * d
            of.carried = 0
            num_unfrozen += old <= T and of.m > T
        of.v += 1
        of.seen = take
        if of.v >= min_visits and np.isfinite(of.m):
            recent[num_recent % len(recent)] = of.m
            num_recent += 1
    return num_recent, num_unfrozen


@njit(cache=True, nogil=True)
def split(  # noqa: PLR0913 (a numba kernel takes flat arrays)
    number_U: np.ndarray,
    table_U: np.ndarray,
    id_U: np.ndarray,
    row_UD: np.ndarray,
    gradient_UD: np.ndarray,
    of_N: np.ndarray,
    w_ND: np.ndarray,
    b_ND: np.ndarray,
    min_visits: int,
    visits: int,
    T: np.float32,
    by_chance: bool,
    now_ms: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of visited rows, those that are pushed now, in their order: (uint32 [P], int64 [P], keys; float32 [P, D], their gradients
    with what waited for them). The gradients of the others are added to what waits.

    Read and changed, beside what `visit` has:
        table_U, id_U   keys: uint32, int64
        b_ND            float32: what waits
        T               a row waits whose m is at most that; `by_chance`: one that is calm
    """
    table_P, id_P, out_UD, p = np.empty_like(table_U), np.empty_like(id_U), np.empty_like(gradient_UD), 0
    width = gradient_UD.shape[1]
    for u in range(len(number_U)):
        n, waited = number_U[u], False
        if n >= 0:
            of = of_N[n]
            is_calm = of.calm != 0 if by_chance else of.m <= T
            if of.v >= min_visits and is_calm and of.c < visits - 1 and now_ms - of.pushed_ms < of.late_ms:
                of.c += 1
                for j in range(width):
                    b_ND[n, j] += gradient_UD[u, j]
                continue
            waited = of.c > 0
            of.carried, of.c, of.pushed_ms = of.c + 1, 0, now_ms
            for j in range(width):
                w_ND[n, j] = row_UD[u, j]
        if waited:
            for j in range(width):
                out_UD[p, j] = b_ND[n, j] + gradient_UD[u, j]
                b_ND[n, j] = 0
        else:
            for j in range(width):
                out_UD[p, j] = gradient_UD[u, j]
        table_P[p], id_P[p] = table_U[u], id_U[u]
        p += 1
    return table_P[:p], id_P[:p], out_UD[:p]


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    number_U, row_UD, of_N, T = (
        np.zeros(1, np.int64),
        np.zeros((1, 2), np.float32),
        np.zeros(1, VISITED),
        np.float32(0),
    )
    w_ND, b_ND = row_UD.copy(), row_UD.copy()
    begin(of_N, w_ND, 0, 1)
    touch(number_U, of_N, w_ND)
    free_rows(of_N, 1, number_U)
    visit(number_U, row_UD, of_N, w_ND, np.zeros(1, np.float32), 0, 1, 1, T)
    split(
        number_U, np.zeros(1, np.uint32), number_U, row_UD, row_UD.copy(), of_N, w_ND, b_ND, 1, 2, T, False, 0
    )
    move(of_N, w_ND, b_ND, number_U[:0], number_U[:0], number_U[:0])
