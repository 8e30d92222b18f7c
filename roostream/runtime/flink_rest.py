"""Client of Flink's REST interface, for the joiner, the local stack and `roostream status`."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from roostream.errors import UnavailableError

LATE_REQUESTS = "late_requests"  # a counter of the join operator
JOB_NAME = "roostream-joiner"
ENDED = ("FINISHED", "FAILED", "CANCELED")
"""Jobs in any other state are live. A job that is being cancelled still has its slots and may write, so no
other is started."""

_TIMEOUT_S = 5.0


class FlinkRest:
    """Each method sends one request or a few. It raises UnavailableError while the job manager is away,
    except `answers`, `is_running` and `task_managers`."""

    def __init__(self, url: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        self.url, self.timeout_s = url.rstrip("/"), timeout_s

    def get(self, path: str) -> dict[str, Any] | None:
        """A JSON object, or {"list": …} for a list; None for 404."""
        return self._call(path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST a JSON body. Raises UnavailableError also for 404."""
        found = self._call(path, json.dumps(body).encode())
        if found is None:
            raise UnavailableError(f"Flink at {self.url} does not know {path}")
        return found

    def answers(self) -> bool:
        """Whether the job manager answers."""
        try:
            return self.get("/overview") is not None
        except UnavailableError:
            return False

    def task_managers(self) -> set[str]:
        """Ids of the registered task managers."""
        try:
            return {t["id"] for t in (self.get("/taskmanagers") or {}).get("taskmanagers", [])}
        except UnavailableError:
            return set()

    def is_running(self) -> bool:
        """Whether every task of the joiner's job is running."""
        try:
            job = self.live_job()
        except UnavailableError:
            return False
        return (
            job is not None and job["state"] == "RUNNING" and job["tasks"]["running"] == job["tasks"]["total"]
        )

    def live_job(self) -> dict[str, Any] | None:
        """The joiner's job (`jid`, `state`, `tasks`) if one has not ended, else None."""
        jobs = (self.get("/jobs/overview") or {}).get("jobs", [])
        return next((job for job in jobs if job["name"] == JOB_NAME and job["state"] not in ENDED), None)

    def high_availability(self) -> str:
        """The high-availability service that recovers jobs when the job manager dies, such as KUBERNETES; ""
        = none."""
        settings = (self.get("/jobmanager/config") or {}).get("list", [])
        found = {s["key"]: s["value"] for s in settings}
        kind = str(found.get("high-availability.type", found.get("high-availability", ""))).upper()
        return "" if kind == "NONE" else kind

    def state(self, job: str) -> str:
        """RUNNING, FAILED, …; UNKNOWN if the job manager does not know the job (it was restarted)."""
        found = self.get(f"/jobs/{job}")
        return "UNKNOWN" if found is None else str(found["state"])

    def failure(self, job: str) -> str:
        """First line of the job's last exception, and of its root cause."""
        history = (
            (self.get(f"/jobs/{job}/exceptions?maxExceptions=1") or {})
            .get("exceptionHistory", {})
            .get("entries", [])
        )
        lines = str(history[0].get("stacktrace", "")).splitlines() if history else []
        causes = [line.strip() for line in lines if line.startswith("Caused by")]
        return " ← ".join([*lines[:1], *causes[-1:]]) or "no reason given"

    def gauges(self, job: str) -> dict[str, float]:
        """`restarts`, `checkpoints`, and if available `watermark_ms` and LATE_REQUESTS."""
        out: dict[str, float] = {}
        for metric in (self.get(f"/jobs/{job}/metrics?get=numRestarts") or {}).get("list", []):
            out["restarts"] = float(metric["value"])
        counts = (self.get(f"/jobs/{job}/checkpoints") or {}).get("counts", {})
        out["checkpoints"] = float(counts.get("completed", 0))
        for vertex in (self.get(f"/jobs/{job}") or {}).get("vertices", []):
            if "join" in vertex["name"]:
                marks = (self.get(f"/jobs/{job}/vertices/{vertex['id']}/watermarks") or {}).get("list", [])
                values = [int(m["value"]) for m in marks]
                if values and min(values) > 0:
                    out["watermark_ms"] = float(min(values))
                path = (
                    f"/jobs/{job}/vertices/{vertex['id']}/subtasks/metrics?get=join.{LATE_REQUESTS}&agg=sum"
                )
                for metric in (self.get(path) or {}).get("list", []):
                    out[LATE_REQUESTS] = float(metric["sum"])
        return out

    def stop_with_savepoint(self, job: str, folder: str, timeout_s: float) -> str:
        """Stop a job with a savepoint. Returns the savepoint's path.

        Raises:
            UnavailableError: no savepoint was written in time. The job may continue; a restart uses its
            newest checkpoint.
        """
        request = self.post(f"/jobs/{job}/stop", {"targetDirectory": folder, "drain": False})
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            done = self.get(f"/jobs/{job}/savepoints/{request['request-id']}") or {}
            if done.get("status", {}).get("id") == "COMPLETED":
                operation = done["operation"]
                if "location" in operation:
                    return str(operation["location"])
                cause = str(operation.get("failure-cause", {}).get("stack-trace", "?")).splitlines()[0]
                raise UnavailableError(f"Flink could not write a savepoint: {cause}")
            time.sleep(0.2)
        raise UnavailableError(f"Flink wrote no savepoint within {timeout_s:.0f} s")

    def _call(self, path: str, data: bytes | None) -> dict[str, Any] | None:
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise UnavailableError(f"Flink at {self.url} answered {error.code} for {path}") from None
        except (OSError, ValueError) as error:
            raise UnavailableError(f"Flink at {self.url}: {getattr(error, 'reason', error)}") from None
        return found if isinstance(found, dict) else {"list": found}
