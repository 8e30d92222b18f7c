"""The controller's status page with the data of a recorded run. A real controller receives heartbeats from
fake programs, with one report of the run every ten seconds of a fake clock.

`replayed_run.json` holds `[step, watermark_ms, requests, candidates, {metrics}]` of every few steps of
`roostream replay ebnerd --engine local`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from roostream.runtime import metrics_server, scrape
from roostream.runtime.clock import FakeClock
from roostream.runtime.deployment import ProgramSettings
from roostream.runtime.health import Health
from roostream.runtime.histograms import FRESHNESS_BUCKETS_S, StageHistogram
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.runtime.scrape import ScrapedMetrics
from roostream.runtime.work_unit import WorkUnit
from tests.trainer.control.test_coordinator import ANSWERS, CONFIG
from tests.trainer.memory_store import MemoryStore
from trainer.control.controller import Controller
from trainer.control.coordinator import Coordinator
from trainer.control.scrape_targets import FRESHNESS_STAGES, ScrapeTargets
from trainer.control.status_page import StatusPage, static_files
from trainer.monitoring.verdict import METRIC_SPECS, Baseline, Comparison, Verdict, metrics_of

MEMBERS = (("shard", 0), ("shard", 1), ("worker", 0))
STEP_S = 10.0
URLS = {
    name: f"http://127.0.0.1:1/{name}"
    for name in ("shard-0", "shard-1", "worker", "serving", "joiner", "auditor", "simulate")
}
_STAGE_MS = {
    "engagement_to_close": 19_500,
    "close_to_readable": 1900,
    "readable_to_trained": 60,
    "trained_to_servable": 853,
}


class ReplayedRun:
    """A recorded run. `step` lets ten seconds pass and reports the next record; `serve` starts the page on a
    port."""

    def __init__(self, step_s: float = STEP_S, history: Sequence[WorkUnit] = ()) -> None:
        self.step_s = step_s
        self.clock = FakeClock(1_800_000_000_000)
        self.run = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
        config = dataclasses.replace(CONFIG, initial_workers=1 if history else 0)
        self.controller = Controller(
            Coordinator(config), MemoryStore(), self.clock, history=lambda committed: history, long_poll_s=0.0
        )
        self.targets = ScrapeTargets(URLS, self.clock, lambda urls: self.scrape_programs())
        self.page = StatusPage(self.controller, self.targets, interval_ms=10_000)
        self.position, self.incarnation, self.commands_done = 0, 0, 0
        self.freshness = StageHistogram(
            "roostream_freshness_seconds", "as the worker and serving measure it", FRESHNESS_BUCKETS_S, None
        )
        self.report: dict[str, Any] = {"step": 0, "metrics": {}}
        self.silent_programs: frozenset[str] = frozenset()  # whose metrics cannot be read
        self.gone_members: frozenset[tuple[str, int]] = frozenset()  # which send no heartbeats

    def step(self, **report: Any) -> None:
        """Let ten seconds pass in which the worker reports the next record of the run, updated with `report`.

        After the end of the run, the last record is reported again.
        """
        step, watermark_ms, requests, candidates, metrics_ = self.run[min(self.position, len(self.run) - 1)]
        left = max(len(self.run) - 1 - self.position, 0)
        self.position += 1
        record = {
            "step": step,
            "watermark_ms": watermark_ms,
            "requests": requests,
            "candidates": candidates,
            "metrics": metrics_,
        }
        watch = self.watch(left, "caught_up" if left == 0 else "catching_up") | _quality(candidates, metrics_)
        self.report = {**record, "training": True, "watch": watch, **report}
        for _ in range(round(self.step_s / 2)):
            self._send_heartbeats()
            self.clock.advance(1.0)
            self._send_heartbeats()
            self.clock.advance(1.0)
        self.targets.scrape()
        self.page.observe()

    def watch(self, left: int, state: str) -> dict[str, Any]:
        """Return the backlog as trainer/worker_monitor.py reports it, `left` steps before the run's end."""

        def row(lag: int) -> dict[str, Any]:
            eta_s = left * STEP_S
            rates = {"consumption_per_s": [25.6, 24.0, 27.0], "drain_per_s": [25.6, 24.0, 27.0]}
            behind = {"lag_records": lag, "lag_ms": left * 9000, "hidden_records": 0, "lost_records": 0}
            return {
                "state": state,
                "reason": "",
                **behind,
                **rates,
                "eta_s": [eta_s, 0.9 * eta_s, 1.2 * eta_s],
            }

        rows = [
            {"topic": "samples", "partition": n, **row((left * 256) // 4 + n * (left > 0))} for n in range(4)
        ]
        return {**row(sum(r["lag_records"] for r in rows)), "in_state_s": 1.0, "partitions": rows}

    def run_to_end(self) -> ReplayedRun:
        while self.position < len(self.run):
            self.step()
        return self

    def hold_idle(self, reason: str) -> None:
        """Put training on hold as soon as no commit is under way."""
        while not self.controller.hold_idle(reason):
            self._send_heartbeats()

    def serve(self) -> str:
        """Serve the page from background threads until the process ends. Return its URL."""
        pages = {**static_files(), **self.page.responses()}
        port = metrics_server.serve(ProgramSettings(), Health(60, self.clock), CollectorRegistry(), pages)
        return f"http://127.0.0.1:{port}/"

    def _send_heartbeats(self) -> None:
        for role, index in MEMBERS:
            if (role, index) in self.gone_members:
                continue
            commands = self._send_heartbeat(role, index, [])
            answers = [{"id": c["id"], "ok": True, **ANSWERS.get((role, c["kind"]), {})} for c in commands]
            self.incarnation = max([self.incarnation, *(c["incarnation"] for c in commands)])
            self.clock.advance(0.012)
            if answers:
                self._send_heartbeat(role, index, answers)
            self.controller.turn()

    def _send_heartbeat(self, role: str, index: int, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        header = {
            "role": role,
            "index": index,
            "session": 1,
            "incarnation": self.incarnation,
            "results": results,
        }
        report = self.report if role == "worker" else {"ready": True}
        return self.controller.handle("beat", {**header, "report": report}, ())[0]["commands"]

    def scrape_programs(self) -> dict[str, ScrapedMetrics]:
        """Return the metrics that the other programs would expose at this moment."""
        wave = 1 + 0.15 * math.sin(self.position / 5)
        lines: dict[str, list[str]] = {name: [] for name in URLS}
        for n in range(2):
            rows = int(41 * self.position * (1 + 0.06 * n))
            lines[f"shard-{n}"] = [
                f'roostream_shard_rows{{stack="d16_adagrad"}} {rows}',
                f'roostream_shard_rows{{stack="d8"}} {rows // 3}',
            ]
            lines[f"shard-{n}"] += [
                f"roostream_shard_bytes {rows * 400}",
                f"roostream_shard_pulls_total {self.position * 12}",
                "roostream_shard_damaged_segment_parts 0",
            ]
        for stage, ms in {**_STAGE_MS, FRESHNESS_STAGES[-1]: sum(_STAGE_MS.values())}.items():
            for spread in range(40):
                self.freshness.observe(stage, ms * wave * (0.6 + spread / 50))
        registry = CollectorRegistry()
        registry.register(self.freshness.histogram)
        lines["worker"] += [
            *generate_latest(registry).decode().splitlines(),
            "roostream_worker_non_finite_total 0",
        ]
        status = self.controller.status()
        version = f"{status['incarnation']}-{status['seq']}"
        lines["serving"] = [f'roostream_serving_model_version{{version="{version}"}} 1']
        lines["joiner"], lines["auditor"] = (
            ["roostream_joiner_running 1"],
            ['roostream_auditor_accounted{state="yes"} 1', *_verdict_metrics()],
        )
        served = 0.0443 + 0.03 * (1 - math.exp(-self.position / 25))
        rates = {"served": served * wave**0.2, "random": 0.0443, "best": 0.0869}
        lines["simulate"] = [
            f'roostream_simulator_click_rate{{order="{o}",window="{w}"}} {v}'
            for o, v in rates.items()
            for w in ("recent", "total")
        ]
        return {
            n: scrape.parse("\n".join(texts) + "\n") if n not in self.silent_programs else ScrapedMetrics()
            for n, texts in lines.items()
        }


def _verdict_metrics() -> list[str]:
    """Return the auditor's metrics for a model that beats its baselines in request AUC."""
    rules = {
        "item": Baseline(value=0.69, difference=0.02, low=0.01, high=0.03),
        "linear": Baseline(value=0.68, difference=0.03, low=0.02, high=0.04),
    }
    losses = {"item": Baseline(value=0.93, difference=-0.001, low=-0.004, high=0.002)}
    verdict = Verdict(
        requests=9000,
        request_auc=Comparison.of("request_auc", rules, requests=8000, model=0.71, is_known=True),
        ne=Comparison.of("ne", losses, requests=9000, model=0.929, is_known=True),
    )
    registry = CollectorRegistry()
    registry.register(MetricsCollector(lambda: metrics_of(verdict), METRIC_SPECS))
    return generate_latest(registry).decode().splitlines()


def _quality(candidates: int, metrics: dict[str, float]) -> dict[str, Any]:
    """Return the report's quality part: the run's metrics as the last hour, two slices, and drifted
    features."""

    def windows_of(share: float) -> dict[str, Any]:
        sums = [
            candidates * share,
            candidates * share,
            candidates * share * metrics["base_rate"],
            1.0,
            1.0,
            1.0,
        ]
        numbers = {name: metrics[name] for name in ("base_rate", "ne", "auc", "calibration")}
        return {
            "1h": {
                "click": {
                    "candidates": int(candidates * share),
                    "ne_online": metrics["ne"],
                    "sums": sums,
                    **numbers,
                }
            }
        }

    features = {f"feature {n}": n / 40 for n in range(20)}
    drift = {
        **{
            "psi": features,
            "coverage": dict.fromkeys(features, 0.5),
            "coverage_before": dict.fromkeys(features, 1.0),
        },
        **{"lengths": {"feature 19": 0.02}, "new_ids": {"user": 0.031}},
        **{"base_rate": {"click": metrics["base_rate"]}, "base_rate_before": {"click": 0.09}},
    }
    slices = {"surface": {"front": windows_of(0.3), "article": windows_of(0.7)}}
    return {
        "windows": windows_of(1.0),
        "slices": slices,
        "shadow": {"version": "1-2", "rows": "live", "shadow": windows_of(1.0)},
        "drift": drift,
    }
