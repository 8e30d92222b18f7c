"""Simulated visits: which user comes when, and how they react to a list. Pure, with its own random generator.

Delays are compressed: reading for a minute takes a few seconds, so that everything happens within a short
join window. The real reading time is in the engagement's value.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from roostream.replay.world import World
from roostream.schema.ids import hash64

_SESSION_GAP_MS = 60_000
_MAX_SESSIONS = 100_000


@dataclasses.dataclass(frozen=True)
class Visit:
    """One request to send."""

    request_id: str
    user_id: int
    session_id: int
    device_id: int
    items_n: np.ndarray  # int64
    time_ms: int
    pages: int  # number of further pages of the same request


@dataclasses.dataclass(frozen=True)
class Reaction:
    """One engagement to send `delay_s` after the list was shown; `repeats` counts duplicate sends."""

    delay_s: float
    item_id: int
    action: str
    value: float
    event_id: int
    repeats: int


class Visitors:
    """Draws visits and reactions of the users of a world."""

    def __init__(self, world: World, seed: int, run: str) -> None:
        """`run` keeps request ids unique when the same world is simulated again."""
        self.world, self.run = world, run
        self.rng = np.random.default_rng([seed, hash64(run) & 0xFFFFFFFF])
        weight_U = 1.0 / np.arange(2, world.config.num_users + 2) ** 0.6
        self._share_U = np.cumsum(weight_U) / weight_U.sum()
        self._sessions: dict[int, tuple[int, int, int]] = {}  # user → (session, device, last request ms)
        self._count = 0

    def gap_s(self, rate: float) -> float:
        """Seconds until the next visit, exponentially distributed."""
        return float(self.rng.exponential(1 / rate))

    def next(self, time_ms: int) -> Visit:
        """The next visit: its user, session and candidates at `time_ms`."""
        user_id = int(np.searchsorted(self._share_U, self.rng.random(), side="right")) + 1
        session_id, device_id = self._session(user_id, time_ms)
        self._count += 1
        return Visit(
            request_id=f"{self.run}-{self._count}",
            user_id=user_id,
            session_id=session_id,
            device_id=device_id,
            items_n=self.world.candidates_for(user_id, time_ms),
            time_ms=time_ms,
            pages=int(self.rng.random() < 0.15),
        )

    def more(self, visit: Visit, time_ms: int) -> np.ndarray:
        """int64: the items of another page, none of which was on the first page of this request."""
        items = self.world.candidates_for(visit.user_id, time_ms)
        return items[~np.isin(items, visit.items_n)]

    def react(self, visit: Visit, served_n: np.ndarray, time_ms: int, first: int = 0) -> list[Reaction]:
        """Reactions to `served_n`: ids in served order, at positions from `first` on."""
        chance_n = self.world.attraction(visit.user_id, served_n, time_ms) * self.world.examination(
            len(served_n), first
        )
        out: list[Reaction] = []
        for place in np.flatnonzero(self.rng.random(len(served_n)) < chance_n).tolist():
            item_id = int(served_n[place])
            click_s = 0.3 + float(self.rng.exponential(1.2)) + 0.1 * place
            click_s = min(click_s, 8.0)
            seconds = self.world.read_seconds(visit.user_id, item_id, time_ms, float(self.rng.normal()))
            out.append(self._reaction(visit, click_s, item_id, "click", 1.0))
            out.append(self._reaction(visit, click_s + min(seconds * 0.05, 3.0), item_id, "read", seconds))
        return out

    def _reaction(self, visit: Visit, delay_s: float, item_id: int, action: str, value: float) -> Reaction:
        event_id = hash64(f"{visit.request_id}/{item_id}/{action}")
        return Reaction(delay_s, item_id, action, value, event_id, int(self.rng.random() < 0.03))

    def _session(self, user_id: int, time_ms: int) -> tuple[int, int]:
        """(session id, device) of a user. A new session begins after a long gap, mostly on the user's main
        device."""
        known = self._sessions.get(user_id)
        if known is None or time_ms - known[2] > _SESSION_GAP_MS:
            devices = self.world.devices_of(user_id)
            device = devices[0] if self.rng.random() < 0.7 else int(self.rng.choice(devices))
            known = (hash64(f"{self.run}/{user_id}/{time_ms}") >> 1, device, time_ms)
            if len(self._sessions) >= _MAX_SESSIONS:
                self._sessions.clear()
        self._sessions[user_id] = (known[0], known[1], time_ms)
        return known[0], known[1]
