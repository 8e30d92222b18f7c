"""A page as it is after a replayed run: a real controller whose members beat with the reports that the run
gave, one every ten seconds of a clock that is moved.

`replayed_run.json`: `[step, watermark_ms, requests, candidates, {metrics}]` every few steps of `roostream
replay ebnerd --engine local`, all other names left out.
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
_MS = {
    "engagement_to_close": 19_500,
    "close_to_readable": 1900,
    "readable_to_trained": 60,
    "trained_to_servable": 853,
}


class ReplayedRun:
    """`step` makes the next ten seconds pass; `serve` shows the page on a port."""

    def __init__(self, step_s: float = STEP_S, history: Sequence[WorkUnit] = ()) -> None:
        self.step_s = step_s
        self.clock = FakeClock(1_800_000_000_000)
        self.run = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
        config = dataclasses.replace(CONFIG, initial_workers=1 if history else 0)
        self.controller = Controller(
            Coordinator(config), MemoryStore(), self.clock, history=lambda committed: history, long_poll_s=0.0
        )
        self.targets = ScrapeTargets(URLS, self.clock, lambda urls: self.scraped())
        self.page = StatusPage(self.controller, self.targets, interval_ms=10_000)
        self.at, self.incarnation, self.commands_done = 0, 0, 0
        self.measured = StageHistogram(
            "roostream_freshness_seconds", "as the worker and serving measure it", FRESHNESS_BUCKETS_S, None
        )
        self.report: dict[str, Any] = {"step": 0, "metrics": {}}
        self.silent: frozenset[str] = frozenset()  # programs that don't answer
        self.gone: frozenset[tuple[str, int]] = frozenset()  # members that don't beat

    def step(self, **report: Any) -> None:
        """The next record of the run (the last stays), with `report` over it."""
        step, watermark_ms, requests, candidates, metrics_ = self.run[min(self.at, len(self.run) - 1)]
        left = max(len(self.run) - 1 - self.at, 0)
        self.at += 1
        told = {
            "step": step,
            "watermark_ms": watermark_ms,
            "requests": requests,
            "candidates": candidates,
            "metrics": metrics_,
        }
        watch = self.watch(left, "caught_up" if left == 0 else "catching_up") | _quality(candidates, metrics_)
        self.report = {**told, "training": True, "watch": watch, **report}
        for _ in range(round(self.step_s / 2)):
            self._beats()
            self.clock.advance(1.0)
            self._beats()
            self.clock.advance(1.0)
        self.targets.scrape()
        self.page.observe()

    def watch(self, left: int, state: str) -> dict[str, Any]:
        """As trainer/worker_monitor.py has it, `left` steps before the end."""

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

    def to_the_end(self) -> ReplayedRun:
        while self.at < len(self.run):
            self.step()
        return self

    def hold_idle(self, reason: str) -> None:
        """As soon as no commit is under way."""
        while not self.controller.hold_idle(reason):
            self._beats()

    def serve(self) -> str:
        """Its URL; from threads of their own until the process ends."""
        pages = {**static_files(), **self.page.responses()}
        port = metrics_server.serve(ProgramSettings(), Health(60, self.clock), CollectorRegistry(), pages)
        return f"http://127.0.0.1:{port}/"

    def _beats(self) -> None:
        for role, index in MEMBERS:
            if (role, index) in self.gone:
                continue
            commands = self._beat(role, index, [])
            answers = [{"id": c["id"], "ok": True, **ANSWERS.get((role, c["kind"]), {})} for c in commands]
            self.incarnation = max([self.incarnation, *(c["incarnation"] for c in commands)])
            self.clock.advance(0.012)
            if answers:
                self._beat(role, index, answers)
            self.controller.turn()

    def _beat(self, role: str, index: int, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        header = {
            "role": role,
            "index": index,
            "session": 1,
            "incarnation": self.incarnation,
            "results": results,
        }
        report = self.report if role == "worker" else {"ready": True}
        return self.controller.handle("beat", {**header, "report": report}, ())[0]["commands"]

    def scraped(self) -> dict[str, ScrapedMetrics]:
        """What the other programs would tell at this moment."""
        wave = 1 + 0.15 * math.sin(self.at / 5)
        lines: dict[str, list[str]] = {name: [] for name in URLS}
        for n in range(2):
            rows = int(41 * self.at * (1 + 0.06 * n))
            lines[f"shard-{n}"] = [
                f'roostream_shard_rows{{stack="d16_adagrad"}} {rows}',
                f'roostream_shard_rows{{stack="d8"}} {rows // 3}',
            ]
            lines[f"shard-{n}"] += [
                f"roostream_shard_bytes {rows * 400}",
                f"roostream_shard_pulls_total {self.at * 12}",
                "roostream_shard_damaged_segment_parts 0",
            ]
        for stage, ms in {**_MS, FRESHNESS_STAGES[-1]: sum(_MS.values())}.items():
            for spread in range(40):
                self.measured.observe(stage, ms * wave * (0.6 + spread / 50))
        registry = CollectorRegistry()
        registry.register(self.measured.histogram)
        lines["worker"] += [
            *generate_latest(registry).decode().splitlines(),
            "roostream_worker_non_finite_total 0",
        ]
        status = self.controller.status()
        version = f"{status['incarnation']}-{status['seq']}"
        lines["serving"] = [f'roostream_serving_model_version{{version="{version}"}} 1']
        lines["joiner"], lines["auditor"] = (
            ["roostream_joiner_running 1"],
            ['roostream_auditor_accounted{state="yes"} 1', *_verdict()],
        )
        served = 0.0443 + 0.03 * (1 - math.exp(-self.at / 25))
        rates = {"served": served * wave**0.2, "random": 0.0443, "best": 0.0869}
        lines["simulate"] = [
            f'roostream_simulator_click_rate{{order="{o}",window="{w}"}} {v}'
            for o, v in rates.items()
            for w in ("recent", "total")
        ]
        return {
            n: scrape.parse("\n".join(texts) + "\n") if n not in self.silent else ScrapedMetrics()
            for n, texts in lines.items()
        }


def _verdict() -> list[str]:
    """The auditor's metrics of a model that is ahead by request AUC."""
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


def _quality(candidates: int, told: dict[str, float]) -> dict[str, Any]:
    """The rest of it: the run's own numbers as those of the last hour; two slices and inputs that moved."""

    def leaf(share: float) -> dict[str, Any]:
        sums = [candidates * share, candidates * share, candidates * share * told["base_rate"], 1.0, 1.0, 1.0]
        numbers = {name: told[name] for name in ("base_rate", "ne", "auc", "calibration")}
        return {
            "1h": {
                "click": {
                    "candidates": int(candidates * share),
                    "ne_online": told["ne"],
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
        **{"base_rate": {"click": told["base_rate"]}, "base_rate_before": {"click": 0.09}},
    }
    slices = {"surface": {"front": leaf(0.3), "article": leaf(0.7)}}
    return {
        "windows": leaf(1.0),
        "slices": slices,
        "shadow": {"version": "1-2", "rows": "live", "shadow": leaf(1.0)},
        "drift": drift,
    }
