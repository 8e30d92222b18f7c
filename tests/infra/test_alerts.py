"""Alert rules and dashboards: promtool runs their tests, and every metric that they use is exported by some
program."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from infra.auditor.sums import METRICS as AUDITOR
from infra.program_specs import PROGRAM_SPECS, SIMULATE
from joiner.metrics import JoinerMetrics
from param_server.main import METRICS as SHARD
from roostream.runtime.histograms import FRESHNESS_BUCKETS_S
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.schema.schema_file import schema_from_dict
from roostream.warehouse.archiver_program import METRICS as ARCHIVER
from roostream.warehouse.compactor_program import METRICS as COMPACTOR
from roostream.warehouse.readers.reader_program import METRICS as READER
from serving.metrics import METRICS as SERVING
from serving.metrics import REQUEST_S, ServingMetrics
from serving.online_features.updater import FeatureMetrics
from tests.contract.source_tree import ROOT
from tests.models.model_cases import make_batch
from trainer.metrics import CONTROLLER, DRIFT, WORKER, WORKER_READING
from trainer.monitoring.caught_up import TrainingState
from trainer.monitoring.slices import MAX_SLICES, build_slicers
from trainer.monitoring.windowed_metrics import MAX_VALUES, WindowedMetrics
from trainer.worker_monitor import MAX_TASKS, quality_gauges, quality_report

TABLES = (SHARD, WORKER, WORKER_READING, CONTROLLER, SERVING, AUDITOR, ARCHIVER, COMPACTOR, READER)
ALERTS, DASHBOARDS = ROOT / "infra/alerts", sorted((ROOT / "infra/dashboards").glob("*.json"))
RUNBOOK = ROOT / "docs/operations/monitor.md"
METRIC = re.compile(r"\broostream_[a-z0-9_]+")
SUFFIX = re.compile(r"_(bucket|count|sum|total)$")


def rules() -> list[dict[str, Any]]:
    text = (ALERTS / "roostream.rules.yml").read_text(encoding="utf-8")
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def rule_expressions() -> list[str]:
    return [rule["expr"] for rule in rules()]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def exported() -> set[str]:
    """Metric names without the suffixes of counters and histograms, from the code that exports them."""
    registries = [CollectorRegistry() for _ in range(3)]
    collectors: tuple[Any, ...] = tuple(
        metrics_class(registry)
        for metrics_class, registry in zip(
            (JoinerMetrics, ServingMetrics, FeatureMetrics), registries, strict=True
        )
    )
    assert len(collectors) == 3
    names = {family.name for registry in registries for family in registry.collect()}
    names |= {"roostream_freshness_seconds", "roostream_shard_call_seconds", "roostream_ready"}
    return names | {name.removesuffix("_total") for table in TABLES for name in table}


def metric_names(text: str) -> set[str]:
    return {SUFFIX.sub("", name) for name in METRIC.findall(text)}


def expressions(panels: list[dict[str, Any]]) -> list[str]:
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_every_metric_that_an_alert_names_is_exported() -> None:
    names = set().union(*(metric_names(expr) for expr in rule_expressions()))
    assert len(names) > 15 and names - exported() == set()


def test_every_metric_that_a_dashboard_shows_is_exported() -> None:
    found: set[str] = set()
    for path in DASHBOARDS:
        panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
        shown = [expr for expr in expressions(panels) if "__name__" not in expr]
        assert set().union(*map(metric_names, shown)) - exported() == set(), path.name
        assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1)), path.name
        found |= {panel["title"] for panel in panels}
    assert len(DASHBOARDS) == 6 and len(found) > 40


def test_recorded_series_exist_where_they_are_read() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    texts = [*rule_expressions(), *(path.read_text(encoding="utf-8") for path in DASHBOARDS)]
    assert recorded == {name for text in texts for name in re.findall(r"\broostream:[\w:]+", text)}


def test_every_dashboard_is_installed_in_a_cluster() -> None:
    text = (ROOT / "infra/dashboards/kustomization.yaml").read_text(encoding="utf-8")
    assert sorted(re.findall(r"[\w-]+\.json", text)) == [path.name for path in DASHBOARDS]


def test_every_alert_has_a_test_and_a_runbook() -> None:
    names = [rule["alert"] for rule in alerts()]
    tested = re.findall(r"- name: (\w+)", (ALERTS / "roostream.test.yml").read_text(encoding="utf-8"))
    assert list(dict.fromkeys(tested)) == names == list(dict.fromkeys(names))
    assert names == re.findall(r"^### (Roostream\w+)", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/operations/monitor.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_every_state_that_an_alert_names_exists() -> None:
    text = " ".join(rule_expressions())
    found = set(re.findall(r'worker_state\{state="(\w+)"\}', text))
    for several in re.findall(r'worker_state\{state!?~"([\w|]+)"\}', text):
        found |= set(several.split("|"))
    assert len(found) >= 5 and found <= {str(state) for state in TrainingState}


def test_every_sum_is_by_namespace() -> None:
    """Without the namespace, the traffic of a large deployment would hide that a small one is down."""
    aggregated = re.compile(r"\b(?:sum|max|min|avg|count|group)\b(?!_)\s*(?:by \(([\w, ]+)\))?")
    for expr in rule_expressions():
        for labels in aggregated.findall(expr):
            assert "namespace" in labels, expr
        for labels in re.findall(r"\bon \(?([\w, ]*)\)", expr):
            assert "namespace" in labels, expr
        assert not re.search(r"\bon\(", expr), expr


def test_bounds_of_objectives_are_bounds_of_buckets() -> None:
    """A bucket that does not exist has no value, and an objective without a value never fires."""
    bounds = {
        "roostream_serving_request_seconds": REQUEST_S,
        "roostream_freshness_seconds": FRESHNESS_BUCKETS_S,
    }
    found = re.findall(r'(\w+)_bucket\{[^}]*le="([\d.]+)"', " ".join(rule_expressions()))
    assert {name for name, _ in found} == set(bounds)
    for name, bound in found:
        assert bound in map(floatToGoString, bounds[name]), name


def test_an_outage_of_any_program_fires() -> None:
    """Covers each program of a cluster, Flink and Kafka, by the names that the monitors give to `up`."""
    (rule,) = (rule for rule in alerts() if rule["alert"] == "RoostreamProgramDown")
    watched = set(re.findall(r'up:10m\{job="roostream-([\w-]+)"\}', rule["expr"]))
    assert watched == set(re.findall(r'"program", "([\w-]+)"', rule["expr"]))
    optional = {SIMULATE, "reader"}  # readers are idle outside an initial phase
    programs = {"joiner-watch" if spec.name == "joiner" else spec.name for spec in PROGRAM_SPECS}
    assert watched == programs - optional | {"flink", "kafka"}
    monitors = (ROOT / "infra/k8s/monitoring/monitors.yaml").read_text(encoding="utf-8")
    job_names = set(re.findall(r"replacement: roostream-(\w+)", monitors))
    (services,) = re.findall(r"values: \[(shard[^\]]+)\]", monitors)
    assert watched <= job_names | set(services.split(", "))


def test_every_metric_that_a_program_reads_is_exported() -> None:
    reads = re.compile(r'"(roostream_(?:worker|controller|shard|auditor|archiver|compactor|reader)_[a-z_]+)"')
    known = {name for table in TABLES for name in table} | {"roostream_shard_call_seconds"}
    folders = ("roostream/cli", "trainer/control", "infra", "benchmarks")
    code = [path.read_text(encoding="utf-8") for name in folders for path in (ROOT / name).rglob("*.py")]
    found = {name for text in code for name in reads.findall(text)}
    assert len(found) > 20 and found - known == set()
    assert not [text for text in code if 'f"roostream_' in text], (
        "metric names must be literal, so that grep finds them"
    )


def test_names_have_the_prefix_of_their_program() -> None:
    for table in TABLES:
        programs = {name.split("_")[1] for name in table}
        assert len(programs) == 1, programs


@pytest.mark.timeout(1000)
def test_promtool_runs_the_tests_of_the_rules() -> None:
    promtool = next(
        (p for p in (ROOT / ".tools/bin/promtool", Path(shutil.which("promtool") or "/none")) if p.is_file()),
        None,
    )
    if promtool is None:
        pytest.skip("promtool is not installed; run `make promtool`")
    completed = subprocess.run(
        [promtool, "test", "rules", "roostream.test.yml"],
        cwd=ALERTS,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


class _WideWorker(Collector):
    """The quality and drift metrics of a worker with a wide schema, each at its limit."""

    def __init__(self) -> None:
        tasks = [f"task{n}" for n in range(12)]
        features = [f"x{n}" for n in range(500)]
        schema = schema_from_dict(
            {
                "nro": [{"name": name, "kind": "float"} for name in features],
                "label": [{"name": task, "action": task, "fold": "any"} for task in tasks],
            }
        )
        windowed = WindowedMetrics(schema.tasks, build_slicers(schema, features[:MAX_SLICES]))
        for seed in range(4):
            batch = make_batch(schema, [40] * 4, seed)
            batch.nro_float_BF[:] *= 10.0 ** (seed - 1)
            windowed.count(
                batch, batch.request_index_B * 0, batch.label_BT * 0 + 0.3, int(batch.close_ms_R.max())
            )
        self.metrics = quality_gauges(quality_report(windowed.report(int(batch.close_ms_R.max())), None))
        values = {
            ("feature",): features[:64],
            ("task",): tasks,
            ("table",): [f"t{n}" for n in range(16)],
            ("partition",): [f"samples-{n}" for n in range(64)],
        }
        self.metrics |= {
            name: dict.fromkeys(values[spec.labels], 0.5)
            for name, spec in WORKER.items()
            if name in DRIFT or spec.labels == ("partition",)
        }

    def collect(self) -> Any:
        return MetricsCollector(lambda: self.metrics, WORKER).collect()


def test_a_wide_schema_has_fewer_than_two_thousand_series() -> None:
    registry = CollectorRegistry()
    registry.register(_WideWorker())
    series = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert 500 < len(series) < 1700, "the process's other metrics have about 300 series"
    assert MAX_VALUES * MAX_SLICES > 90 and MAX_TASKS <= 4
