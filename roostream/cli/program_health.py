"""Why programs of a stack are not ready: from stack.json, their readiness probes, their logs and the
controller's status."""

from __future__ import annotations

import contextlib
import http.client
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.child_logs import last_lines
from roostream.runtime.direct_http import open_direct
from roostream.runtime.scrape import ScrapedMetrics

_TIMEOUT_S = 0.5
_MAX_BYTES = 1000


def with_readiness(
    programs: Mapping[str, Mapping[str, Any]], scraped: Mapping[str, ScrapedMetrics]
) -> dict[str, Mapping[str, Any]]:
    """The programs, with the state "unready" for each that was ready after its start and reports now that it
    can't do its work. The supervisor does not look again."""
    return {
        name: {**entry, "state": "unready"}
        if entry["state"] == "ready" and name in scraped and scraped[name].value("roostream_ready") == 0
        else entry
        for name, entry in programs.items()
    }


def unhealthy_programs(programs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Name of each program that is not ready → its state, the reason if one is known, and its log file."""
    return {
        name: _describe(entry) for name, entry in programs.items() if entry["state"] not in ("ready", "ended")
    }


def unhealthy_controller(status: Mapping[str, Any]) -> dict[str, str]:
    """The same for what a controller reports in `status`: why it cannot continue or commit, and what is wrong
    with topics."""
    found = {f"topic {name}": text for name, text in (status.get("topic_problems") or {}).items()}
    if status.get("abort_reason"):
        found["controller"] = f"the last commit was aborted: {status['abort_reason']}"
    if status.get("away"):
        found["controller"] = f"waits: {status['away']}"
    return found


def reason(entry: Mapping[str, Any]) -> str:
    """The last error of the program, else what its readiness probe waits for, else the last line of its log,
    else "". The last error of a program that was ready since is no reason."""
    text = "" if entry["state"] == "unready" else str(entry.get("said") or "")
    if not text and entry["state"] in ("starting", "unready") and entry.get("metrics"):
        text = readiness_error(str(entry["metrics"]).removesuffix("metrics") + "readyz")
    return text or " ".join(last_lines(Path(entry["log"]), 1))


def readiness_error(url: str) -> str:
    """The text of a readiness probe that fails; "" if the program is ready or does not answer."""
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        try:
            open_direct(url, _TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            return error.read(_MAX_BYTES).decode("utf-8", "replace").strip()
    return ""


def _describe(entry: Mapping[str, Any]) -> str:
    state, restarts = str(entry["state"]), int(entry["restarts"])
    is_known = entry.get("said") or restarts or state in ("starting", "failed", "held", "unready")
    text = reason(entry) if is_known else ""
    if not text:
        return state
    after = f"{state} after {restarts} restarts" if restarts and state != "failed" else state
    return f"{after}: {text} (its log: {entry['log']})"
