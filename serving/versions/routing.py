"""Which share of users or requests is for a version: a stable function of who asks, so that a user stays where they are.

Users fall on a line of 2^64 points by a hash of their key (`roostream.schema.ids.key_bytes`: the user, else the session, else the request)
and of what the split is for; a share is the line's beginning. So a share that grows keeps those that it had, and who is in a
canary says nothing about who is interleaved.
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
    """Whether it can mean a version: its name, or its place among those that are held."""
    return version in (NEWEST, PREVIOUS) or NAME.fullmatch(version) is not None


@dataclasses.dataclass(frozen=True)
class TrafficSplit:
    """`version` is a name, or a place that another version takes with every commit; a share of 0 is off."""

    version: str = ""
    share: float = 0.0

    def takes(self, key: bytes, purpose: bytes) -> bool:
        """Whether who has this key is within the share."""
        return self.share > 0 and hash64(purpose + key) < self.share * _POINTS

    def __str__(self) -> str:
        return f"{self.version}@{self.share:g}" if self.share else ""


def parse_split(key: str, text: str) -> TrafficSplit:
    """`"newest@0.05"` → a split, `""` → none. Raises SettingError, which names the setting `key`."""
    if not text:
        return TrafficSplit()
    match = _SPLIT.fullmatch(text)
    if match is None or not is_reference(match[1]) or not float(match[2]) <= 1:
        raise setting_error(key, f"{FORM}; or '' for none", text)
    return TrafficSplit(match[1], float(match[2]))


@dataclasses.dataclass(frozen=True)
class Routing:
    """What people or settings ask for beside "the newest"."""

    activated: str = ""
    canary: TrafficSplit = TrafficSplit()
    shadow: TrafficSplit = TrafficSplit()
    interleave: TrafficSplit = TrafficSplit()

    @property
    def names(self) -> tuple[str, ...]:
        """Versions that have to be held however old they are."""
        splits = (self.canary, self.shadow, self.interleave)
        return tuple(
            name for name in (self.activated, *(s.version for s in splits if s.share)) if NAME.fullmatch(name)
        )
