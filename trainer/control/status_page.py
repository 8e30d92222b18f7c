"""The controller's read-only web page at `/`: the state, current problems, and charts of the past.

`/status.json` is `Controller.status()` plus the key `page`. `/history.json` is the past, loaded once when the
page is opened. All other files are listed here by name, so no part of a request becomes a path. Text from
outside is JSON data, which the script shows as text only."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from typing import Any, NamedTuple

from roostream.runtime.log_rate_limit import LogRateLimit, error_kind
from roostream.runtime.metrics_server import PAGE_HEADERS, PageResponse
from trainer.control.aggregate_status import aggregate_status, current_hold, worker_reports
from trainer.control.controller import Controller
from trainer.control.scrape_targets import FRESHNESS_STAGES, ScrapeTargets
from trainer.control.types import TRANSIENT, State
from trainer.monitoring.caught_up import TrainingState

log = logging.getLogger("roostream.controller")
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
    (
        "lag_ms",
        "lag_records",
        "commit_ms",
        "paused_ms",
        "fresh_p99",
        *(f"fresh.{s}" for s in FRESHNESS_STAGES),
    )
)

Values = Mapping[str, float | None]


class Resolution(NamedTuple):
    """At most `points` points, one every `step_s`."""

    step_s: float
    points: int


RESOLUTIONS = (Resolution(10, 360), Resolution(60, 360), Resolution(600, 432))
"""An hour, six hours, three days."""
MAX_CHANGES = 200


@dataclasses.dataclass(kw_only=True)
class Point:
    """A point of a line: all readings within one step of time, combined. `slot`: number of the step."""

    slot: int
    at_s: float  # of the newest reading in it
    values: dict[str, float | None]


class History:
    """Bounded series of readings by name, in several resolutions. In memory only; lost with the process.

    A step without a reading has no point, so gaps stay visible. A value that was unknown during a whole step
    is None. Within a step, the newest known value counts; for names in `worst` the largest does, so that a
    coarse line does not hide a peak. Times are seconds of one monotonic clock, so that a jump of the wall
    clock draws no wrong line. Not thread-safe."""

    def __init__(
        self, worst: frozenset[str] = frozenset(), resolutions: tuple[Resolution, ...] = RESOLUTIONS
    ) -> None:
        self.worst, self.resolutions = worst, resolutions
        self._points: list[deque[Point]] = [deque(maxlen=resolution.points) for resolution in resolutions]

    def add(self, at_s: float, values: Values) -> None:
        """Add a reading; times never go back."""
        for resolution, points in zip(self.resolutions, self._points, strict=True):
            slot = int(at_s // resolution.step_s)
            if not points or points[-1].slot != slot:
                points.append(Point(slot=slot, at_s=at_s, values=dict(values)))
            else:
                self._fold(points[-1], at_s, values)

    def _fold(self, point: Point, at_s: float, values: Values) -> None:
        point.at_s = at_s
        for name, value in values.items():
            known = point.values.get(name)
            if value is not None and known is not None and name in self.worst:
                value = max(value, known)
            if value is not None:
                point.values[name] = value

    def newest(self) -> dict[str, Any] | None:
        """The newest point of the finest resolution, in the form of `series`. It may still change."""
        return dataclasses.asdict(self._points[0][-1]) if self._points[0] else None

    def series(self) -> list[dict[str, Any]]:
        """For each resolution `step_s` and columns of equal length: slots, times, and values by name."""
        out = []
        for resolution, points in zip(self.resolutions, self._points, strict=True):
            names = sorted({name for point in points for name in point.values})
            out.append(
                {
                    "step_s": resolution.step_s,
                    "slot": [point.slot for point in points],
                    "at_s": [point.at_s for point in points],
                    "values": {name: [point.values.get(name) for point in points] for name in names},
                }
            )
        return out


class Change(NamedTuple):
    """A fact that changed, or an event."""

    at_s: float
    time_ms: int  # wall time, for people
    what: str
    was: str
    now: str


class ChangeLog:
    """Changes of named facts, and the time of the last change of each. Not thread-safe."""

    def __init__(self) -> None:
        self.newest: deque[Change] = deque(maxlen=MAX_CHANGES)  # newest last
        self._now: dict[str, tuple[str, float]] = {}

    def observe(self, at_s: float, time_ms: int, facts: Mapping[str, str]) -> None:
        """Set all facts of one moment. A fact that is missing is forgotten. The first value of a fact is not
        a change."""
        for what, now in facts.items():
            was = self._now.get(what)
            if was is None:
                self._now[what] = now, at_s
            elif was[0] != now:
                self.newest.append(Change(at_s, time_ms, what, was[0], now))
                self._now[what] = now, at_s
        for what in self._now.keys() - facts.keys():
            del self._now[what]

    def add(self, at_s: float, time_ms: int, what: str, now: str, was: str = "") -> None:
        """Add an event."""
        self.newest.append(Change(at_s, time_ms, what, was, now))

    def since_s(self, what: str) -> float | None:
        """When this fact got its current value, or was first seen. None if it is unknown."""
        known = self._now.get(what)
        return known[1] if known else None


class Rate:
    """Growth of a count per second between two readings. None at the first one, and after a decrease (a
    restart or rollback)."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def of(self, at_s: float, count: float | None) -> float | None:
        before, self._before = self._before, None if count is None else (at_s, count)
        if count is None or before is None or at_s <= before[0] or count < before[1]:
            return None
        return (count - before[1]) / (at_s - before[0])


class StatusPage:
    """`observe` is called by the controller's thread in every turn; `responses` serves from any thread."""

    def __init__(self, controller: Controller, targets: ScrapeTargets, *, interval_ms: int) -> None:
        self.controller, self.targets, self.interval_ms = controller, targets, interval_ms
        self.clock = controller.clock
        self.started_ms = self.clock.now_ms()
        self._lock = threading.Lock()
        self._history, self._changes, self._trained = History(_WORST), ChangeLog(), Rate()
        self._since: dict[str, tuple[float, Finding]] = {}
        self._counted: dict[str, int] = {}
        self._due_s = -math.inf
        self._log_rate_limit = LogRateLimit(self.clock.monotonic_s)

    def observe(self) -> None:
        """Record the current state, at most once every OBSERVE_S. An error, such as that of a report which
        cannot be read, is logged: commits go on without the page."""
        now_s = self.clock.monotonic_s()
        if now_s < self._due_s:
            return
        self._due_s = now_s + OBSERVE_S
        try:
            self._record(now_s)
        except Exception as error:
            text = "the status page has a gap (this is a defect of Roostream): %r"
            self._log_rate_limit.warning(log, error_kind(error), text, error)

    def _record(self, now_s: float) -> None:
        status, figures = self.controller.status(), self.targets.figures()
        current = self._findings(status, figures)
        with self._lock:
            trained_per_s = self._trained.of(now_s, aggregate_status(status)["requests"])
            self._history.add(now_s, {**readings(status, figures), "trained_per_s": trained_per_s})
            self._note(now_s, status, current)

    def status(self) -> dict[str, Any]:
        """The body of `/status.json`."""
        now_s, status, figures = self.clock.monotonic_s(), self.controller.status(), self.targets.figures()
        current = self._findings(status, figures)
        top = headline(status, current)
        with self._lock:
            page = {
                "format": FORMAT,
                "time_ms": self.clock.now_ms(),
                "at_s": now_s,
                "started_ms": self.started_ms,
                "headline": {**top._asdict(), "since_s": self._changes.since_s("state")},
                "findings": [{**f._asdict(), "since_s": self._since.get(f.key, (None,))[0]} for f in current],
                "members": self._members(),
                "training": aggregate_status(status),
                "figures": figures,
                "newest": self._history.newest(),
                "changes": [change._asdict() for change in list(self._changes.newest)[-SHOWN_CHANGES:]],
            }
        return plain({**status, "page": page})

    def history(self) -> dict[str, Any]:
        """The body of `/history.json`."""
        with self._lock:
            grains = self._history.series()
        return plain({"format": FORMAT, "at_s": self.clock.monotonic_s(), "grains": grains})

    def responses(self) -> dict[str, Callable[[], PageResponse]]:
        """Path → response, for `roostream.runtime.metrics_server.serve`, besides `static_files`."""
        return {"/status.json": lambda: _json(self.status()), "/history.json": lambda: _json(self.history())}

    def _members(self) -> list[str]:
        return [str(key) for key in self.controller.coordinator.membership.everyone]

    def _findings(self, status: Mapping[str, Any], figures: Mapping[str, Any]) -> list[Finding]:
        return findings(status, figures, members=self._members(), interval_ms=self.interval_ms)

    def _note(self, now_s: float, status: Mapping[str, Any], current: list[Finding]) -> None:
        time_ms = self.clock.now_ms()
        facts = {"state": headline(status, current).state, "incarnation": str(status["incarnation"])}
        self._changes.observe(now_s, time_ms, facts)
        for name in ("rollbacks", "aborts"):
            if status[name] > self._counted.get(name, status[name]):
                self._changes.add(now_s, time_ms, name[:-1], str(status["reason"]))
            self._counted[name] = status[name]
        now = {finding.key: finding for finding in current}
        for finding in current:
            if finding.key not in self._since:
                self._changes.add(now_s, time_ms, finding.level, finding.text)
        for key in self._since.keys() - now.keys():
            self._changes.add(now_s, time_ms, "over", self._since[key][1].text)
        self._since = {
            key: (self._since[key][0] if key in self._since else now_s, finding)
            for key, finding in now.items()
        }


def static_files() -> dict[str, Callable[[], PageResponse]]:
    """Path → response of the page's files. They are served before the controller is ready; the page then says
    so."""
    return {path: functools.partial(_file, name, kind) for path, (name, kind) in _FILES.items()}


def readings(status: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, float | None]:
    """Values of one moment for the history, by name; None if unknown."""
    total = aggregate_status(status)
    answers = [answer for name, answer in figures["programs"].items() if name.startswith("shard-")]
    rows = [sum(shard["rows"].values()) for shard in figures["shards"].values()] if all(answers) else []
    return {
        **{name: total[name] for name in ("lag_ms", "lag_records")},
        **{name: total["metrics"].get(name) for name in ("ne", "auc", "request_auc", "calibration")},
        **{f"fresh.{stage}": figures["freshness"][stage]["p50_ms"] for stage in FRESHNESS_STAGES},
        "fresh_p99": figures["freshness"][FRESHNESS_STAGES[-1]]["p99_ms"],
        **{name: status[name] if status["commits"] else None for name in ("commit_ms", "paused_ms")},
        "rows": sum(rows) if rows else None,
        **{f"click.{order}": figures["click_rate"][order] for order in ("served", "random", "best")},
        "served_to_random": figures["click_rate"]["served_to_random"],
    }


def plain(value: Any) -> Any:
    """Convert `value` for JSON: string keys, None for non-finite numbers."""
    match value:
        case bool() | int() | None:
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(k): plain(v) for k, v in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    return str(value)


def _json(document: Mapping[str, Any]) -> PageResponse:
    body = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    return PageResponse("application/json", body, PAGE_HEADERS)


@functools.cache
def _file(name: str, kind: str) -> PageResponse:
    content = resources.files("trainer.control").joinpath("web", name).read_bytes()
    return PageResponse(kind, content, PAGE_HEADERS)


# Health checks over what the controller knows: pure rules, worst finding first


MIN_CALIBRATION, MAX_CALIBRATION = 0.9, 1.1
_MIN_REQUESTS = 1000  # calibration of fewer requests is too noisy
_SILENT_MS = 1500.0  # three beats
_MAX_COMMITS_BEHIND = 2
_NOT_RUNNING = {
    State.CLAIMING: "an incarnation is being claimed",
    State.GATHERING: "waiting for all members",
    State.RESTORING: "members are being restored",
    State.FENCED: "a newer controller exists",
}
_WHY_GONE = "deleted by retention before they were read, or lost by a broker that stopped uncleanly"
_OPTIONAL = ("simulate",)  # a deployment is healthy without it


class Level(enum.StrEnum):
    """Worst first."""

    BAD = "bad"
    WARNING = "warning"
    UNKNOWN = "unknown"


BAD, WARNING, UNKNOWN = Level

_TRAINING = {
    TrainingState.UNKNOWN: (UNKNOWN, "the lag of training is unknown"),
    TrainingState.HELD: (BAD, "training is on hold"),
    TrainingState.BLOCKED: (BAD, "the input cannot be read"),
    TrainingState.STALLED: (BAD, "samples are waiting, and none is trained"),
    TrainingState.FALLING_BEHIND: (WARNING, "samples arrive faster than they are trained"),
}


class Finding(NamedTuple):
    """`key` identifies the problem while it lasts; `text` may change."""

    key: str
    level: Level
    text: str


class Headline(NamedTuple):
    """The state in one or two words: `state` for programs and colors, `text` for people."""

    state: str
    text: str


def findings(
    status: Mapping[str, Any], figures: Mapping[str, Any], *, members: Iterable[str], interval_ms: int
) -> list[Finding]:
    """All findings, worst first. `status`: of `Controller.status`. `figures`: of
    `scrape_targets.read_figures`. `members`: members that belong to this controller. `interval_ms`: time
    between commits."""
    found = [
        *_check_controller(status, set(members), interval_ms),
        *_check_workers(status),
        *_check_training(status),
        *_check_programs(status, figures),
    ]
    return sorted(found, key=lambda finding: list(Level).index(finding.level))


def headline(status: Mapping[str, Any], found: Iterable[Finding]) -> Headline:
    """State of the whole loop. A problem comes before the progress of training."""
    keys = {finding.key for finding in found}
    if hold := current_hold(status):
        if hold.get("kind") == TRANSIENT:
            return Headline("transient_hold", "On hold: nothing to read")
        return Headline("held", "On hold")
    if "controller" in keys or "broken" in keys:
        return Headline("stopped", "Training is stopped")
    state = TrainingState(aggregate_status(status)["state"])
    text = "Training history" if state is TrainingState.INITIAL else state.replace("_", " ").capitalize()
    return Headline(str(state), text)


def _check_controller(status: Mapping[str, Any], members: set[str], interval_ms: int) -> Iterator[Finding]:
    state, connected, hold = status["state"], set(status["members"]), current_hold(status)
    if hold:  # workers are released
        members = {name for name in members if not name.startswith("worker ")}
    missing = ", ".join(sorted(members - connected))
    if state in _NOT_RUNNING:
        waits = f"; not connected: {missing}" if missing and state == State.GATHERING else ""
        yield Finding("controller", BAD, f"{_NOT_RUNNING[State(state)]} ({status['reason']}){waits}")
    elif missing:
        yield Finding("members", BAD, f"not connected: {missing}")
    for sentence in status.get("rivals", ()):
        yield Finding(f"rival {sentence}", BAD, sentence)
    for key, member in status["members"].items():
        if member["silent_ms"] > _SILENT_MS:
            silent_s = member["silent_ms"] / 1000
            yield Finding(f"silent {key}", WARNING, f"{key} has sent no beat for {silent_s:.1f} s")
    if (status.get("uncommitted_ms") or 0.0) > 3 * interval_ms:
        age_s = status["uncommitted_ms"] / 1000
        why = f": {reason}" if (reason := status.get("abort_reason")) else ""
        yield Finding("commit", BAD, f"trained samples have not been committed for {age_s:.0f} s{why}")
    for name, text in (status.get("topic_problems") or {}).items():
        yield Finding(f"topic {name}", BAD, text)
    if hold and hold.get("kind") != TRANSIENT:
        why = ", ".join(str(hold[key]) for key in ("kind", "reason") if hold.get(key))
        yield Finding("held", BAD, f"on hold: {why}")


def _check_workers(status: Mapping[str, Any]) -> Iterator[Finding]:
    for key, report in status["reports"].items():
        if report.get("broken"):
            yield Finding("broken", BAD, f"{key} cannot continue: {report['broken']}")
        if report.get("leaving"):
            yield Finding("leaving", WARNING, f"{key} is stopping")


def _check_training(status: Mapping[str, Any]) -> Iterator[Finding]:
    if current_hold(status):
        return
    if not worker_reports(status):
        yield Finding("training", UNKNOWN, "no worker reports the lag of training")
        return
    total = aggregate_status(status)
    state = TrainingState(total["state"])
    if state in _TRAINING:
        level, text = _TRAINING[state]
        yield Finding("training", level, f"{text}: {total['reason']}" if total["reason"] else text)
    for name, report in worker_reports(status).items():
        if lost := (report.get("watch") or {}).get("lost_records"):
            text = f"{lost:,} samples of {name} are gone from Kafka, {_WHY_GONE}; its log says which"
            yield Finding(f"lost {name}", BAD, text)
    calibration, requests = total["metrics"].get("calibration"), total["metrics"].get("requests") or 0
    is_known = calibration is not None and requests >= _MIN_REQUESTS
    if is_known and not MIN_CALIBRATION <= calibration <= MAX_CALIBRATION:
        text = f"calibration is {calibration:.3f}; expected {MIN_CALIBRATION} to {MAX_CALIBRATION}"
        yield Finding("calibration", WARNING, text)


def _check_programs(status: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterator[Finding]:
    for name, answers in figures["programs"].items():
        is_released = current_hold(status) and name.startswith("worker")
        if answers is not True and name not in _OPTIONAL and not is_released:
            text = f"{name} does not answer at its /metrics, so its values are unknown"
            yield Finding(f"silent {name}", UNKNOWN, text)
    for name, count in figures["lost_records"].items():
        if not name.startswith("worker"):  # workers report theirs themselves
            text = f"{count:,} records that {name} reads are gone from Kafka, {_WHY_GONE}"
            yield Finding(f"lost {name}", BAD, text)
    for name, shard in figures["shards"].items():
        if count := shard.get("damaged"):
            text = f"{name} found {count:,.0f} damaged blocks in its segments"
            yield Finding(f"damaged {name}", BAD, text)
    for name, count in figures["non_finite"].items():
        if count:
            text = f"{name} rejected {count:,.0f} samples with non-finite scores or gradients"
            yield Finding(f"not finite {name}", WARNING, text)
    if figures["accounted"] == "no":
        text = "the auditor's counts do not add up: `roostream status` shows which"
        yield Finding("accounted", BAD, text)
    behind = commits_behind(status["seq"], figures["serving"]["version"])
    if behind is not None and behind > _MAX_COMMITS_BEHIND:
        yield Finding("serving", WARNING, f"serving uses a model version that is {behind} commits old")


def commits_behind(seq: int, version: str | None) -> int | None:
    """How many commits a version such as `3-17` is older than commit `seq`; None if unknown."""
    number = (version or "").rpartition("-")[2]
    return max(seq - int(number), 0) if number.isdecimal() else None
