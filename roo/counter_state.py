"""What the online features remember of an item and of a user: arrays, their arithmetic, and their bytes.

One item is a row of 14 float64: reference time, time first shown, and at the four half-lives the decayed sums of views, of
clicks, and of what each view could have been expected to bring: one click for a list, the same for all that it shows. A sum s
with reference time r is worth s · 2^-((t - r) / half-life) at t; an event at t ≥ r moves the reference to t, one before it is
added with the weight that it has kept by r. One user is a bounded history and a bounded table of items.
Letters: n items of a request, I items in hand, H clicks in a history, P items of a user.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np
from numba import njit

from roo.errors import CheckpointError

HALF_LIVES = {"10m": 600_000, "1h": 3_600_000, "6h": 21_600_000, "24h": 86_400_000}
_HALF_LIFE_MS = np.array(list(HALF_LIVES.values()), dtype=np.float64)
_REFERENCE, _FIRST, _SUMS, ITEM_WIDTH = 0, 1, 2, 14
VIEW, CLICK = 0, 1
_EXPECTED = 2
NEVER = -(1 << 63)
MAX_USER_ITEMS = 512
_ITEM, _VIEWS, _CLICKS, _VIEW_MS, _CLICK_MS = range(5)
_VERSION = 1
_ITEM_VERSION = 2
_ITEM_BYTES = 1 + 8 * ITEM_WIDTH
_VERSION_1_BYTES = 81
_VERSION_1_EXPECTED = 0.1  # a view, which it didn't say: what ctr_L takes for a click rate where it knows nothing
_USER_HEAD = struct.Struct("<BqII")


def new_items(count: int) -> np.ndarray:
    """float64 [count, 14] of items that nothing is known of."""
    out = np.zeros((count, ITEM_WIDTH))
    out[:, :_SUMS] = np.nan
    return out


@njit(cache=True, nogil=True)
def add_event(item_I: np.ndarray, at_n: np.ndarray, time_ms: float, kind: int) -> None:
    """One view, of all of them in one list, or one click at `time_ms` of each of the items at rows `at_n`."""
    for i in at_n:
        row = item_I[i]
        late_ms = 0.0 if np.isnan(row[_REFERENCE]) else row[_REFERENCE] - time_ms
        for h in range(4):
            if late_ms < 0:
                fade = 2.0 ** (late_ms / _HALF_LIFE_MS[h])
                for sum_ in range(3):
                    row[_SUMS + 4 * sum_ + h] *= fade
            kept = 2.0 ** (-max(late_ms, 0.0) / _HALF_LIFE_MS[h])
            row[_SUMS + 4 * kind + h] += kept
            if kind == VIEW:
                row[_SUMS + 4 * _EXPECTED + h] += kept / len(at_n)
        if not late_ms > 0:
            row[_REFERENCE] = time_ms
        if kind == VIEW and not row[_FIRST] <= time_ms:
            row[_FIRST] = time_ms


@njit(cache=True, nogil=True)
def read_items(item_n: np.ndarray, time_ms: float, out_n: np.ndarray) -> None:
    """float64 [n, 14] → float32 [n, 13]: views at each half-life, clicks, expected clicks, age in s (0 = never shown)."""
    for i in range(len(item_n)):
        row = item_n[i]
        fade_ms = 0.0 if np.isnan(row[_REFERENCE]) else min(row[_REFERENCE] - time_ms, 0.0)
        for h in range(4):
            fade = 2.0 ** (fade_ms / _HALF_LIFE_MS[h])
            for sum_ in range(3):
                out_n[i, 4 * sum_ + h] = row[_SUMS + 4 * sum_ + h] * fade
        out_n[i, 12] = 0.0 if np.isnan(row[_FIRST]) else max(time_ms - row[_FIRST], 0.0) / 1000.0


def item_bytes(item_I: np.ndarray, at: int) -> bytes:
    return bytes((_ITEM_VERSION,)) + item_I[at].tobytes()


def items_from_bytes(values: Sequence[bytes | None]) -> np.ndarray:
    """float64 [n, 14]; None is an item that nothing is known of.

    Raises:
        CheckpointError: bytes of another length or version.
    """
    out = new_items(len(values))
    given = [i for i, value in enumerate(values) if value is not None]
    joined = np.frombuffer(b"".join(_of_now(values[i] or b"") for i in given), dtype=np.uint8)
    if len(joined) != _ITEM_BYTES * len(given) or (joined[::_ITEM_BYTES] != _ITEM_VERSION).any():
        raise CheckpointError(f"expected item states of {_ITEM_BYTES} bytes and version {_ITEM_VERSION}, got others; delete them")
    out[given] = np.ascontiguousarray(joined.reshape(-1, _ITEM_BYTES)[:, 1:]).view(np.float64)
    return out


def _of_now(value: bytes) -> bytes:
    """An item's state of version 1, which had no expected clicks, as one of version 2; others as they are."""
    if len(value) != _VERSION_1_BYTES or value[0] != 1:
        return value
    views_4 = np.frombuffer(value, dtype="<f8", offset=1)[_SUMS : _SUMS + 4]
    return bytes((_ITEM_VERSION,)) + value[1:] + (_VERSION_1_EXPECTED * views_4).tobytes()


@dataclasses.dataclass
class User:
    """Changed in place by `view` and `click`; times are event times in ms."""

    last_request_ms: int = NEVER
    history_H3: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))
    """int64: item, action (hash64 of its name), time; newest first, later arrivals first among equal times."""
    items_P5: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 5), dtype=np.int64))
    """int64: item (sorted), views, clicks, time of the newest view and of the newest click (or NEVER)."""

    def view(self, item_n: np.ndarray, time_ms: int) -> None:
        """The items, each once, were shown."""
        self.last_request_ms = max(self.last_request_ms, time_ms)
        self._count(item_n, _VIEWS, _VIEW_MS, time_ms)

    def click(self, item: int, action: int, time_ms: int, max_history: int) -> bool:
        """False, and nothing changes, if the history holds this very click: a client's retry."""
        entry = np.array([item, action, time_ms], dtype=np.int64)
        if (self.history_H3 == entry).all(axis=1).any():
            return False
        at = int((self.history_H3[:, 2] > time_ms).sum())
        self.history_H3 = np.insert(self.history_H3, at, entry, axis=0)[:max_history]
        self._count(entry[:1], _CLICKS, _CLICK_MS, time_ms)
        return True

    def pairs(self, item_n: np.ndarray) -> np.ndarray:
        """int64 [n, 5]: what is kept of each item, or zero counts and NEVER."""
        at, found = self._find(item_n)
        out = np.zeros((len(item_n), 5), dtype=np.int64)
        out[:, _VIEW_MS:] = NEVER
        out[found] = self.items_P5[at[found]]
        return out

    def _find(self, item_n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = np.searchsorted(self.items_P5[:, _ITEM], item_n)
        found = at < len(self.items_P5)
        found[found] = self.items_P5[at[found], _ITEM] == item_n[found]
        return at, found

    def _count(self, item_n: np.ndarray, count: int, newest: int, time_ms: int) -> None:
        at, found = self._find(item_n)
        new = np.zeros((int((~found).sum()), 5), dtype=np.int64)
        new[:, _ITEM], new[:, count] = item_n[~found], 1
        new[:, _VIEW_MS:] = NEVER
        new[:, newest] = time_ms
        self.items_P5[at[found], count] += 1
        self.items_P5[at[found], newest] = np.maximum(self.items_P5[at[found], newest], time_ms)
        if len(new):
            self.items_P5 = _bounded(np.concatenate([self.items_P5, new]))

    def to_bytes(self) -> bytes:
        head = _USER_HEAD.pack(_VERSION, self.last_request_ms, len(self.history_H3), len(self.items_P5))
        return head + self.history_H3.tobytes() + self.items_P5.tobytes()


def _bounded(items_P5: np.ndarray) -> np.ndarray:
    """Sorted by item; of more than MAX_USER_ITEMS, those seen or clicked last, smaller ids first among equals."""
    if len(items_P5) > MAX_USER_ITEMS:
        touched_ms = items_P5[:, _VIEW_MS:].max(axis=1)
        items_P5 = items_P5[np.lexsort((items_P5[:, _ITEM], -touched_ms))[:MAX_USER_ITEMS]]
    return items_P5[np.argsort(items_P5[:, _ITEM])]


def user_from_bytes(data: bytes) -> User:
    """
    Raises:
        CheckpointError: bytes of another length or version.
    """
    if len(data) >= _USER_HEAD.size:
        version, last_request_ms, h, p = _USER_HEAD.unpack_from(data)
        if version == _VERSION and len(data) == _USER_HEAD.size + 24 * h + 40 * p:
            body = np.frombuffer(data, dtype="<i8", offset=_USER_HEAD.size)
            return User(last_request_ms, body[: 3 * h].reshape(h, 3).copy(), body[3 * h :].reshape(p, 5).copy())
    raise CheckpointError(f"expected a user state of version {_VERSION}, got {len(data)} other bytes; delete them")


def warm() -> None:
    """Compile the kernels into numba's cache."""
    items = new_items(1)
    add_event(items, np.zeros(1, dtype=np.int64), 0.0, VIEW)
    read_items(items, 0.0, np.zeros((1, 13), dtype=np.float32))
