"""The operations of the admin port, without HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from serving.errors import RequestError, shown
from serving.versions.interleaving_stats import InterleavingStats
from serving.versions.loaded_versions import LoadedVersion, LoadedVersions
from serving.versions.recent_requests import RecentRequests
from serving.versions.routing import TrafficSplit
from serving.versions.shadow_scoring import ShadowScoring

log = logging.getLogger("roostream.serving.admin")

SPLITS = ("canary", "shadow", "interleave")
Answer = dict[str, Any]


class SplitBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a PUT."""

    version: str = ""
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0


class AdminService:
    """Used by one thread; the objects that it works on are thread-safe."""

    def __init__(
        self,
        versions: LoadedVersions,
        recent: RecentRequests,
        shadow: ShadowScoring,
        interleaving_stats: InterleavingStats,
        now_ms: Callable[[], int],
    ) -> None:
        self.versions, self.recent, self.shadow = versions, recent, shadow
        self.interleaving_stats, self.now_ms = interleaving_stats, now_ms

    def list_versions(self) -> Answer:
        versions = self.versions
        return {
            "served": versions.served.version.name,
            "activated": versions.routing.activated or None,
            "versions": [self._describe(loaded) for loaded in versions.loaded],
            "refused": [refused._asdict() for refused in reversed(versions.refused.copy().values())],
        }

    def _describe(self, loaded: LoadedVersion) -> Answer:
        versions, now_ms = self.versions, self.now_ms()
        routing, name = versions.routing, loaded.version.name
        roles = [role for role in SPLITS if versions.resolve(getattr(routing, role)) is loaded]
        return {
            "name": name,
            "state": "served" if loaded is versions.served else "held",
            "roles": roles,
            "committed_ms": loaded.committed_ms or None,
            "installed_ms": loaded.installed_ms,
            "age_s": round((now_ms - loaded.committed_ms) / 1000, 1) if loaded.committed_ms else None,
        }

    def activate(self, name: str) -> Answer:
        """Raises RequestError 400, 404: nothing was changed."""
        self.versions.activate(name)
        log.info("version %s is served until resume", name)
        return self.list_versions()

    def resume(self) -> Answer:
        self.versions.resume()
        log.info("the newest version is served again: %s", self.versions.served.version.name)
        return self.list_versions()

    def split(self, name: str) -> Answer:
        """`name`: one of SPLITS."""
        split: TrafficSplit = getattr(self.versions.routing, name)
        loaded = self.versions.resolve(split)
        means = loaded.version.name if loaded is not None else None
        return {
            "version": split.version or None,
            "share": split.share,
            "means": means,
            **self._results(name),
        }

    def put_split(self, name: str, body: bytes) -> Answer:
        """Raises RequestError 400, 404: nothing was changed."""
        try:
            given = msgspec.json.decode(body, type=SplitBody)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            message = f'expected {{"version": "newest", "share": 0.05}}: {shown(error)}'
            raise RequestError(400, message, "$") from None
        self.versions.put(**{name: TrafficSplit(given.version if given.share else "", given.share)})
        log.info("%s: %s", name, getattr(self.versions.routing, name) or "none")
        return self.split(name)

    def _results(self, name: str) -> Answer:
        if name == "shadow":
            shadow = self.shadow
            return {"scored": shadow.num_scored, "dropped": shadow.num_dropped, "failed": shadow.num_failed}
        if name == "interleave":
            interleaving_stats, pairs = self.interleaving_stats, self.interleaving_stats.outcomes_by_pair()
            results = [
                {"served": pair.served, "rival": pair.rival, "won_by": won_by}
                for pair, won_by in pairs.items()
            ]
            counts = {
                "lists": interleaving_stats.num_lists,
                "engagements": interleaving_stats.num_engaged,
                "failed": interleaving_stats.num_failed,
            }
            return counts | {"results": results}
        return {}

    def slow(self) -> Answer:
        """Request contents are left out: features belong to users."""
        return {
            "requests": [
                {
                    "request_id": request.request_id,
                    "time_ms": request.time_ms,
                    "took_ms": round(1e3 * request.took_s, 3),
                    "candidates": len(request.item_ids),
                    "model_version": request.model_version,
                }
                for request in self.recent.slowest()
            ]
        }
