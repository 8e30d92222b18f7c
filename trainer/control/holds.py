"""When training is on hold, and what device time is spent on (Kurian et al., *Scalable Machine Learning
Training Infrastructure for Online Ads Recommendation*, §VI-A).

    permanent   no restart helps: invalid settings, not enough memory, diverging numbers, a worker that keeps
                dying. Workers are released, and their programs exit and stay down until
                `roostream trainer release`
    transient   there is nothing to read, and settings release workers in that case (idle.py); the hold ends
                by itself
    temporary   a network, a shard or a store is unavailable: everyone is restored to the last commit; this is
                not a hold

A hold is stored in the file of the incarnation that it begins, so that a restarted controller holds too.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from typing import Any

from trainer.control.types import PERMANENT, TRANSIENT, Hold, Key, State

MAX_DEATHS = 8  # of one worker in a row, each soon after its start, without a commit in between
_EARLY_DEATH_S = 600.0


def idle_hold(reason: str) -> Hold:
    """A hold because there is nothing to read."""
    return Hold(TRANSIENT, reason, "")


class Holds:
    """Whether training is on hold. Not thread-safe."""

    def __init__(self, max_deaths: int = MAX_DEATHS) -> None:
        self.max_deaths = max_deaths
        self.now: Hold | None = None
        self._deaths: Counter[Key] = Counter()
        self._lost: dict[Key, int] = {}  # the process (its session) whose death was counted last

    def stop(self, member: Key | str, reason: str) -> Hold:
        """Begin a permanent hold; if training is on hold already, the first reason stays."""
        self.now = self.now or Hold(PERMANENT, reason, str(member))
        return self.now

    @property
    def is_transient(self) -> bool:
        return self.now is not None and self.now.kind == TRANSIENT

    def died(
        self, key: Key, lived_s: float = 0.0, saved: str = "", rival: str = "", session: int = 0
    ) -> Hold | None:
        """A process ended without being asked to, or is silent. Returns a hold if it is a worker that keeps
        dying. Shards hold the rows, so training always waits for them. `saved`: path of the batch at which
        the worker died. `rival`: a sentence about another process that has tried to be this worker.
        `session`: identifies the process."""
        if key.role != "worker":
            return None
        self._lost[key] = session
        self._deaths[key] = 1 if lived_s > _EARLY_DEATH_S else self._deaths[key] + 1
        if self._deaths[key] < self.max_deaths:
            return None
        hint = f"; `roostream inspect batch {saved}` shows the last batch that it saved" if saved else ""
        also = f"; {rival}" if rival else ""
        return self.stop(
            key,
            f"it died {self._deaths[key]} times without a commit in between; see its log for the "
            f"cause{hint}{also}",
        )

    def lives(self, key: Key, session: int) -> None:
        """A process sends beats again. If its death was counted, it was only silent: the network was away."""
        if self._lost.pop(key, None) == session:
            self._deaths[key] -= 1

    def committed(self) -> None:
        """A commit succeeded: forget earlier deaths."""
        self._deaths.clear()
        self._lost.clear()

    def release(self) -> None:
        self.now = None
        self.committed()


class DeviceUse(enum.StrEnum):
    """What the time of a device is spent on."""

    TRAINING = "training"
    TEMPORARY = "temporary"  # waiting for members, a restore or the store
    TRANSIENT_HOLD = "transient_hold"
    PERMANENT_HOLD = "permanent_hold"


FORMAT = 2
_FORMAT_1_NAMES = {
    "training": DeviceUse.TRAINING,
    "waiting": DeviceUse.TEMPORARY,
    "held": DeviceUse.PERMANENT_HOLD,
}


class DeviceTime:
    """Device-seconds by use, over the wanted number of devices. A clock that jumps back adds nothing."""

    def __init__(self, now_s: float) -> None:
        self.seconds = {use: 0.0 for use in DeviceUse}
        self._noted_s = now_s
        self._use = DeviceUse.TEMPORARY

    def note(self, use: DeviceUse, devices: int, now_s: float) -> None:
        """Count the time until now for the previous use; from now on count it for `use`."""
        self.seconds[self._use] += max(now_s - self._noted_s, 0.0) * devices
        self._noted_s, self._use = now_s, use

    def add(self, saved: Mapping[str, Any]) -> None:
        """Add what earlier controllers counted, as `body` gave it. Format 1 had one kind of hold."""
        is_new = saved.get("format") == FORMAT
        counted = saved.get("device_s", {}) if is_new else saved
        for name, use in {u.value: u for u in DeviceUse}.items() if is_new else _FORMAT_1_NAMES.items():
            seconds = counted.get(name, 0.0)
            if isinstance(seconds, int | float) and 0 <= seconds < float("inf"):
                self.seconds[use] += seconds

    def by_name(self) -> dict[str, float]:
        return {use.value: seconds for use, seconds in self.seconds.items()}

    def body(self) -> dict[str, Any]:
        """The counts as they are stored."""
        return {"format": FORMAT, "device_s": self.by_name()}


def device_use(state: State, hold: Hold | None = None) -> DeviceUse:
    """What devices are used for in this state. `hold`: the current hold, if there is one."""
    if state is State.HELD:
        is_transient = hold is not None and hold.kind == TRANSIENT
        return DeviceUse.TRANSIENT_HOLD if is_transient else DeviceUse.PERMANENT_HOLD
    waits = (State.CLAIMING, State.GATHERING, State.RESTORING, State.FENCED)
    return DeviceUse.TEMPORARY if state in waits else DeviceUse.TRAINING


def ratios(device_s: Mapping[str, float]) -> dict[str, float | None]:
    """Each use divided by the training time, as in the paper's table II (1 : 1.03 : 2.49). None before any
    training."""
    training = device_s.get(DeviceUse.TRAINING, 0.0)
    return {name: seconds / training if training > 0 else None for name, seconds in device_s.items()}
