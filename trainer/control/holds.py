"""When training is held, and what the time is spent on (Kurian et al., *Scalable Machine Learning Training
Infrastructure for Online Ads Recommendation*, §VI-A).

    permanent   no restart helps: settings that can't be, memory that isn't enough, numbers that diverge, a worker that dies
                again and again. Workers are released, their programs end and stay down, until `roostream trainer release`
    temporary   a network, a shard or a store is away: everyone goes back to the last commit, there is no hold

A hold is kept in the file that claims the incarnation which it begins, so that a restarted controller holds too.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from typing import Any

from trainer.control.protocol import Hold, Key, State

MOST_DEATHS = 8  # of one worker in a row, each soon after its start, without a commit in between
_SOON_S = 600.0


class Spending(enum.StrEnum):
    """What a device's time goes to."""

    TRAINING = "training"
    WAITING = "waiting"  # for members, a restore, the store
    HELD = "held"


class Holds:
    """Whether training is held. Events in; not thread-safe."""

    def __init__(self, most_deaths: int = MOST_DEATHS) -> None:
        self.most_deaths = most_deaths
        self.now: Hold | None = None
        self._deaths: Counter[Key] = Counter()

    def stop(self, member: Key | str, reason: str) -> Hold:
        """No restart helps; the first reason stands."""
        self.now = self.now or Hold("permanent", reason, str(member))
        return self.now

    def died(self, key: Key, lived_s: float = 0.0) -> Hold | None:
        """A worker's process ended, and was not asked to; a hold where it does so again and again. Shards hold the rows: they are
        always waited for."""
        if key.role != "worker":
            return None
        self._deaths[key] = 1 if lived_s > _SOON_S else self._deaths[key] + 1
        if self._deaths[key] < self.most_deaths:
            return None
        return self.stop(key, f"it died {self._deaths[key]} times without a commit in between; its log says why")

    def committed(self) -> None:
        """What is committed was trained: nobody dies of it again and again."""
        self._deaths.clear()

    def release(self) -> None:
        self.now = None
        self._deaths.clear()


class Spent:
    """Device-seconds by what they went to, of as many devices as are wanted; a clock that goes back adds nothing."""

    def __init__(self, now_s: float) -> None:
        self.seconds = {spending: 0.0 for spending in Spending}
        self._at_s = now_s
        self._on = Spending.WAITING

    def note(self, state: State, devices: int, now_s: float) -> None:
        """The time until now went to what was under way; from now on it goes to this."""
        self.seconds[self._on] += max(now_s - self._at_s, 0.0) * devices
        self._at_s, self._on = now_s, spending_of(state)

    def add(self, kept: Mapping[str, Any]) -> None:
        """What controllers before this one counted."""
        for spending in Spending:
            seconds = kept.get(spending.value, 0.0)
            if isinstance(seconds, int | float) and 0 <= seconds < float("inf"):
                self.seconds[spending] += seconds

    def told(self) -> dict[str, float]:
        return {spending.value: seconds for spending, seconds in self.seconds.items()}


def spending_of(state: State) -> Spending:
    if state is State.HELD:
        return Spending.HELD
    waits = (State.CLAIMING, State.GATHERING, State.RESTORING, State.FENCED)
    return Spending.WAITING if state in waits else Spending.TRAINING
