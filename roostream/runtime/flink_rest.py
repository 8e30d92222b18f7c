"""Client of Flink's REST interface, for the joiner, the local stack and `roostream status`."""

from __future__ import annotations

import dataclasses
import http.client
import importlib.util
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from roostream.errors import SetupError, UnavailableError
from roostream.runtime.direct_http import open_direct

JOB_NAME = "roostream-joiner"
RULES_KEY = "roostream.rules"
"""The parameter of a job with the rules of its join, as JSON."""
ENDED = ("FINISHED", "FAILED", "CANCELED")
"""Jobs in any other state are live. A job that is being cancelled still has its slots and may write, so no
other is started."""

_TIMEOUT_S = 5.0
_METRICS_A_CALL = 25  # Flink refuses a request line of more than 4,096 bytes


def pyflink_home() -> Path:
    """The folder of the installed PyFlink. Raises SetupError if PyFlink is not installed."""
    spec = importlib.util.find_spec("pyflink")
    if spec is None or spec.origin is None:
        raise SetupError("apache-flink is not installed; run `make setup`")
    return Path(spec.origin).parent


def output_counter(topic: str, reason: str) -> str:
    """Name of the join operator's counter of its outputs."""
    return f"outputs_{topic}_{reason}"


_OPERATOR_METRIC = re.compile(
    r"\.split\.(?P<split>.+-\d+)\.watermark\.currentWatermark$"
    r"|^join\.outputs_(?P<topic>samples|corrections|dead_letters)_(?P<reason>\w*)$"
    r"|\.(?P<name>rules_changed|watermark_pending_ms|requests_\w+|failedCommittables)$"
    r"|^Source__.*\.(?P<records>numRecordsIn)$"
)


@dataclasses.dataclass(frozen=True)
class JobGauges:
    """Numbers of a job. Those of operators begin again at 0 with each restart, except `requests_…`.

    `values`: restarts, checkpoints, failed_checkpoints; of the newest completed checkpoint checkpoint_ms (the
    time of its end), checkpoint_duration_ms, checkpoint_bytes (written) and state_bytes (complete);
    watermark_ms, watermark_pending_ms, records, rules_changed, failedCommittables, requests_{phase}; and
    busy_ms, backpressured_ms and idle_ms of the join's tasks.
    """

    values: dict[str, float] = dataclasses.field(default_factory=dict)
    outputs: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)  # by (topic, reason)
    partition_ms: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    """(Topic, partition) → its watermark; below 0 before its first record."""


def _add(found: JobGauges, match: re.Match[str], metric: dict[str, Any]) -> None:
    """Add an operator's metric, which Flink has aggregated over its subtasks."""
    if match["split"]:
        topic, _, partition = match["split"].rpartition("-")
        found.partition_ms[topic, int(partition)] = float(metric["max"])
    elif match["topic"]:
        found.outputs[match["topic"], match["reason"]] = float(metric["sum"])
    else:
        name = match["name"] or "records"
        value = float(metric["max" if name in ("rules_changed", "watermark_pending_ms") else "sum"])
        found.values[name] = found.values.get(name, 0.0) + value


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
        """The joiner's job (`jid`, `state`, `tasks`) if one has not ended, the oldest of several; or None."""
        found = self.get("/jobs/overview")
        if found is None:
            raise UnavailableError(f"Flink at {self.url} does not know /jobs/overview; check the address")
        jobs = [j for j in found.get("jobs", []) if j["name"] == JOB_NAME and j["state"] not in ENDED]
        return min(jobs, key=lambda job: (job.get("start-time", 0), job["jid"]), default=None)

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

    def parameter(self, job: str, key: str) -> str:
        """A parameter that the job was submitted with; "" if it has none of this name."""
        found = self.get(f"/jobs/{job}/config") or {}
        return str(found.get("execution-config", {}).get("user-config", {}).get(key, ""))

    def cancel(self, job: str) -> None:
        """Ask for the end of a job, without a savepoint; does not wait for it."""
        self._call(f"/jobs/{job}?mode=cancel", b"", "PATCH")

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

    def gauges(self, job: str) -> JobGauges:
        """What the job manager knows of a job; numbers that it does not have yet are left out. Operator
        metrics reach it every 10 s."""
        found = JobGauges()
        values = found.values
        for metric in (self.get(f"/jobs/{job}/metrics?get=numRestarts") or {}).get("list", []):
            values["restarts"] = float(metric["value"])
        checkpoints = self.get(f"/jobs/{job}/checkpoints") or {}
        if counts := checkpoints.get("counts"):
            values["checkpoints"] = float(counts["completed"])
            values["failed_checkpoints"] = float(counts["failed"])
        if newest := (checkpoints.get("latest") or {}).get("completed"):
            values["checkpoint_ms"] = float(newest["latest_ack_timestamp"])
            values["checkpoint_duration_ms"] = float(newest["end_to_end_duration"])
            values["checkpoint_bytes"] = float(newest["checkpointed_size"])
            values["state_bytes"] = float(newest["state_size"])
        for vertex in (self.get(f"/jobs/{job}") or {}).get("vertices", []):
            path = f"/jobs/{job}/vertices/{vertex['id']}"
            if "join" in vertex["name"]:
                marks = (self.get(f"{path}/watermarks") or {}).get("list", [])
                times_ms = [int(mark["value"]) for mark in marks]
                if times_ms and min(times_ms) > 0:
                    values["watermark_ms"] = float(min(times_ms))
                for state in ("busy", "backpressured", "idle"):
                    total_ms = vertex.get("metrics", {}).get(f"accumulated-{state}-time")
                    if isinstance(total_ms, (int, float)):  # "NaN" before the task runs
                        values[f"{state}_ms"] = float(total_ms)
            self._read_operators(f"{path}/subtasks/metrics", found)
        return found

    def _read_operators(self, path: str, found: JobGauges) -> None:
        """Add the metrics of one vertex's operators, over all of its subtasks."""
        ids = [str(metric["id"]) for metric in (self.get(path) or {}).get("list", [])]
        names = {metric_id: match for metric_id in ids if (match := _OPERATOR_METRIC.search(metric_id))}
        wanted = [*names]
        for n in range(0, len(wanted), _METRICS_A_CALL):
            query = urllib.parse.quote(",".join(wanted[n : n + _METRICS_A_CALL]), safe=",")
            for metric in (self.get(f"{path}?get={query}") or {}).get("list", []):
                _add(found, names[metric["id"]], metric)

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

    def _call(self, path: str, data: bytes | None, method: str | None = None) -> dict[str, Any] | None:
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}, method=method
        )
        try:
            with open_direct(request, self.timeout_s) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise UnavailableError(f"Flink at {self.url} answered {error.code} for {path}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UnavailableError(f"Flink at {self.url}: {getattr(error, 'reason', error)}") from None
        return found if isinstance(found, dict) else {"list": found}
