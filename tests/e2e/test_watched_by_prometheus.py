"""The queries of the dashboards, asked of a Prometheus that scrapes the demo. Every query has an answer, and
exposed metrics follow the conventions."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator

import pytest

from infra.stack import Stack
from tests.contract.source_tree import ROOT
from tests.contract.test_metric_names import OTHER_FORMS, OTHER_UNITS
from tests.e2e.loop_stack import applied, produce_garbage, quick_options, wait_until
from tests.e2e.prometheus import Prometheus

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

MAX_SERIES = 2_000
SILENT = {
    "roostream_worker_shadow_ne": "there is no frozen copy unless the setting `shadow` names one",
    "roostream_worker_eta_seconds": "has a value only while training catches up",
    "roostream_worker_eta_low_seconds": "as above",
    "roostream_worker_eta_high_seconds": "as above",
    "roostream_worker_drift_psi": "appears after 8,192 sampled candidates, which takes minutes at this rate",
    "roostream_worker_drift_coverage": "as above",
    "roostream_worker_drift_new_ids": "as above",
    "roostream_worker_retention_share": "has a value only after retention has begun to delete",
    "kubelet_volume_stats_available_bytes": "a metric of Kubernetes",
    "up": "queried by the programs' names in Kubernetes",
    "ALERTS": "no alert fires",
}
"""Metrics that a healthy stack does not have, and why."""


def queries() -> list[str]:
    """The expressions of every panel of every dashboard, with all values of the variables."""
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
        produce_garbage(running)  # so that the dashboards have dead letters to show
        yield running


@pytest.fixture(scope="module")
def prometheus(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with Prometheus(tmp_path_factory.mktemp("prometheus"), stack.endpoints.metrics) as running:
        wait_until("a commit with trained samples", lambda: applied(stack) > 200, 240)
        yield running


def test_every_query_of_every_dashboard_has_an_answer(prometheus: Prometheus) -> None:
    names_by_query = {expression: set(re.findall(r"[\w:]+", expression)) for expression in queries()}
    assert len(names_by_query) > 50 and SILENT.keys() <= set().union(*names_by_query.values())
    unanswered = {expression for expression, names in names_by_query.items() if not names & SILENT.keys()}

    def all_have_answered() -> bool:
        unanswered.difference_update(
            [expression for expression in unanswered if prometheus.query(expression)]
        )
        return not unanswered

    with contextlib.suppress(AssertionError):
        wait_until("an answer to every query", all_have_answered, 120)
    assert unanswered == set()


def test_every_program_is_scraped_and_has_fewer_than_two_thousand_series(prometheus: Prometheus) -> None:
    up = {found["metric"]["job"]: found["value"][1] for found in prometheus.query("max_over_time(up[1m])")}
    assert up == dict.fromkeys(prometheus.targets, "1")
    num_series = {
        f["metric"]["job"]: int(f["value"][1])
        for f in prometheus.query("max_over_time(scrape_samples_scraped[1m])")
    }
    assert num_series.keys() == up.keys() and max(num_series.values()) < MAX_SERIES, num_series


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


def test_no_alert_fires_on_a_healthy_stack(prometheus: Prometheus) -> None:
    """On a busy machine an alert may fire during the start, and must be over once the stack is healthy.
    RoostreamNothingScraped uses the programs' names in Kubernetes, so it fires here after five minutes."""

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
    """The command of docs/operations/deploy.md works with the worker of this stack."""
    page = (ROOT / "docs/operations/deploy.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^until curl .*$", page, re.MULTILINE)
    line = command.replace("http://127.0.0.1:9090/metrics", stack.endpoints.metrics["worker"])
    wait_until("a trained sample", lambda: applied(stack) > 0, 240)
    assert line != command
    completed = subprocess.run(("bash", "-c", line), capture_output=True, text=True, check=True, timeout=240)
    assert float(completed.stdout.removeprefix("roostream_worker_requests_total ")) >= 1
