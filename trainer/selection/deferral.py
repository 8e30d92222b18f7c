"""Deferral: gradients of hot rows that hardly move are collected at the worker and pushed together
(docs/selection.md).

For each watched row, all of this worker:

    v   visits: batches with a gradient for it              b, c   deferred gradients: their sum and number
    m   movement per visit, .9 m + .1 d; d = ||w - w'|| / n at the first pull after a push of n visits

    deferred iff v >= min_visits, m <= T, c < visits - 1, and less than expire_after / 4 since its last push
    T        the `share`-quantile of m over the last `window` visits of hot rows
    pushed   b + g; every `visits`-th visit pushes, so m stays current

Rows that are not watched are pushed at each visit; beyond `max_rows`, the longest unvisited rows without
deferred gradients are forgotten. Steps and event time decide, never clocks. The idea is Slipstream's, applied
to rows: a hot row that has stopped moving needs no attention.

The loops over rows are numba kernels.

Letters: U rows of a batch, P rows pushed, N watched rows, M and K some of them, D width.
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

_THRESHOLD_EVERY = 8  # batches from one T to the next
_INITIAL_CAPACITY = 1 << 16  # reserved at once; untouched pages take no memory


class GradientPush(NamedTuple):
    """Gradients for the shards."""

    lookup: Lookup
    gradients: dict[str, np.ndarray]  # stack → float32 [U, D]


class _DeferredStack:
    """The watched rows of one stack."""

    def __init__(self, config: DeferralConfig, width: int, expire_ms: Mapping[int, int]) -> None:
        """`expire_ms`: table id → `expire_after_ms`, for tables that have one."""
        self.config, self.width, self.expire_ms = config, width, dict(expire_ms)
        self.rows = RowIndex(capacity=min(config.max_rows, _INITIAL_CAPACITY))
        self._allocate(min(config.max_rows, _INITIAL_CAPACITY))
        # m at visits of hot rows, a ring buffer
        self.recent, self.num_recent = np.zeros(config.window, np.float32), 0
        self.T, self.num_takes = np.float32(-np.inf), 0
        self.num_visits = self.num_pushes = self.num_unfrozen = 0  # since the start

    def take(
        self, keys: StackLookup, row_UD: np.ndarray, gradient_UD: np.ndarray, now_ms: int
    ) -> tuple[StackLookup, np.ndarray]:
        """Keys of the P rows to push, of U, and their gradients, float32 [P, D]."""
        self.num_takes += 1
        config, number_U = self.config, self._row_numbers(keys)
        measured = (self.recent, self.num_recent, self.num_takes, config.min_visits, self.T)
        touch(number_U, self.state_N, self.w_ND)
        self.num_recent, num_unfrozen = visit(number_U, row_UD, self.state_N, self.w_ND, *measured)
        self.num_unfrozen += num_unfrozen
        self._choose_threshold()
        limits = (config.min_visits, config.visits, self.T, config.choice == "random", now_ms)
        batch = (keys.table_U, keys.id_U, row_UD, gradient_UD)
        table_P, id_P, out_PD = split(number_U, *batch, self.state_N, self.w_ND, self.b_ND, *limits)
        self.num_visits += len(number_U)
        self.num_pushes += len(id_P)
        return StackLookup(table_P, id_P, {}), out_PD

    def flush(self) -> tuple[StackLookup, np.ndarray]:
        """Keys and sums of all deferred gradients; none are deferred afterwards."""
        n = np.flatnonzero(self.state_N["c"])
        keys, sum_ND = StackLookup(self.rows.table_N[n], self.rows.id_N[n], {}), self.b_ND[n]
        self.b_ND[n], self.state_N["c"][n] = 0, 0
        self.state_N["carried"][n] = 0  # the movement that these visits cause is not measured
        self.num_pushes += len(n)
        return keys, sum_ND

    @property
    def num_waiting(self) -> int:
        return int(np.count_nonzero(self.state_N["c"]))

    def _choose_threshold(self) -> None:
        """Update T every few batches."""
        if self.num_recent and (self.num_takes % _THRESHOLD_EVERY == 0 or self.num_takes < _THRESHOLD_EVERY):
            known = self.recent[: min(self.num_recent, self.config.window)]
            place = int(np.ceil(self.config.share * len(known) - 1e-9)) - 1
            self.T = np.partition(known, place)[place] if place >= 0 else np.float32(-np.inf)

    def _row_numbers(self, keys: StackLookup) -> np.ndarray:
        """int64 [U]; -1 = not watched, for lack of capacity. New rows get a number with empty state."""
        max_rows, table_U, id_U = self.config.max_rows, keys.table_U, keys.id_U
        if len(self.rows) + len(id_U) > max_rows:
            number_U = self.rows.find(table_U, id_U)
            need = len(self.rows) + int((number_U < 0).sum()) - max_rows
            if need > 0:
                self._evict(need, number_U[number_U >= 0])
        return self._add_rows(table_U, id_U, max_rows)

    def _add_rows(self, table_U: np.ndarray, id_U: np.ndarray, max_rows: int | None = None) -> np.ndarray:
        """As `RowIndex.number`, with state for new rows."""
        first = len(self.rows)
        number_U = self.rows.number(table_U, id_U, max_rows)
        if len(self.rows) > len(self.state_N):
            self._grow(first)
        reset_rows(self.state_N, self.w_ND, first, len(self.rows))
        if self.expire_ms or self.config.choice == "random":
            self._init_from_keys(first)
        return number_U

    def _init_from_keys(self, first: int) -> None:
        """Set what depends only on the keys, for rows from `first` on."""
        of_M, table_M = self.state_N[first : len(self.rows)], self.rows.table_N[first:]
        for table, expire_ms in self.expire_ms.items():
            of_M["late_ms"][table_M == table] = expire_ms // 4
        if self.config.choice == "random":
            of_M["calm"] = (
                hashed(table_M, self.rows.id_N[first:]) >> np.uint64(11)
            ) * 2.0**-53 < self.config.share

    def _grow(self, used: int) -> None:
        """Quadruple the capacity and copy the first `used` rows: linear in total."""
        before = self.state_N, self.b_ND, self.w_ND
        max_rows = max(self.config.max_rows, len(self.rows))
        self._allocate(min(max(len(self.rows), 4 * len(self.state_N)), max_rows))
        for old, new in zip(before, (self.state_N, self.b_ND, self.w_ND), strict=True):
            new[:used] = old[:used]

    def _allocate(self, num: int) -> None:
        """Allocate the state of `num` rows."""
        self.state_N = aligned_zeros((num,), ROW_STATE)
        self.b_ND, self.w_ND = (aligned_zeros((num, self.width), np.dtype(np.float32)) for _ in range(2))

    def _evict(self, need: int, in_use: np.ndarray) -> None:
        """Forget an eighth of the rows: without deferred gradients, longest unvisited first, then lower
        numbers."""
        free_M, seen_M = free_rows(self.state_N, len(self.rows), in_use)
        num_gone = min(max(need, self.config.max_rows // 8), len(free_M))
        if not num_gone:
            return
        last = np.partition(seen_M, num_gone - 1)[num_gone - 1]
        is_older, is_last = seen_M < last, np.flatnonzero(seen_M == last)
        is_older[is_last[: num_gone - int(is_older.sum())]] = True
        self._forget(free_M[is_older])

    def forget_others(self, tables: Collection[int]) -> None:
        """Forget rows of all other tables and their deferred gradients."""
        self._forget(np.flatnonzero(~np.isin(self.rows.table_N, list(tables))))

    def _forget(self, gone_M: np.ndarray) -> None:
        """int64, rising numbers."""
        move(self.state_N, self.w_ND, self.b_ND, gone_M, *self.rows.drop(gone_M))

    def state(self) -> dict[str, np.ndarray]:
        n = len(self.rows)
        rows = {"table": self.rows.table_N, "id": self.rows.id_N, "b": self.b_ND[:n], "w": self.w_ND[:n]}
        rows |= {name: self.state_N[name][:n] for name in SAVED_FIELDS}
        numbers = [self.num_recent, self.num_takes, self.num_visits, self.num_pushes, self.num_unfrozen]
        return {
            **{name: value.copy() for name, value in rows.items()},
            "recent": self.recent[: min(self.num_recent, self.config.window)].copy(),
            "numbers": np.array(numbers, np.int64),
            "T": np.array(self.T),
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a `state` into an empty stack. Rows of another width are forgotten."""
        if state["b"].shape[1] != self.width:
            return
        number_N = self._add_rows(state["table"], state["id"])
        for name in SAVED_FIELDS:
            self.state_N[name][number_N] = state[name]
        self.b_ND[number_N], self.w_ND[number_N] = state["b"], state["w"]
        recent = state["recent"][-self.config.window :]
        self.recent[: len(recent)] = recent
        num_recent, self.num_takes, *counts = state["numbers"].tolist()
        is_longer = len(recent) < min(num_recent, self.config.window)  # the window than it was
        self.num_recent = len(recent) if is_longer else num_recent
        self.num_visits, self.num_pushes, self.num_unfrozen = counts
        self.T = np.float32(state["T"])


class Deferral:
    """Deferral at a single worker."""

    def __init__(self, config: DeferralConfig, schema: Schema) -> None:
        self.config, self.schema = config, schema
        self.reset()

    def reset(self) -> None:
        """Forget all visits and deferred gradients."""
        self.stacks = {
            stack: _DeferredStack(
                self.config, tables[0].dim, {t.id: t.expire_after_ms for t in tables if t.expire_after_ms}
            )
            for stack, tables in self.schema.stacks.items()
        }

    def take(
        self, lookup: Lookup, rows: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray], now_ms: int
    ) -> GradientPush:
        """What to push now for a batch, with the gradients deferred earlier.

        Gradients are clipped; `rows`: as pulled for the batch.
        """
        stacks, out = dict(lookup.stacks), {}
        for stack, gradient_UD in gradients.items():
            keys = lookup.stacks[stack]
            stacks[stack], out[stack] = self.stacks[stack].take(keys, rows[stack], gradient_UD, now_ms)
        return GradientPush(Lookup(stacks), out)

    def flush(self) -> GradientPush | None:
        """All deferred gradients; None: there are none."""
        if not self.num_waiting:
            return None
        flushed = {stack: rows.flush() for stack, rows in self.stacks.items()}
        lookup = Lookup({stack: keys for stack, (keys, _) in flushed.items()})
        return GradientPush(lookup, {stack: sum_ND for stack, (_, sum_ND) in flushed.items()})

    @property
    def num_waiting(self) -> int:
        """Rows with deferred gradients."""
        return sum(rows.num_waiting for rows in self.stacks.values())

    def report(self) -> dict[str, float | None]:
        """`row_visits`, `row_pushes`, the share deferred, rows with deferred gradients, and how often such a
        row moved again."""
        visits = sum(rows.num_visits for rows in self.stacks.values())
        pushes = sum(rows.num_pushes for rows in self.stacks.values())
        return {
            "row_visits": visits,
            "row_pushes": pushes,
            "row_deferred_share": 1 - pushes / visits if visits else None,
            "deferred_rows": self.num_waiting,
            "unfrozen_rows": sum(rows.num_unfrozen for rows in self.stacks.values()),
        }

    def state(self) -> dict[str, np.ndarray]:
        """Tensors for `load`, named `deferral.<stack>.…`."""
        out: dict[str, np.ndarray] = {}
        for stack, rows in self.stacks.items():
            out |= {f"deferral.{stack}.{name}": value for name, value in rows.state().items()}
        return out

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Load a `state`, or start empty without one. Tables that are gone and other widths are forgotten."""
        self.reset()
        for stack, rows in self.stacks.items():
            prefix = f"deferral.{stack}."
            if state := {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}:
                rows.load(state)
                rows.forget_others([table.id for table in self.schema.stacks[stack]])


def num_deferred(tensors: Mapping[str, np.ndarray]) -> int:
    """Rows with deferred gradients in a `Deferral.state` among these tensors."""
    counts = [c_N for name, c_N in tensors.items() if name.startswith("deferral.") and name.endswith(".c")]
    return sum(int(np.count_nonzero(c_N)) for c_N in counts)


SAVED_FIELDS = {"v": "i8", "c": "i8", "carried": "i8", "pushed_ms": "i8", "seen": "i8", "m": "f4"}
"""Saved state of a row: visits, deferred gradients, visits in its last push (until it is pulled again), time
of that push, batch of its last visit, movement per visit."""
_OF_ROW = {**SAVED_FIELDS, "calm": "u1", "late_ms": "i8"}
ROW_STATE = np.dtype({"names": [*_OF_ROW], "formats": [*_OF_ROW.values()], "itemsize": 64}, align=True)
"""Also what follows from the key: chosen at random, and how long gradients may be deferred. One cache line a
row."""
_LINE, _NEVER_MS = 64, np.iinfo(np.int64).max
_FADE = np.float32(0.9)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros aligned to a cache line; untouched pages take no memory."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(num_bytes + _LINE, np.uint8)
    first = -raw.ctypes.data % _LINE
    return raw[first : first + num_bytes].view(dtype).reshape(shape)


@njit(cache=True, nogil=True)
def reset_rows(state_N: np.ndarray, w_ND: np.ndarray, first: int, end: int) -> None:
    """Reset rows `first` to `end` - 1, which have no deferred gradients."""
    for n in range(first, end):
        row_state = state_N[n]
        row_state.v = row_state.c = row_state.carried = row_state.pushed_ms = row_state.seen = (
            row_state.calm
        ) = 0
        row_state.m, row_state.late_ms = np.inf, _NEVER_MS
        for j in range(w_ND.shape[1]):
            w_ND[n, j] = 0


@njit(cache=True, nogil=True)
def move(
    state_N: np.ndarray,
    w_ND: np.ndarray,
    b_ND: np.ndarray,
    gone_M: np.ndarray,
    from_K: np.ndarray,
    to_K: np.ndarray,
) -> None:
    """Clear the deferred gradients of `gone_M`; move the state of `from_K` to `to_K`."""
    for n in gone_M:
        if state_N[n].c > 0:
            b_ND[n] = 0
    for k in range(len(from_K)):
        old, new = from_K[k], to_K[k]
        state_N[new] = state_N[old]
        w_ND[new] = w_ND[old]
        if state_N[old].c > 0:
            b_ND[new] = b_ND[old]
            b_ND[old] = 0


@njit(cache=True, nogil=True)
def free_rows(state_N: np.ndarray, num_rows: int, in_use: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (int64 [M], rising) and last visits (int64 [M]) of rows without deferred gradients, except
    `in_use` (int64)."""
    taken_N = np.zeros(num_rows, np.bool_)
    taken_N[in_use] = True
    number_M, seen_M, num = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64), 0
    for n in range(num_rows):
        if state_N[n].c == 0 and not taken_N[n]:
            number_M[num], seen_M[num] = n, state_N[n].seen
            num += 1
    return number_M[:num], seen_M[:num]


@njit(cache=True, nogil=True)
def touch(number_U: np.ndarray, state_N: np.ndarray, w_ND: np.ndarray) -> float:
    """Prefetch what `visit` reads, as `roostream.wire.lookup.touch_keys` does; there is at least one row."""
    sum_ = 0.0
    for u in range(len(number_U)):
        n = max(number_U[u], 0)
        sum_ += state_N[n].m + w_ND[n, 0]
    return sum_


@njit(cache=True, nogil=True)
def visit(
    number_U: np.ndarray,
    row_UD: np.ndarray,
    state_N: np.ndarray,
    w_ND: np.ndarray,
    recent: np.ndarray,
    num_recent: int,
    take: int,
    min_visits: int,
    T: np.float32,
) -> tuple[int, int]:
    """Count the visits of batch `take`, and measure how far rows have moved since their last push.

    Returns `num_recent` including visits of hot rows that have an m, and how many rows rose above T.

    Read and changed:
        number_U, row_UD    int64, -1 = not watched; float32, as pulled
        state_N, w_ND       ROW_STATE; float32: the row before its last push
        recent, num_recent  float32, a ring: m at visits of hot rows, in order; how many so far
    """
    num_unfrozen = 0
    for u in range(len(number_U)):
        n = number_U[u]
        if n < 0:
            continue
        row_state = state_N[n]
        if row_state.carried > 0:
            squares = 0.0
            for j in range(row_UD.shape[1]):
                moved = float(row_UD[u, j]) - float(w_ND[n, j])
                squares += moved * moved
            d, old = np.float32(np.sqrt(squares) / row_state.carried), row_state.m
            row_state.m = d if np.isinf(old) else _FADE * old + (np.float32(1) - _FADE) * d
            row_state.carried = 0
            num_unfrozen += old <= T and row_state.m > T
        row_state.v += 1
        row_state.seen = take
        if row_state.v >= min_visits and np.isfinite(row_state.m):
            recent[num_recent % len(recent)] = row_state.m
            num_recent += 1
    return num_recent, num_unfrozen


@njit(cache=True, nogil=True)
def split(  # noqa: PLR0913 (a numba kernel takes flat arrays)
    number_U: np.ndarray,
    table_U: np.ndarray,
    id_U: np.ndarray,
    row_UD: np.ndarray,
    gradient_UD: np.ndarray,
    state_N: np.ndarray,
    w_ND: np.ndarray,
    b_ND: np.ndarray,
    min_visits: int,
    visits: int,
    T: np.float32,
    by_chance: bool,
    now_ms: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which visited rows to push now, in order; adds the gradients of the others to the deferred sums.

    Returns keys (uint32 [P], int64 [P]) and gradients with deferred sums (float32 [P, D]).

    Read and changed, besides those of `visit`:
        table_U, id_U   keys: uint32, int64
        b_ND            float32: deferred sums
        T               a row is deferred if its m is at most T; with `by_chance`: if it was chosen at random
    """
    table_P, id_P, out_UD, p = np.empty_like(table_U), np.empty_like(id_U), np.empty_like(gradient_UD), 0
    width = gradient_UD.shape[1]
    for u in range(len(number_U)):
        n, waited = number_U[u], False
        if n >= 0:
            row_state = state_N[n]
            is_calm = row_state.calm != 0 if by_chance else row_state.m <= T
            if (
                row_state.v >= min_visits
                and is_calm
                and row_state.c < visits - 1
                and now_ms - row_state.pushed_ms < row_state.late_ms
            ):
                row_state.c += 1
                for j in range(width):
                    b_ND[n, j] += gradient_UD[u, j]
                continue
            waited = row_state.c > 0
            row_state.carried, row_state.c, row_state.pushed_ms = row_state.c + 1, 0, now_ms
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
    number_U, table_U, row_UD = np.zeros(1, np.int64), np.zeros(1, np.uint32), np.zeros((1, 2), np.float32)
    state_N, w_ND, b_ND, T = np.zeros(1, ROW_STATE), row_UD.copy(), row_UD.copy(), np.float32(0)
    reset_rows(state_N, w_ND, 0, 1)
    touch(number_U, state_N, w_ND)
    free_rows(state_N, 1, number_U)
    visit(number_U, row_UD, state_N, w_ND, np.zeros(1, np.float32), 0, 1, 1, T)
    batch = (number_U, table_U, number_U, row_UD, row_UD.copy())
    split(*batch, state_N, w_ND, b_ND, 1, 2, T, False, 0)
    move(state_N, w_ND, b_ND, number_U[:0], number_U[:0], number_U[:0])
