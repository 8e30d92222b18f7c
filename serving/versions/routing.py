"""Traffic splits: which share of users or requests goes to a version, as a stable function of the user.

A hash of the key (`roostream.schema.ids.key_bytes`: the user, else the session, else the request) and of the
split's purpose gives a point in 0..2^64; a share is the first part of that range. So a growing share keeps
its users, and being in the canary says nothing about being interleaved.
"""

from __future__ import annotations

import dataclasses
import re

from roostream.schema.ids import hash64
from roostream.schema.settings import setting_error

NEWEST, PREVIOUS = "newest", "previous"
FORM = "VERSION@SHARE such as newest@0.05; VERSION: newest, previous or <incarnation>-<seq>"
NAME = re.compile(r"\d{1,20}-\d{1,20}")
_POINTS = 1 << 64
_SPLIT = re.compile(r"([a-z0-9-]+)@(\d+(?:\.\d+)?|\.\d+)")


def is_reference(version: str) -> bool:
    """Whether `version` is a version's name, or "newest" or "previous"."""
    return version in (NEWEST, PREVIOUS) or NAME.fullmatch(version) is not None


@dataclasses.dataclass(frozen=True)
class TrafficSplit:
    """`version` is a name, or a position that another version takes with every commit; a share of 0 is
    off."""

    version: str = ""
    share: float = 0.0

    def takes(self, key: bytes, purpose: bytes) -> bool:
        """Whether this key is within the share."""
        return self.share > 0 and hash64(purpose + key) < self.share * _POINTS

    def __str__(self) -> str:
        return f"{self.version}@{self.share:g}" if self.share else ""


def parse_split(key: str, text: str) -> TrafficSplit:
    """Parse `"newest@0.05"`; `""` is no split. Raises SettingError, which names the setting `key`."""
    if not text:
        return TrafficSplit()
    match = _SPLIT.fullmatch(text)
    if match is None or not is_reference(match[1]) or not float(match[2]) <= 1:
        raise setting_error(key, f"{FORM}; or '' for none", text)
    return TrafficSplit(match[1], float(match[2]))


@dataclasses.dataclass(frozen=True)
class Routing:
    """What operators or settings choose instead of "the newest"."""

    activated: str = ""
    canary: TrafficSplit = TrafficSplit()
    shadow: TrafficSplit = TrafficSplit()
    interleave: TrafficSplit = TrafficSplit()

    @property
    def uses_positions(self) -> bool:
        """Whether a split is of the newest version or the one before it."""
        splits = (self.canary, self.shadow, self.interleave)
        return any(s.share and s.version in (NEWEST, PREVIOUS) for s in splits)

    @property
    def names(self) -> tuple[str, ...]:
        """Versions that must stay loaded, however old they are."""
        splits = (self.canary, self.shadow, self.interleave)
        return tuple(
            name for name in (self.activated, *(s.version for s in splits if s.share)) if NAME.fullmatch(name)
        )
