"""The health rules of the status page: each problem gives one finding."""

from __future__ import annotations

from typing import Any

import pytest

from roostream.runtime import scrape
from roostream.runtime.scrape import ScrapedMetrics
from trainer.control.scrape_targets import read_figures
from trainer.control.status_page import Finding, Level, commits_behind, findings, headline

MEMBERS = ("shard 0", "worker 0")
PERMANENT = {"kind": "permanent", "reason": "out of memory", "member": "worker 0", "since_ms": 5}
TRANSIENT = {"kind": "transient", "reason": "nothing to read for 60 s", "member": "", "since_ms": 5}
GOOD = {"watch": {"state": "caught_up"}, "metrics": {"requests": 5000, "calibration": 1.01}}


def status(worker: dict[str, Any] | None = None, **override: Any) -> dict[str, Any]:
    """The status of a healthy deployment. `worker`: the report of worker 0; `override`: other fields."""
    fields = {
        "state": "running",
        "reason": "start",
        "seq": 9,
        "commit_age_ms": 3000.0,
        "uncommitted_ms": 3000.0,
        "workers": 1,
        "members": {name: {"incarnation": 1, "silent_ms": 200.0} for name in MEMBERS},
        "reports": {"shard 0": {}, "worker 0": GOOD if worker is None else worker},
    }
    return {**fields, **override}


def findings_of(report: dict[str, Any], **scraped: str) -> list[Finding]:
    """The findings for a status and the scraped metrics of other programs ("" = a program does not
    answer)."""
    names = dict.fromkeys(scraped, "http://x")
    texts = {
        name.replace("_", "-"): scrape.parse(text) if text else ScrapedMetrics()
        for name, text in scraped.items()
    }
    figures = read_figures({name.replace("_", "-"): url for name, url in names.items()}, texts)
    return findings(report, figures, members=MEMBERS, interval_ms=10_000)


def test_a_caught_up_loop_has_no_findings() -> None:
    report = status()
    assert findings_of(report) == [] and headline(report, []) == ("caught_up", "Caught up")


def watch(state: str, **more: Any) -> dict[str, Any]:
    """A status in which the worker reports this training state."""
    return status({"watch": {"state": state, **more}})


MISCALIBRATED = {**GOOD, "metrics": {"requests": 5000, "calibration": 1.2}}
SHARD_SILENT = {m: {"silent_ms": 2000.0 * (m == "shard 0")} for m in MEMBERS}
BAD, WARNING, UNKNOWN = Level


@pytest.mark.parametrize(
    ("report", "key", "level", "words"),
    [
        (status(state="gathering", members={}), "controller", BAD, "shard 0, worker 0"),
        (status(state="fenced", reason="incarnation 3"), "controller", BAD, "incarnation 3"),
        (status(members={"worker 0": {"silent_ms": 0.0}}), "members", BAD, "shard 0"),
        (status(members=SHARD_SILENT), "silent shard 0", WARNING, "2.0 s"),
        (status(uncommitted_ms=31_000.0), "commit", BAD, "31 s"),
        (status(uncommitted_ms=31_000.0, abort_reason="the disk is full"), "commit", BAD, "disk is full"),
        (status(holds=[PERMANENT]), "held", BAD, "out of memory"),
        (status(holds=[TRANSIENT], members={}), "members", BAD, "shard 0"),
        (status({**GOOD, "broken": "a shard is away"}), "broken", BAD, "worker 0"),
        (status({**GOOD, "leaving": True}), "leaving", WARNING, "worker 0"),
        (status({}), "training", UNKNOWN, "unknown"),
        (status(reports={}), "training", UNKNOWN, "worker"),
        (watch("blocked"), "training", BAD, "input"),
        (watch("stalled", reason="no memory"), "training", BAD, "no memory"),
        (watch("falling_behind"), "training", WARNING, "faster"),
        (watch("caught_up", lost_records=3), "lost worker 0", BAD, "3"),
        (status(MISCALIBRATED), "calibration", WARNING, "1.200"),
    ],
)
def test_each_problem_of_training_is_one_finding(
    report: dict[str, Any], key: str, level: Level, words: str
) -> None:
    (found,) = findings_of(report)
    assert (found.key, found.level) == (key, level) and words in found.text


@pytest.mark.parametrize(
    ("program", "text", "key", "level", "words"),
    [
        ("serving", "", "silent serving", UNKNOWN, "serving"),
        ("joiner", "roostream_joiner_lost_records 7", "lost joiner", BAD, "7"),
        ("shard_0", "roostream_shard_damaged_segment_parts 2", "damaged shard-0", BAD, "2"),
        ("worker", "roostream_worker_non_finite_total 3", "not finite worker", WARNING, "3"),
        ("auditor", 'roostream_auditor_accounted{state="no"} 1', "accounted", BAD, "auditor"),
        ("serving", 'roostream_serving_model_version{version="1-4"} 1', "serving", WARNING, "5 commits old"),
    ],
)
def test_each_problem_of_a_program_is_one_finding(
    program: str, text: str, key: str, level: Level, words: str
) -> None:
    (found,) = findings_of(status(), **{program: text and f"{text}\n"})
    assert (found.key, found.level) == (key, level) and words in found.text


@pytest.mark.parametrize(
    "report",
    [
        status(commit_age_ms=500_000.0, uncommitted_ms=None),  # idle, so there is nothing to commit
        status({**GOOD, "metrics": {"requests": 10, "calibration": 3.0}}),  # too few requests to judge
        status({**GOOD, "metrics": {}}),
        status(holds=[]),
        status(
            holds=[TRANSIENT], members={"shard 0": {"silent_ms": 0.0}}, reports={"shard 0": {}}
        ),  # the hold has released the workers
    ],
)
def test_normal_conditions_are_no_findings(report: dict[str, Any]) -> None:
    assert findings_of(report) == []


def test_a_deployment_without_the_simulator_has_no_findings() -> None:
    assert findings_of(status(), simulate="") == []


def test_findings_are_sorted_worst_first() -> None:
    found = findings_of(status({"watch": {"state": "unknown"}, "leaving": True, "broken": "x"}))
    assert [f.level for f in found] == [Level.BAD, Level.WARNING, Level.UNKNOWN]


@pytest.mark.parametrize(
    ("report", "state"),
    [
        (watch("catching_up"), "catching_up"),
        (watch("something new"), "unknown"),
        (status({**GOOD, "broken": "x"}), "stopped"),
        (status(state="restoring"), "stopped"),
        (status(holds=[PERMANENT], state="restoring"), "held"),
        (status(holds=[TRANSIENT]), "transient_hold"),
        (status(workers=2, reports={"worker 0": GOOD, "worker 1": {}}), "unknown"),
    ],
)
def test_the_headline_is_the_worst_and_unknown_is_never_good(report: dict[str, Any], state: str) -> None:
    assert headline(report, findings_of(report)).state == state


@pytest.mark.parametrize(("version", "behind"), [("3-17", 3), ("3-25", 0), (None, None), ("begin", None)])
def test_age_of_the_served_version_in_commits(version: str | None, behind: int | None) -> None:
    assert commits_behind(20, version) == behind


def test_a_second_process_of_a_member_is_a_problem() -> None:
    sentence = "two processes run as shard 0: pid 1 on a, which has this index now, and pid 2 on b"
    assert [(finding.text, finding.level) for finding in findings_of(status(rivals=[sentence]))] == [
        (sentence, BAD)
    ]
