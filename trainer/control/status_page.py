"""The page at `/` of the controller: state first, what is wrong and since when, then the past. Read-only.

`/status.json` is `Controller.status()` with a key `page` more; `/history.json` the past, once when the page is opened. Everything
else is a file of `web/` under a name that is listed here: nothing of a request becomes a path, and every text that comes from
outside is data in JSON, which the script shows as text only.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import threading
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from roostream.runtime.metrics_server import PAGE_HEADERS, PageResponse
from trainer.control.aggregate_status import together
from trainer.control.controller import Controller
from trainer.control.health_checks import Finding, findings, headline
from trainer.control.history import ChangeLog, History, Rate
from trainer.control.scrape_targets import FRESHNESS_STAGES, ScrapeTargets

FORMAT = 1
OBSERVE_S = 1.0
SHOWN_CHANGES = 50
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{
        f"/{name}": (name, "text/javascript; charset=utf-8")
        for name in ("page.js", "tables.js", "chart.js", "parts.js", "words.js")
    },
}
_WORST = frozenset(
    {
        "lag_ms",
        "lag_records",
        "commit_ms",
        "paused_ms",
        "fresh_p99",
        *(f"fresh.{s}" for s in FRESHNESS_STAGES),
    }
)


class StatusPage:
    """`observe` from the controller's thread, each turn; `answers` serves from any."""

    def __init__(self, controller: Controller, neighbours: ScrapeTargets, *, interval_ms: int) -> None:
        self.controller, self.neighbours, self.interval_ms = controller, neighbours, interval_ms
        self.clock = controller.clock
        self.started_ms = self.clock.now_ms()
        self._lock = threading.Lock()
        self._history, self._changes, self._trained = History(_WORST), ChangeLog(), Rate()
        self._since: dict[str, tuple[float, Finding]] = {}
        self._counted: dict[str, int] = {}
        self._due_s = -math.inf

    def observe(self) -> None:
        """Note what is so now; does nothing until its second is over."""
        now_s = self.clock.monotonic_s()
        if now_s < self._due_s:
            return
        self._due_s = now_s + OBSERVE_S
        status, figures = self.controller.status(), self.neighbours.figures()
        found = self._findings(status, figures)
        with self._lock:
            self._history.add(
                now_s,
                {
                    **readings(status, figures),
                    "trained_per_s": self._trained.of(now_s, together(status)["requests"]),
                },
            )
            self._note(now_s, status, found)

    def status(self) -> dict[str, Any]:
        """The document that the page shows."""
        now_s, status, figures = self.clock.monotonic_s(), self.controller.status(), self.neighbours.figures()
        found = self._findings(status, figures)
        top = headline(status, found)
        with self._lock:
            page = {
                "format": FORMAT,
                "time_ms": self.clock.now_ms(),
                "at_s": now_s,
                "started_ms": self.started_ms,
                "headline": {**top._asdict(), "since_s": self._changes.since_s("state")},
                "findings": [{**f._asdict(), "since_s": self._since.get(f.key, (None,))[0]} for f in found],
                "members": self._members(),
                "training": together(status),
                "figures": figures,
                "newest": self._history.newest(),
                "changes": [change._asdict() for change in list(self._changes.newest)[-SHOWN_CHANGES:]],
            }
        return plain({**status, "page": page})

    def history(self) -> dict[str, Any]:
        """All that is kept of the past."""
        with self._lock:
            return plain(
                {"format": FORMAT, "at_s": self.clock.monotonic_s(), "grains": self._history.series()}
            )

    def answers(self) -> dict[str, Callable[[], PageResponse]]:
        """By path, for `roostream.runtime.metrics_server.serve`, beside `files()`."""
        return {"/status.json": lambda: _json(self.status()), "/history.json": lambda: _json(self.history())}

    def _members(self) -> list[str]:
        coordinator = self.controller.coordinator
        return [str(key) for key in coordinator.membership.everyone]

    def _findings(self, status: Mapping[str, Any], figures: Mapping[str, Any]) -> list[Finding]:
        return findings(status, figures, members=self._members(), interval_ms=self.interval_ms)

    def _note(self, now_s: float, status: Mapping[str, Any], found: list[Finding]) -> None:
        time_ms = self.clock.now_ms()
        self._changes.observe(
            now_s,
            time_ms,
            {"state": headline(status, found).state, "incarnation": str(status["incarnation"])},
        )
        for name in ("rollbacks", "aborts"):
            if status[name] > self._counted.get(name, status[name]):
                self._changes.add(now_s, time_ms, name[:-1], str(status["reason"]))
            self._counted[name] = status[name]
        now = {finding.key: finding for finding in found}
        for finding in found:
            if finding.key not in self._since:
                self._changes.add(now_s, time_ms, finding.level, finding.text)
        for key in self._since.keys() - now.keys():
            self._changes.add(now_s, time_ms, "over", self._since[key][1].text)
        self._since = {
            key: (self._since[key][0] if key in self._since else now_s, finding)
            for key, finding in now.items()
        }


def files() -> dict[str, Callable[[], PageResponse]]:
    """The page itself, by path; until there is a controller it says that none answers."""
    return {path: functools.partial(_file, name, kind) for path, (name, kind) in _FILES.items()}


def readings(status: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, float | None]:
    """What the history keeps of one moment, by name; None where it isn't known."""
    whole = together(status)
    rows = [sum(shard["rows"].values()) for shard in figures["shards"].values()]
    return {
        **{name: whole[name] for name in ("lag_ms", "lag_records")},
        **{name: whole["metrics"].get(name) for name in ("ne", "auc", "request_auc", "calibration")},
        **{f"fresh.{stage}": figures["freshness"][stage]["p50_ms"] for stage in FRESHNESS_STAGES},
        "fresh_p99": figures["freshness"][FRESHNESS_STAGES[-1]]["p99_ms"],
        **{name: status[name] if status["commits"] else None for name in ("commit_ms", "paused_ms")},
        "rows": sum(rows) if rows else None,
        **{f"click.{order}": figures["click_rate"][order] for order in ("served", "random", "best")},
        "served_to_random": figures["click_rate"]["served_to_random"],
    }


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: text keys, no number that isn't finite."""
    match value:
        case bool() | int() | None:
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(k): plain(v) for k, v in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(v) for v in value]
    return (
        plain(dataclasses.asdict(value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type)
        else str(value)
    )


def _json(document: Mapping[str, Any]) -> PageResponse:
    body = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    return PageResponse("application/json", body, PAGE_HEADERS)


def _file(name: str, kind: str) -> PageResponse:
    return PageResponse(kind, _content(name), PAGE_HEADERS)


@functools.cache
def _content(name: str) -> bytes:
    return resources.files("trainer.control").joinpath("web", name).read_bytes()
