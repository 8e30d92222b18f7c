"""When training is held, and what the time is spent on (Kurian et al., *Scalable Machine Learning Training
Infrastructure for Online Ads Recommendation*, §VI-A).

    permanent   no restart helps: settings that can't be, memory that isn't enough, numbers that diverge, a worker that dies
                again and again. Workers are released, their programs end and stay down, until `roostream trainer release`
    transient   nothing to read, where settings say that workers are released then (idle.py); it ends by itself
    temporary   a network, a shard or a store is away: everyone goes back to the last commit, there is no hold

A hold is kept in the file that claims the incarnation which it begins, so that a restarted controller holds too.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from typing import Any

from trainer.control.types import PERMANENT, TRANSIENT, Hold, Key, State

MAX_DEATHS = 8  # of one worker in a row, each soon after its start, without a commit in between
_SOON_S = 600.0


class DeviceUse(enum.StrEnum):
    """What a device's time goes to."""

    TRAINING = "training"
    TEMPORARY = "temporary"  # waiting for members, a restore, the store
    TRANSIENT_HOLD = "transient_hold"
    PERMANENT_HOLD = "permanent_hold"


FORMAT = 2
_OF_FORMAT_1 = {
    "training": DeviceUse.TRAINING,
    "waiting": DeviceUse.TEMPORARY,
    "held": DeviceUse.PERMANENT_HOLD,
}


def idle_hold(reason: str) -> Hold:
    """There is nothing to read."""
    return Hold(TRANSIENT, reason, "")


class Holds:
    """Whether training is held. Events in; not thread-safe."""

    def __init__(self, max_deaths: int = MAX_DEATHS) -> None:
        self.max_deaths = max_deaths
        self.now: Hold | None = None
        self._deaths: Counter[Key] = Counter()

    def stop(self, member: Key | str, reason: str) -> Hold:
        """No restart helps; the first reason stands."""
        self.now = self.now or Hold(PERMANENT, reason, str(member))
        return self.now

    @property
    def is_transient(self) -> bool:
        """It ends by itself."""
        return self.now is not None and self.now.kind == TRANSIENT

    def died(self, key: Key, lived_s: float = 0.0, saved: str = "") -> Hold | None:
        """A worker's process ended, and was not asked to; a hold where it does so again and again. Shards hold the rows: they are
        always waited for. `saved`: the newest batch at which it ended."""
        if key.role != "worker":
            return None
        self._deaths[key] = 1 if lived_s > _SOON_S else self._deaths[key] + 1
        if self._deaths[key] < self.max_deaths:
            return None
        shown = f"; `roostream inspect batch {saved}` shows the last batch that it saved" if saved else ""
        return self.stop(
            key, f"it died {self._deaths[key]} times without a commit in between; its log says why{shown}"
        )

    def committed(self) -> None:
        """What is committed was trained: nobody dies of it again and again."""
        self._deaths.clear()

    def release(self) -> None:
        self.now = None
        self._deaths.clear()


class DeviceTime:
    """Device-seconds by what they went to, of as many devices as are wanted; a clock that goes back adds nothing."""

    def __init__(self, now_s: float) -> None:
        self.seconds = {spending: 0.0 for spending in DeviceUse}
        self._at_s = now_s
        self._on = DeviceUse.TEMPORARY

    def note(self, on: DeviceUse, devices: int, now_s: float) -> None:
        """The time until now went to what was under way; from now on it goes to `on`."""
        self.seconds[self._on] += max(now_s - self._at_s, 0.0) * devices
        self._at_s, self._on = now_s, on

    def add(self, kept: Mapping[str, Any]) -> None:
        """What controllers before this one counted, as `body` gave it. Format 1 knew one kind of hold."""
        is_new = kept.get("format") == FORMAT
        counted = kept.get("device_s", {}) if is_new else kept
        for name, spending in {s.value: s for s in DeviceUse}.items() if is_new else _OF_FORMAT_1.items():
            seconds = counted.get(name, 0.0)
            if isinstance(seconds, int | float) and 0 <= seconds < float("inf"):
                self.seconds[spending] += seconds

    def told(self) -> dict[str, float]:
        return {spending.value: seconds for spending, seconds in self.seconds.items()}

    def body(self) -> dict[str, Any]:
        """As it is kept."""
        return {"format": FORMAT, "device_s": self.told()}


def device_use(state: State, hold: Hold | None = None) -> DeviceUse:
    """`hold`: what training is held by, if it is."""
    if state is State.HELD:
        return (
            DeviceUse.TRANSIENT_HOLD
            if hold is not None and hold.kind == TRANSIENT
            else DeviceUse.PERMANENT_HOLD
        )
    waits = (State.CLAIMING, State.GATHERING, State.RESTORING, State.FENCED)
    return DeviceUse.TEMPORARY if state in waits else DeviceUse.TRAINING


def ratios(device_s: Mapping[str, float]) -> dict[str, float | None]:
    """Each to the time in training, as the paper's table II has them (1 : 1.03 : 2.49); None before anything was trained."""
    training = device_s.get(DeviceUse.TRAINING, 0.0)
    return {name: seconds / training if training > 0 else None for name, seconds in device_s.items()}
