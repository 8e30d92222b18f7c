"""Readings of a running stack from the status page, `roostream status` and `roostream audit`."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from infra.stack import Stack
from roostream.cli.status import StackMonitor


def monitor_of(stack: Stack) -> StackMonitor:
    described = stack.home.read_stack()
    assert described is not None
    return StackMonitor(described)


def status_of(stack: Stack, monitor: StackMonitor) -> dict[str, Any]:
    described = stack.home.read_stack()
    assert described is not None
    return monitor.sample(described["programs"])


def page_of(stack: Stack) -> dict[str, Any]:
    """The data of the status page; {} while the controller does not answer."""
    described = stack.home.read_stack()
    assert described is not None
    url = str(described["programs"]["controller"]["metrics"]).removesuffix("/metrics")
    try:
        with urllib.request.urlopen(f"{url}/status.json", timeout=10) as answer:
            return dict(json.loads(answer.read())["page"])
    except OSError:
        return {}


def bad_readings(stack: Stack, monitor: StackMonitor) -> list[str]:
    """The names of the readings that are unknown now."""
    status, training = status_of(stack, monitor), page_of(stack).get("training", {})
    readings = {
        "status: ends of the topics": status["topics"],
        "status: lag": status["trainer"]["lag_records"] is not None,
        "status: state of training": status["trainer"]["state"] not in (None, "unknown"),
        "page: lag": training.get("lag_records") is not None,
        "page: state of training": training.get("state") not in (None, "unknown"),
        "audit": status["guarantees"]["g1"]["state"] in ("yes", "waiting"),
    }
    return [name for name, is_good in readings.items() if not is_good]


def auc(stack: Stack, monitor: StackMonitor) -> float | None:
    """The AUC if both the page and `status` know it, else None."""
    status, page = status_of(stack, monitor), page_of(stack).get("training", {})
    shown: float | None = status["metrics"]["auc"]
    return shown if page.get("metrics", {}).get("auc") is not None else None
