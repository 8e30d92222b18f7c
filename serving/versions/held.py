"""The versions that this process can score with."""

from __future__ import annotations

import re

from serving.errors import RequestError, shown
from serving.scorer import Version

_VERSION = re.compile(r"^\d{1,20}-\d{1,20}$")


class Versions:
    """The newest version and the one before it, for requests that name theirs. Thread-safe."""

    def __init__(self, first: Version) -> None:
        self._held: tuple[Version, ...] = (first,)
        self.num_swaps = 0

    @property
    def newest(self) -> Version:
        return self._held[0]

    def install(self, version: Version) -> None:
        """Requests that begin from now on use it."""
        self._held = (version, self._held[0])
        self.num_swaps += 1

    def named(self, name: str) -> Version:
        """The newest for `""`. Raises RequestError 400, 404."""
        held = self._held
        if not name:
            return held[0]
        if not _VERSION.match(name):
            raise RequestError(400, f"expected a model version as '<incarnation>-<seq>', got {shown(name)!r}", "$.model_version")
        for version in held:
            if version.name == name:
                return version
        names = ", ".join(v.name for v in held)
        message = f"model version {name} isn't held; expected one of {names}, or none for the newest"
        raise RequestError(404, message, "$.model_version", code="unknown_model_version")
