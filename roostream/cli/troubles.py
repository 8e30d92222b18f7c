"""What is wrong with programs of a stack, in words: what its supervisor tells in `stack.json`, and what they say themselves."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.child_logs import last_lines

_TIMEOUT_S = 0.5
_MAX_BYTES = 1000


def troubles(programs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Program that is not ready → its state, and why: what it said when it died last, what it waits for while it is starting;
    where its log is."""
    return {name: _trouble(its) for name, its in programs.items() if its["state"] not in ("ready", "ended")}


def of_controller(control: Mapping[str, Any]) -> dict[str, str]:
    """The same of one that answers and can't go on, of its `status`."""
    return {"controller": f"waits: {control['away']}"} if control.get("away") else {}


def why(its: Mapping[str, Any]) -> str:
    """What it said when it died last, else what it says that it waits for, else the last line of its log; "" = nothing."""
    said = str(its.get("said") or "")
    if not said and its["state"] == "starting" and its.get("metrics"):
        said = waits_for(str(its["metrics"]).removesuffix("metrics") + "readyz")
    return said or " ".join(last_lines(Path(its["log"]), 1))


def waits_for(probe: str) -> str:
    """The answer of a program that isn't ready; "" = it doesn't answer, or is."""
    try:
        urllib.request.urlopen(probe, timeout=_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        return error.read(_MAX_BYTES).decode("utf-8", "replace").strip()
    except (OSError, ValueError):
        return ""
    return ""


def _trouble(its: Mapping[str, Any]) -> str:
    state, restarts = str(its["state"]), int(its["restarts"])
    words = why(its) if its.get("said") or restarts or state in ("starting", "failed", "held") else ""
    if not words:
        return state
    how = f"{state} after {restarts} restarts" if restarts and state != "failed" else state
    return f"{how}: {words} (its log: {its['log']})"
