"""Health checks over what the controller knows: pure rules, worst finding first.

A missing value is a finding, never healthy."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from trainer.control.aggregate_status import aggregate_status, current_hold, worker_reports
from trainer.control.types import TRANSIENT, State
from trainer.monitoring.caught_up import TrainingState

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
    if status.get("news") and status["commit_age_ms"] > 3 * interval_ms:
        age_s = status["commit_age_ms"] / 1000
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
    if lost := total["lost_records"]:
        text = f"{lost:,} samples are gone from Kafka, {_WHY_GONE}; the workers' logs say which"
        yield Finding("lost", BAD, text)
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
