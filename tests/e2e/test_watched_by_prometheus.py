"""What dashboards ask a Prometheus that scrapes the demo: every query has an answer, and what programs expose
keeps its form."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator

import pytest

from infra.stack import Stack
from tests.contract.house import ROOT
from tests.contract.test_metric_names import OTHER_FORMS, OTHER_UNITS
from tests.e2e.loop_stack import applied, produce_garbage, quick_options, wait_until
from tests.e2e.prometheus import Prometheus

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

MAX_SERIES = 2_000
SILENT = {
    "roostream_worker_shadow_ne": "no frozen copy scores beside, unless `shadow` names one",
    "roostream_worker_eta_seconds": "a number while training catches up",
    "roostream_worker_eta_low_seconds": "as above",
    "roostream_worker_eta_high_seconds": "as above",
    "roostream_worker_drift_psi": "told of the second 4,096 sampled candidates, minutes later at this rate",
    "roostream_worker_drift_coverage": "as above",
    "roostream_worker_drift_new_ids": "as above",
    "roostream_worker_retention_share": "a number once retention has begun to delete",
    "kubelet_volume_stats_available_bytes": "of Kubernetes",
    "up": "by the names that the programs have in Kubernetes",
    "ALERTS": "no alert fires",
}
"""Metrics that a stack which is well does not have."""


def queries() -> list[str]:
    """The expressions of every panel of every dashboard, as they are with all values of its variables."""
    found = []
    for path in sorted((ROOT / "infra/dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            found += [target["expr"].replace("$namespace", ".*") for target in panel["targets"]]
    return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("watched") / "home", quick_options()) as running:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=180)
        produce_garbage(running)  # so that there are dead letters to be shown
        yield running


@pytest.fixture(scope="module")
def prometheus(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with Prometheus(tmp_path_factory.mktemp("prometheus"), stack.endpoints.metrics) as running:
        wait_until("a commit with trained samples", lambda: applied(stack) > 200, 240)
        yield running


def test_every_query_of_every_dashboard_has_an_answer(prometheus: Prometheus) -> None:
    asked = {expression: set(re.findall(r"[\w:]+", expression)) for expression in queries()}
    assert len(asked) > 50 and SILENT.keys() <= set().union(*asked.values())
    silent = {expression for expression, names in asked.items() if not names & SILENT.keys()}

    def all_have_answered() -> bool:
        silent.difference_update([expression for expression in silent if prometheus.query(expression)])
        return not silent

    with contextlib.suppress(AssertionError):
        wait_until("an answer to every query", all_have_answered, 120)
    assert silent == set()


def test_every_program_is_scraped_and_has_fewer_than_two_thousand_series(prometheus: Prometheus) -> None:
    up = {found["metric"]["job"]: found["value"][1] for found in prometheus.query("max_over_time(up[1m])")}
    assert up == dict.fromkeys(prometheus.targets, "1")
    counted = {
        f["metric"]["job"]: int(f["value"][1])
        for f in prometheus.query("max_over_time(scrape_samples_scraped[1m])")
    }
    assert counted.keys() == up.keys() and max(counted.values()) < MAX_SERIES, counted


def test_metrics_follow_prometheus_conventions(
    prometheus: Prometheus,
) -> None:
    kinds: set[tuple[str, str]] = set()
    for url in prometheus.targets.values():
        with urllib.request.urlopen(url, timeout=20) as answer:
            kinds |= set(re.findall(r"^# TYPE (\w+) (\w+)$", answer.read().decode(), re.MULTILINE))
    ours = {
        (name, kind)
        for name, kind in kinds
        if not name.startswith(("python_", "process_")) and not name.endswith("_created")
    }
    assert len(ours) > 100
    assert {name for name, _ in ours if not name.startswith("roostream_")} == set()
    assert {name for name, kind in ours if (kind == "counter") != name.endswith("_total")} == set()
    assert {name for name, _ in ours if OTHER_UNITS.search(name) or OTHER_FORMS.search(name)} == set()
    assert {name for name, kind in ours if kind == "summary"} == set()


def test_no_alert_fires_on_a_stack_that_is_well(prometheus: Prometheus) -> None:
    """On a machine that is busy one may have fired while everything began; it is over once the stack is
    well. RoostreamNothingScraped goes by the names of the programs in Kubernetes, so it fires after five
    minutes."""

    def firing() -> list[str]:
        alerts = prometheus.get("alerts")["alerts"]
        names = [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"]
        return [name for name in names if name != "RoostreamNothingScraped"]

    with contextlib.suppress(AssertionError):
        wait_until("no alert fires", lambda: not firing(), 300)
    assert firing() == []
    groups = prometheus.get("rules")["groups"]
    assert [rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "err"] == []


def test_first_training_progress_in_a_cluster_is_visible(stack: Stack) -> None:
    """The line of docs/operations/deploy.md, of the worker here."""
    page = (ROOT / "docs/operations/deploy.md").read_text(encoding="utf-8")
    (waits,) = re.findall(r"^until curl .*$", page, re.MULTILINE)
    line = waits.replace("http://127.0.0.1:9090/metrics", stack.endpoints.metrics["worker"])
    wait_until("a trained sample", lambda: applied(stack) > 0, 240)
    assert line != waits
    done = subprocess.run(("bash", "-c", line), capture_output=True, text=True, check=True, timeout=240)
    assert float(done.stdout.removeprefix("roostream_worker_requests_total ")) >= 1
