"""`roostream status`: the state of a running stack, from its programs' metrics, Kafka, Flink and the
controller.

A value is None where a program does not answer, because the status is needed most when something is down.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from confluent_kafka import Consumer, KafkaException
from rich.console import Console

from infra.auditor import sums
from infra.home import Home
from roostream.cli import status_table
from roostream.cli.options import home_option, json_option
from roostream.cli.output import plain, print_json, render_rows
from roostream.cli.program_health import unhealthy_controller, unhealthy_programs, with_readiness
from roostream.cli.stack_commands import describe_endpoints
from roostream.errors import RoostreamError, UnavailableError
from roostream.runtime import scrape
from roostream.runtime.flink_rest import FlinkRest
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS, TOPICS, name_of, partitions_of
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.scrape import ScrapedMetrics
from trainer.control.aggregate_status import aggregate_status, sum_of_workers, worker_reports
from trainer.control.scrape_targets import (
    FRESHNESS_STAGES,
    UNKNOWN,
    click_rate,
    lost_records,
    rows_by_stack,
    serving_state,
)
from trainer.monitoring.progressive_metrics import METRIC_NAMES
from trainer.selection.outcomes import sum_outcomes

_QUALITY = (*METRIC_NAMES, "requests", "candidates")
_SAMPLING_S = 1.0


@click.command()
@home_option
@json_option
def status(home: Path, as_json: bool) -> None:
    """Show what a running stack does: rates, lags, training, freshness, quality, and whether every event is
    accounted for.

    Exit code 1: a program is not ready.

    \b
    Example:
      roostream status
      roostream status --json | python -m json.tool
    """
    stack = Home(home).running_stack()
    monitor = StackMonitor(stack)
    try:
        monitor.sample(stack["programs"])
        time.sleep(_SAMPLING_S)  # rates need two samples
        found = monitor.sample(stack["programs"])
    finally:
        monitor.close()
    if as_json:
        print_json({"home": stack["home"], **found})
    else:
        title = f"Roostream in {stack['home']}"
        console = Console()
        console.print(render_rows(status_table.rows(found), title))
        for line in describe_endpoints(stack):  # not wrapped: they are copied
            console.print(plain(line), soft_wrap=True, markup=False, emoji=False, highlight=False)
    sys.exit(0 if all(p["state"] in ("ready", "ended") for p in found["programs"].values()) else 1)


class StackMonitor:
    """Samples the status of one stack; rates are those between two samples. Not thread-safe."""

    def __init__(self, stack: Mapping[str, Any]) -> None:
        self.kafka, self.prefix = str(stack["kafka"]), str(stack["prefix"])
        self.flink, self.controller = str(stack["flink"]), str(stack["controller"])
        self.partitions = int(stack.get("partitions", DEFAULT_PARTITIONS))
        self._consumer: Consumer | None = None
        self._ends: tuple[float, dict[str, int]] | None = None

    def sample(self, programs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The status now, with stable keys. `programs` is the table of stack.json."""
        scraped = scrape.fetch_all(
            {n: p["metrics"] for n, p in programs.items() if p["state"] in ("starting", "ready")}
        )
        programs = with_readiness(programs, scraped)
        ends = self._end_offsets()
        control = self._controller_status()
        return {
            "programs": {
                n: {"state": p["state"], "pid": p["pid"], "restarts": p["restarts"]}
                for n, p in programs.items()
            },
            "troubles": {**unhealthy_controller(control), **unhealthy_programs(programs)},
            "rates": self._rates(ends),
            "topics": ends,
            "joiner": joiner_state(self._joiner_job(), scraped.get("joiner", ScrapedMetrics())),
            "trainer": trainer_state(control),
            "workers": workers_state(control),
            "readers": control.get("readers") if control else None,
            "rows": rows_by_stack(programs, scraped),
            "commit": commit_state(control),
            "freshness": freshness_state(control),
            "metrics": quality(control),
            "click_rate": click_rate(scraped.get("simulate", ScrapedMetrics())),
            "serving": serving_state(programs, scraped),
            "lost_records": lost_records(scraped),
            "guarantees": {"g1": sums.of_programs(scraped)},
        }

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _end_offsets(self) -> dict[str, int]:
        """Topic → number of records ever written; empty if Kafka does not answer. A client that failed is
        replaced, because its view of the partitions' leaders may be outdated."""
        try:
            self._consumer = self._consumer or clients.consumer(Broker(self.kafka), f"{self.prefix}status")
            ends = {}
            for topic in TOPICS:
                name, partitions = name_of(self.prefix, topic), range(partitions_of(topic, self.partitions))
                ends[topic] = sum(
                    clients.end_offsets(self._consumer, name, partitions, timeout_s=1.0).values()
                )
            return ends
        except KafkaException:
            self.close()
            return {}

    def _rates(self, ends: dict[str, int]) -> dict[str, float | None]:
        """Records per second since the previous sample; None in the first."""
        now_s, before = time.monotonic(), self._ends
        if ends:
            self._ends = now_s, ends
        if before is None or not ends or now_s <= before[0]:
            return {t: None for t in TOPICS}
        return {t: max(ends[t] - before[1].get(t, 0), 0) / (now_s - before[0]) for t in ends}

    def _joiner_job(self) -> dict[str, Any] | None:
        try:
            return FlinkRest(self.flink, timeout_s=2.0).live_job()
        except UnavailableError:
            return None

    def _controller_status(self) -> dict[str, Any]:
        transport = SocketTransport(self.controller)
        try:
            return transport.call("status", {}, timeout_s=1.0)[0]
        except RoostreamError:
            return {}
        finally:
            transport.close()


def joiner_state(job: Mapping[str, Any] | None, joiner: ScrapedMetrics) -> dict[str, Any]:
    """State of the joiner, from its job in Flink and its metrics; None = unknown."""
    running = joiner.value("roostream_joiner_running")
    return {
        "state": job["state"].lower() if job else "running" if running else None,
        "watermark_ms": joiner.ms("roostream_joiner_watermark_timestamp_seconds"),
        "restarts": joiner.value("roostream_joiner_job_restarts"),
        "checkpoints": joiner.value("roostream_joiner_checkpoints"),
    }


def trainer_state(control: Mapping[str, Any]) -> dict[str, Any]:
    """All training workers together: the worst state, the largest lag, and `trained`, the requests of the
    model as of the last commit. `requests` and the other counts are of the present worker processes. None
    (`outcomes`: {}) without a controller, and for sums while a worker is not connected."""
    whole = aggregate_status(control) if control else {}
    reports = worker_reports(control).values() if control else ()
    all_report = len(reports) == (control or {}).get("workers")
    counted = ("candidates", "duplicates", "dead_letters", "non_finite", "rehearsed")
    lag = ("lag_ms", "lag_records", "lost_records", "watermark_ms")
    return {
        **{k: whole.get(k) for k in ("state", "reason", "initial", *lag, "step", "trained", "requests")},
        **{k: (whole.get(k) or [None])[0] for k in ("eta_s", "drain_per_s")},
        **{k: sum_of_workers(control, k) if control else None for k in counted},
        "outcomes": sum_outcomes([report.get("outcomes") or {} for report in reports] if all_report else []),
    }


def workers_state(control: Mapping[str, Any]) -> dict[str, Any]:
    """How many workers train and how many are requested (None without a controller), and each one that
    reports."""
    reports, members = control.get("reports", {}), control.get("members", {})
    each = {}
    for index in sorted(int(name.removeprefix("worker ")) for name in reports if name.startswith("worker ")):
        name = f"worker {index}"
        each[name] = {
            "trains": index < int(control.get("workers", 1)),  # the others are standing by
            "silent_ms": members.get(name, {}).get("silent_ms"),
            **{k: reports[name].get(k) for k in ("step", "requests", "broken")},
        }
    return {"number": control.get("workers"), "wanted": control.get("wanted_workers"), "each": each}


def commit_state(control: Mapping[str, Any]) -> dict[str, Any]:
    """What the controller's status says of commits, holds and device time; a value is None if it is
    unknown."""
    keys = "state seq incarnation commit_age_ms paused_ms commits aborts rollbacks manifest"
    return {k: control.get(k) for k in (*keys.split(), "holds", "device_s", "device_ratio")}


def freshness_state(control: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Stage → p50 and p99 in ms over the last minutes, as the controller measured them."""
    measured = control.get("freshness") or {}
    return {stage: measured.get(stage) or dict(UNKNOWN) for stage in FRESHNESS_STAGES}


def quality(control: Mapping[str, Any]) -> dict[str, float | None]:
    """Progressive metrics of the first task over all training workers."""
    metrics = aggregate_status(control)["metrics"] if control else {}
    return {name: metrics.get(name) for name in _QUALITY}
