"""What is wrong, from what the controller knows: pure rules, worst first. A reading that is missing is a finding, never good."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from roostream.runtime.manifest import KEEP_MANIFESTS
from trainer.control.aggregate_status import held_by, together, worker_reports
from trainer.control.types import TRANSIENT, State
from trainer.monitoring.caught_up import Liveness

CALIBRATION = (0.9, 1.1)
_MIN_REQUESTS = 1000  # before them calibration says little
_SILENT_MS = 1500.0  # three beats
_COMMITS_BEHIND = KEEP_MANIFESTS // 2  # serving may be late by these
_UNUSUAL = {
    State.CLAIMING: "an incarnation is being claimed",
    State.GATHERING: "waiting for every member",
    State.RESTORING: "members are being restored",
    State.FENCED: "a newer controller exists",
}
_OPTIONAL = ("simulate",)  # no stack is wrong without


class Level(enum.StrEnum):
    """Worst first."""

    BAD = "bad"
    WARNING = "warning"
    UNKNOWN = "unknown"


_TRAINING = {
    Liveness.UNKNOWN: (Level.UNKNOWN, "how far training is can't be read"),
    Liveness.HELD: (Level.BAD, "training is held"),
    Liveness.BLOCKED: (Level.BAD, "what is there can't be read"),
    Liveness.STALLED: (Level.BAD, "samples are there, and none is trained"),
    Liveness.FALLING_BEHIND: (Level.WARNING, "samples come faster than they are trained"),
}


class Finding(NamedTuple):
    """`key` names it as long as it lasts, whatever its text says."""

    key: str
    level: Level
    text: str


class Headline(NamedTuple):
    """The state in a word or two: `state` is for machines and colours, `text` for people."""

    state: str
    text: str


def findings(
    status: Mapping[str, Any], figures: Mapping[str, Any], *, members: Iterable[str], interval_ms: int
) -> list[Finding]:
    """`status` as Controller.status gives it, `figures` as `neighbours.read_figures`; `members`: those that belong to this
    controller; `interval_ms` between commits."""
    found = [
        *_of_the_controller(status, set(members), interval_ms),
        *_of_workers(status),
        *_of_training(status),
        *_of_programs(status, figures),
    ]
    return sorted(found, key=lambda finding: list(Level).index(finding.level))


def headline(status: Mapping[str, Any], found: Iterable[Finding]) -> Headline:
    """Of the whole loop; what is wrong goes before how far training is."""
    keys = {finding.key for finding in found}
    if held := held_by(status):
        return (
            Headline("transient_hold", "Held: nothing to read")
            if held.get("kind") == TRANSIENT
            else Headline("held", "Held")
        )
    if "controller" in keys or "broken" in keys:
        return Headline("stopped", "Training is stopped")
    state = Liveness(together(status)["state"])
    return Headline(
        str(state), "Training history" if state is Liveness.INITIAL else state.replace("_", " ").capitalize()
    )


def _of_the_controller(status: Mapping[str, Any], members: set[str], interval_ms: int) -> Iterator[Finding]:
    state, there, held = status["state"], set(status["members"]), held_by(status)
    if held:  # workers are released
        members = {name for name in members if not name.startswith("worker ")}
    if state in _UNUSUAL:
        missing = ", ".join(sorted(members - there))
        waits = f"; not there: {missing}" if missing and state == State.GATHERING else ""
        yield Finding("controller", Level.BAD, f"{_UNUSUAL[State(state)]} ({status['reason']}){waits}")
    elif missing := ", ".join(sorted(members - there)):
        yield Finding("members", Level.BAD, f"not there: {missing}")
    for key, member in status["members"].items():
        if member["silent_ms"] > _SILENT_MS:
            yield Finding(
                f"silent {key}",
                Level.WARNING,
                f"{key} has not been heard of for {member['silent_ms'] / 1000:.1f} s",
            )
    if status.get("news") and status["commit_age_ms"] > 3 * interval_ms:
        yield Finding(
            "commit",
            Level.BAD,
            f"something is trained, and nothing committed for {status['commit_age_ms'] / 1000:.0f} s",
        )
    if held and held.get("kind") != TRANSIENT:
        yield Finding(
            "held", Level.BAD, f"held: {', '.join(str(held[k]) for k in ('kind', 'reason') if held.get(k))}"
        )


def _of_workers(status: Mapping[str, Any]) -> Iterator[Finding]:
    for key, report in status["reports"].items():
        if report.get("broken"):
            yield Finding("broken", Level.BAD, f"{key} can't go on: {report['broken']}")
        if report.get("leaving"):
            yield Finding("leaving", Level.WARNING, f"{key} is stopping")


def _of_training(status: Mapping[str, Any]) -> Iterator[Finding]:
    if held_by(status):
        return
    if not worker_reports(status):
        yield Finding("training", Level.UNKNOWN, "no worker tells how far training is")
        return
    whole = together(status)
    state = Liveness(whole["state"])
    if state in _TRAINING:
        level, text = _TRAINING[state]
        yield Finding("training", level, f"{text}: {whole['reason']}" if whole["reason"] else text)
    if whole["lost_records"]:
        yield Finding(
            "lost", Level.BAD, f"retention deleted {whole['lost_records']:,} samples before they were trained"
        )
    calibration, requests = whole["metrics"].get("calibration"), whole["metrics"].get("requests") or 0
    least, most = CALIBRATION
    if calibration is not None and requests >= _MIN_REQUESTS and not least <= calibration <= most:
        yield Finding(
            "calibration", Level.WARNING, f"calibration is {calibration:.3f}; expected {least} to {most}"
        )


def _of_programs(status: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterator[Finding]:
    for name, answers in figures["programs"].items():
        if held_by(status) and name.startswith("worker"):
            continue
        if answers is not True and name not in _OPTIONAL:
            yield Finding(
                f"silent {name}",
                Level.UNKNOWN,
                f"{name} does not answer at its /metrics: what it measures is unknown",
            )
    for name, count in figures["lost_records"].items():
        if name.startswith("worker"):  # they tell it themselves
            continue
        yield Finding(
            f"lost {name}", Level.BAD, f"retention deleted {count:,} records before {name} read them"
        )
    for name, shard in figures["shards"].items():
        if shard.get("damaged"):
            yield Finding(
                f"damaged {name}",
                Level.BAD,
                f"{name} found {shard['damaged']:,.0f} damaged parts of its segments",
            )
    for name, count in figures["non_finite"].items():
        if count:
            yield Finding(
                f"not finite {name}",
                Level.WARNING,
                f"{name} refused {count:,.0f} samples whose numbers were not finite",
            )
    if figures["accounted"] == "no":
        yield Finding(
            "accounted", Level.BAD, "the auditor's sums don't add up: `roostream status` tells which"
        )
    behind = commits_behind(status["seq"], figures["serving"]["version"])
    if behind is not None and behind > _COMMITS_BEHIND:
        yield Finding("serving", Level.WARNING, f"serving scores with a version that is {behind} commits old")


def commits_behind(seq: int, version: str | None) -> int | None:
    """By how many commits a version such as `3-17` is older than commit `seq`; None where that isn't known."""
    number = (version or "").rpartition("-")[2]
    return max(seq - int(number), 0) if number.isdecimal() else None
