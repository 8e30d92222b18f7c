"""What is wrong, rule by rule."""

from __future__ import annotations

from typing import Any

import pytest

from roostream.runtime import scrape
from roostream.runtime.scrape import ScrapedMetrics
from trainer.control.health_checks import Finding, Level, commits_behind, findings, headline
from trainer.control.scrape_targets import read_figures

MEMBERS = ("shard 0", "worker 0")
PERMANENT = {"kind": "permanent", "reason": "out of memory", "member": "worker 0", "since_ms": 5}
TRANSIENT = {"kind": "transient", "reason": "nothing to read for 60 s", "member": "", "since_ms": 5}
GOOD = {"watch": {"state": "caught_up"}, "metrics": {"requests": 5000, "calibration": 1.01}}


def status(worker: dict[str, Any] | None = None, **over: Any) -> dict[str, Any]:
    found = {
        "state": "running",
        "reason": "start",
        "seq": 9,
        "commit_age_ms": 3000.0,
        "news": True,
        "workers": 1,
        "members": {name: {"incarnation": 1, "silent_ms": 200.0} for name in MEMBERS},
        "reports": {"shard 0": {}, "worker 0": GOOD if worker is None else worker},
    }
    return {**found, **over}


def judged(told: dict[str, Any], **scraped: str) -> list[Finding]:
    names = dict.fromkeys(scraped, "http://x")
    texts = {
        name.replace("_", "-"): scrape.parse(text) if text else ScrapedMetrics()
        for name, text in scraped.items()
    }
    figures = read_figures({name.replace("_", "-"): url for name, url in names.items()}, texts)
    return findings(told, figures, members=MEMBERS, interval_ms=10_000)


def test_a_caught_up_loop_has_no_findings() -> None:
    told = status()
    assert judged(told) == [] and headline(told, []) == ("caught_up", "Caught up")


@pytest.mark.parametrize(
    ("told", "scraped", "key", "level", "words"),
    [
        (status(state="gathering", members={}), {}, "controller", Level.BAD, "shard 0, worker 0"),
        (status(state="restoring"), {}, "controller", Level.BAD, "start"),
        (
            status(state="fenced", reason="incarnation 3"),
            {},
            "controller",
            Level.BAD,
            "incarnation 3",
        ),
        (status(members={"worker 0": {"silent_ms": 0.0}}), {}, "members", Level.BAD, "shard 0"),
        (
            status(members={m: {"silent_ms": 2000.0 * (m == "shard 0")} for m in MEMBERS}),
            {},
            "silent shard 0",
            Level.WARNING,
            "2.0 s",
        ),
        (status(commit_age_ms=31_000.0), {}, "commit", Level.BAD, "31 s"),
        (status(holds=[PERMANENT]), {}, "held", Level.BAD, "out of memory"),
        (
            status(holds=[PERMANENT], reports={}, members={"shard 0": {"silent_ms": 0.0}}),
            {},
            "held",
            Level.BAD,
            "out of memory",
        ),
        (status(holds=[TRANSIENT], members={}), {}, "members", Level.BAD, "shard 0"),
        (
            status({**GOOD, "broken": "a shard is away"}),
            {},
            "broken",
            Level.BAD,
            "worker 0",
        ),
        (status({**GOOD, "leaving": True}), {}, "leaving", Level.WARNING, "worker 0"),
        (
            status({"watch": {"state": "unknown"}}),
            {},
            "training",
            Level.UNKNOWN,
            "unknown",
        ),
        (status({}), {}, "training", Level.UNKNOWN, "unknown"),
        (status(reports={}), {}, "training", Level.UNKNOWN, "worker"),
        (status({"watch": {"state": "blocked"}}), {}, "training", Level.BAD, "input"),
        (
            status({"watch": {"state": "stalled", "reason": "no memory"}}),
            {},
            "training",
            Level.BAD,
            "no memory",
        ),
        (
            status({"watch": {"state": "held", "reason": "by hand"}}),
            {},
            "training",
            Level.BAD,
            "by hand",
        ),
        (
            status({"watch": {"state": "falling_behind"}}),
            {},
            "training",
            Level.WARNING,
            "faster",
        ),
        (
            status({"watch": {"state": "caught_up", "lost_records": 3}}),
            {"worker": "roostream_worker_lost_records_total 3\n"},
            "lost",
            Level.BAD,
            "3",
        ),
        (
            status({**GOOD, "metrics": {"requests": 5000, "calibration": 1.2}}),
            {},
            "calibration",
            Level.WARNING,
            "1.200",
        ),
        (status(), {"serving": ""}, "silent serving", Level.UNKNOWN, "serving"),
        (
            status(),
            {"joiner": "roostream_joiner_lost_records 7\n"},
            "lost joiner",
            Level.BAD,
            "7",
        ),
        (
            status(),
            {"shard_0": "roostream_shard_damaged_segment_parts 2\n"},
            "damaged shard-0",
            Level.BAD,
            "2",
        ),
        (
            status(),
            {"worker": "roostream_worker_non_finite_total 3\n"},
            "not finite worker",
            Level.WARNING,
            "3",
        ),
        (
            status(),
            {"auditor": 'roostream_auditor_accounted{state="no"} 1\n'},
            "accounted",
            Level.BAD,
            "auditor",
        ),
        (
            status(),
            {"serving": 'roostream_serving_model_version{version="1-4"} 1\n'},
            "serving",
            Level.WARNING,
            "5 commits old",
        ),
    ],
)
def test_each_problem_is_one_finding(
    told: dict[str, Any], scraped: dict[str, str], key: str, level: Level, words: str
) -> None:
    (found,) = judged(told, **scraped)
    assert (found.key, found.level) == (key, level) and words in found.text


@pytest.mark.parametrize(
    "told",
    [
        status(commit_age_ms=500_000.0, news=False),  # idle: nothing to commit
        status({**GOOD, "metrics": {"requests": 10, "calibration": 3.0}}),  # too few to say
        status({**GOOD, "metrics": {}}),
        status(holds=[]),
        status(
            holds=[TRANSIENT], members={"shard 0": {"silent_ms": 0.0}}, reports={"shard 0": {}}
        ),  # workers are released
    ],
)
def test_normal_conditions_are_no_findings(told: dict[str, Any]) -> None:
    assert judged(told) == []


def test_a_deployment_without_the_simulator_has_no_findings() -> None:
    assert judged(status(), simulate="") == []


def test_findings_are_sorted_worst_first() -> None:
    found = judged(status({"watch": {"state": "unknown"}, "leaving": True, "broken": "x"}))
    assert [f.level for f in found] == [Level.BAD, Level.WARNING, Level.UNKNOWN]


@pytest.mark.parametrize(
    ("told", "state"),
    [
        (status({"watch": {"state": "catching_up"}}), "catching_up"),
        (status({"watch": {"state": "something new"}}), "unknown"),
        (status(reports={}), "unknown"),
        (status({**GOOD, "broken": "x"}), "stopped"),
        (status(state="restoring"), "stopped"),
        (status(holds=[PERMANENT], state="restoring"), "held"),
        (status(holds=[TRANSIENT], reports={}, members={}), "transient_hold"),
        (status(holds=[TRANSIENT]), "transient_hold"),
        (
            status(workers=2, reports={"worker 0": GOOD, "worker 1": {"watch": {"state": "catching_up"}}}),
            "catching_up",
        ),
        (status(workers=2, reports={"worker 0": GOOD, "worker 1": {}}), "unknown"),
    ],
)
def test_the_headline_is_the_worst_and_unknown_is_never_good(told: dict[str, Any], state: str) -> None:
    assert headline(told, judged(told)).state == state


@pytest.mark.parametrize(
    ("version", "behind"), [("3-17", 3), ("3-25", 0), (None, None), ("", None), ("begin", None)]
)
def test_age_of_the_served_version_in_commits(version: str | None, behind: int | None) -> None:
    assert commits_behind(20, version) == behind
