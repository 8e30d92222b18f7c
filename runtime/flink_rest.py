"""The few REST calls of Flink that the stack needs."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from roo.errors import UnavailableError

JOB_NAME = "roostream-joiner"
_ALIVE = ("CREATED", "RUNNING", "RESTARTING", "INITIALIZING", "RECONCILING", "FAILING")


def call(url: str, body: dict[str, Any] | None = None, timeout_s: float = 2.0) -> dict[str, Any] | None:
    """GET, or POST of a JSON body; None if there is no answer that can be read."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            found = json.load(answer)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def overview(url: str) -> dict[str, Any] | None:
    return call(f"{url}/overview")


def task_managers(url: str) -> set[str]:
    return {t["id"] for t in (call(f"{url}/taskmanagers") or {}).get("taskmanagers", [])}


def live_job(url: str) -> dict[str, Any] | None:
    """The joiner's job (`jid`, `state`), if the job manager has one that has not ended."""
    jobs = (call(f"{url}/jobs/overview") or {}).get("jobs", [])
    return next((j for j in jobs if j["name"] == JOB_NAME and j["state"] in _ALIVE), None)


def is_running(url: str) -> bool:
    """Whether every task of the joiner's job runs."""
    job = live_job(url)
    return job is not None and job["state"] == "RUNNING" and job["tasks"]["running"] == job["tasks"]["total"]


def stop_with_savepoint(url: str, job: str, folder: str, timeout_s: float) -> str:
    """End a job with a savepoint; its path.

    Raises:
        UnavailableError: no savepoint was made in time. The job may run on; its newest checkpoint is what a restart takes.
    """
    asked = call(f"{url}/jobs/{job}/stop", {"targetDirectory": folder, "drain": False}, timeout_s=5.0)
    if asked is None:
        raise UnavailableError("Flink does not answer the request for a savepoint")
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        done = call(f"{url}/jobs/{job}/savepoints/{asked['request-id']}") or {}
        if done.get("status", {}).get("id") == "COMPLETED":
            operation = done["operation"]
            if "location" in operation:
                return str(operation["location"])
            cause = str(operation.get("failure-cause", {}).get("stack-trace", "?")).splitlines()[0]
            raise UnavailableError(f"Flink could not make a savepoint: {cause}")
        time.sleep(0.2)
    raise UnavailableError(f"Flink made no savepoint within {timeout_s:.0f} s")
