"""The loaded model versions, and which of them scores a request.

The newest `keep` versions stay loaded, and those that the routing names. The first match scores a request:

1 the version that the request names
2 the canary, for its share of users
3 the version that was activated by hand, until `resume`
4 the newest; while the newest is the canary, the one before it

The state is immutable and replaced as a whole: a request reads it once (guarantee G4).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from serving.errors import RequestError, shown
from serving.scorer import FIRST, Version
from serving.versions.routing import NAME, NEWEST, PREVIOUS, Routing, TrafficSplit, is_reference

KEPT = 2
_MAX_REFUSED = 20  # refused versions to remember, the newest


class RoutableRequest(Protocol):
    """The properties of a request that routing uses: the requested version of an incoming one, the version
    that scored a past one."""

    @property
    def model_version(self) -> str: ...

    @property
    def request_id(self) -> str: ...

    @property
    def key(self) -> bytes: ...


class VersionChoice(NamedTuple):
    """The version that scores a request."""

    version: Version
    rival: Version | None = None  # its order is interleaved with the version's


@dataclasses.dataclass(frozen=True)
class LoadedVersion:
    """A version, the times when it was committed and installed, and the event time up to which it was
    trained (0 = unknown)."""

    version: Version
    committed_ms: int
    installed_ms: int
    trained_up_to_ms: int = 0


class RefusedVersion(NamedTuple):
    """A version that was committed but cannot be served."""

    name: str
    reason: str  # one word, for metrics
    message: str
    at_ms: int


class _State(NamedTuple):
    loaded: tuple[LoadedVersion, ...]  # newest first
    routing: Routing

    @property
    def committed(self) -> tuple[LoadedVersion, ...]:
        """Without the untrained version, which is nobody's previous one, unless it is alone."""
        return tuple(h for h in self.loaded if h.version.name != FIRST) or self.loaded

    def find(self, reference: str) -> LoadedVersion | None:
        if reference in (NEWEST, PREVIOUS):
            at = (NEWEST, PREVIOUS).index(reference)
            return self.committed[at] if at < len(self.committed) else None
        return next((h for h in self.loaded if h.version.name == reference), None)

    @property
    def served(self) -> LoadedVersion:
        routing = self.routing
        if routing.activated and (found := self.find(routing.activated)) is not None:
            return found
        waits = routing.canary.share > 0 and routing.canary.version == NEWEST and len(self.committed) > 1
        return self.committed[1 if waits else 0]


class LoadedVersions:
    """Thread-safe. `on_change` is called when another version becomes the served one."""

    def __init__(
        self,
        first: Version,
        keep: int = KEPT,
        routing: Routing | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.keep, self.now_ms = keep, now_ms
        self.on_change: Callable[[LoadedVersion], None] = lambda loaded: None
        self.num_swaps = 0
        self.refused: dict[str, RefusedVersion] = {}
        self.num_refused: Counter[str] = Counter()  # by reason
        self._lock = threading.Lock()
        self._state = _State((LoadedVersion(first, 0, now_ms()),), routing or Routing())

    @property
    def newest(self) -> Version:
        return self._state.loaded[0].version

    @property
    def served(self) -> LoadedVersion:
        """The version that scores most requests."""
        return self._state.served

    @property
    def loaded(self) -> tuple[LoadedVersion, ...]:
        return self._state.loaded

    @property
    def routing(self) -> Routing:
        return self._state.routing

    def install(self, version: Version, committed_ms: int = 0, trained_up_to_ms: int = 0) -> None:
        """Make it the newest version; it replaces a loaded one of the same name."""
        with self._lock:
            others = tuple(h for h in self._state.loaded if h.version.name != version.name)
            self.num_swaps += 1
            loaded = LoadedVersion(version, committed_ms, self.now_ms(), trained_up_to_ms)
            self._set_state((loaded, *others), self._state.routing)

    def add_older(self, version: Version, committed_ms: int = 0, trained_up_to_ms: int = 0) -> None:
        """Add a version that the routing names, behind all others."""
        with self._lock:
            loaded = LoadedVersion(version, committed_ms, self.now_ms(), trained_up_to_ms)
            self._set_state((*self._state.loaded, loaded), self._state.routing)

    def withdraw(self, is_withdrawn: Callable[[str], bool]) -> None:
        """Unload versions by name, except the newest and those that the routing names."""
        with self._lock:
            newest, *others = self._state.loaded
            names = self._state.routing.names
            left = (h for h in others if h.version.name in names or not is_withdrawn(h.version.name))
            self._set_state((newest, *left), self._state.routing)

    def refuse(self, name: str, reason: str, message: str) -> None:
        """Remember that a committed version cannot be served."""
        with self._lock:
            self.num_refused[reason] += 1
            self.refused.pop(name, None)
            self.refused[name] = RefusedVersion(name, reason, message, self.now_ms())
            if len(self.refused) > _MAX_REFUSED:
                del self.refused[next(iter(self.refused))]

    def activate(self, name: str) -> None:
        """Serve this loaded version until `resume`; newer ones are still loaded. Raises RequestError 400,
        404."""
        with self._lock:
            loaded = self._known(name)
            self._set_state(
                self._state.loaded, dataclasses.replace(self._state.routing, activated=loaded.version.name)
            )

    def resume(self) -> None:
        """Serve the newest version again."""
        with self._lock:
            self._set_state(self._state.loaded, dataclasses.replace(self._state.routing, activated=""))

    def put(self, **splits: TrafficSplit) -> None:
        """Change the splits of the routing that are given: `canary`, `shadow`, `interleave`. Raises
        RequestError 400, 404: a version is not loaded; nothing is changed."""
        with self._lock:
            for split in splits.values():
                if split.share and not is_reference(split.version):
                    message = (
                        f"expected newest, previous or '<incarnation>-<seq>', got {shown(split.version)!r}"
                    )
                    raise RequestError(400, message, "$.version")
                if split.share and split.version not in (NEWEST, PREVIOUS):
                    self._known(split.version, "$.version")
            changes: dict[str, Any] = dict(splits)
            self._set_state(self._state.loaded, dataclasses.replace(self._state.routing, **changes))

    def named(self, name: str) -> Version:
        """Return the version of this name, or the served one for `""`. Raises RequestError 400, 404."""
        return self._known(name).version if name else self._state.served.version

    def choose(self, request: RoutableRequest) -> VersionChoice:
        """Choose the version for a request. Raises RequestError 400, 404: it names a version that is not
        loaded."""
        if request.model_version:
            return VersionChoice(self._known(request.model_version).version)
        state = self._state
        served, routing = state.served, state.routing
        if (
            routing.canary.share
            and routing.canary.takes(request.key, b"canary")
            and (canary := state.find(routing.canary.version))
        ):
            return VersionChoice(canary.version)
        if routing.interleave.share and routing.interleave.takes(request.key, b"interleave"):
            rival = state.find(routing.interleave.version)
            if rival is not None and rival is not served:
                return VersionChoice(served.version, rival.version)
        return VersionChoice(served.version)

    def resolve(self, split: TrafficSplit) -> LoadedVersion | None:
        """The version that a split refers to now; None: it is off, or the version is not loaded."""
        return self._state.find(split.version) if split.share else None

    def choose_shadow(self, request: RoutableRequest) -> Version | None:
        """The version that scores a request again as a shadow; None if off, or if it scored the request
        already."""
        state = self._state
        split = state.routing.shadow
        if not split.share or not split.takes(request.key + request.request_id.encode(), b"shadow"):
            return None
        shadow = state.find(split.version)
        return shadow.version if shadow is not None and shadow.version.name != request.model_version else None

    def _set_state(self, loaded: tuple[LoadedVersion, ...], routing: Routing) -> None:
        """Call with the lock. Unloads versions beyond `keep` that the routing does not name."""
        before, names = self._state.served, routing.names
        self._state = _State(
            tuple(h for i, h in enumerate(loaded) if i < self.keep or h.version.name in names), routing
        )
        if self._state.served.version is not before.version:
            self.on_change(self._state.served)

    def _known(self, name: str, path: str = "$.model_version") -> LoadedVersion:
        state = self._state
        if not NAME.fullmatch(name):
            raise RequestError(
                400, f"expected a model version as '<incarnation>-<seq>', got {shown(name)!r}", path
            )
        if (found := state.find(name)) is not None:
            return found
        names = ", ".join(h.version.name for h in state.loaded)
        message = f"model version {name} is not loaded; expected one of {names}, or none for the newest"
        raise RequestError(404, message, path, code="unknown_model_version")
