"""Submits the joiner's job with Flink's own client, and watches it through the job manager's REST
interface."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from joiner.config import JoinerConfig
from joiner.metrics import EventTimeProgress, JoinerMetrics
from joiner.outputs import OUTPUTS
from joiner.state import VERSION
from roostream.errors import ConfigError, OtherVersionError, UnavailableError
from roostream.runtime import die_with_parent
from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.flink_rest import ENDED, JOB_NAME, RULES_KEY, FlinkRest, pyflink_home
from roostream.runtime.flink_restore_points import newest_restore_point
from roostream.runtime.health import Health
from roostream.runtime.kafka.clients import consumer, wait_for_topics
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions
from roostream.runtime.kafka.retention_loss import CommittedOffset, RetentionLossCounter, committed_offsets
from roostream.runtime.kafka.topics import EVENTS, Partition, all_partitions
from roostream.runtime.program import Stop

log = logging.getLogger("roostream.joiner")
POLL_S = 1.0
_READ_GAUGES_EVERY_S = 5.0  # Flink's own are up to 10 s old
_COUNT_LOSSES_EVERY_S = 10.0
_SUBMIT_S = 600.0  # a program that starts counts as alive, so nobody else ends a client that hangs
_END_S = 3.0  # between SIGTERM and SIGKILL of the client
_RECOVERY_S = 60.0  # a job manager with high availability recovers its jobs within this time
_SETTLE_S = 10.0  # a job that has run for this long since its last failure is ready
_MAIN_SCRIPT = "from joiner.flink_job import main\n\nmain()\n"
# Flink's words for state of an operator the job does not have
_FOREIGN_STATE = "Cannot map checkpoint/savepoint state"
T = TypeVar("T")
FetchOffsets: TypeAlias = Callable[[], Mapping[Partition, CommittedOffset]]


@dataclasses.dataclass(frozen=True)
class FlinkJob:
    """A job of a cluster. `losses` counts records that its Kafka sources lost, which Flink does not
    report."""

    rest: FlinkRest
    id: str
    losses: RetentionLossCounter | None = None


def run_flink(config: JoinerConfig, metrics: JoinerMetrics, health: Health, stop: Stop) -> None:
    """Adopt the cluster's joiner job, submit one, or (`submits = false`) wait for one. Then watch it until
    `stop` is set, and leave it running.

    Raises:
        UnavailableError: the job failed for good, was cancelled, or is unknown to a restarted job manager; or
        there is nothing in the folder `restore`, see `check_restore_point`. A restart of this program submits
        it again, from the setting `restore`.
    """
    rest = FlinkRest(config.flink)
    fetch = committed_by_joiner(config) if config.bootstrap else None
    job = retry(rest, rest.live_job, stop) if config.submits else wait_for_job(rest, health, stop)
    if job:
        log.info("found the joiner's job, state %s; watching it", job["state"])
        job_id = str(job["jid"])
        if config.submits:
            warn_of_other_rules(config, retry(rest, lambda: rest.parameter(job_id, RULES_KEY), stop))
    else:
        wait_for_topics(config.broker, config.prefix, (*EVENTS, *OUTPUTS), config.partitions, stop)
        if fetch:
            check_restore_point(config, fetch, stop)
        job_id = keep_older_job(rest, submit(config, stop), stop)
    log.info("job %s: %s/#/job/%s/overview", job_id, rest.url, job_id)
    high_availability = retry(rest, rest.high_availability, stop)
    if high_availability:
        log.info("if the job manager dies, its high availability (%s) restores the job", high_availability)
    else:
        log.info("high availability is off: if the job manager dies, the job is submitted again")
    recovery_s = _RECOVERY_S if high_availability else 0.0
    losses = RetentionLossCounter(fetch, "the joiner") if fetch else None
    watch(FlinkJob(rest, job_id, losses), metrics, health, stop, recovery_s=recovery_s)


def keep_older_job(rest: FlinkRest, job_id: str, stop: Stop) -> str:
    """Cancel this program's job if another program submitted one just before, which would join all events a
    second time. Returns the job that stays."""
    oldest = retry(rest, rest.live_job, stop)
    if oldest is None or oldest["jid"] == job_id:
        return job_id
    retry(rest, lambda: rest.cancel(job_id), stop)
    log.warning(
        "cancelled job %s of this program, because another joiner has submitted job %s before; run one of "
        "the two programs only",
        job_id,
        oldest["jid"],
    )
    return str(oldest["jid"])


def warn_of_other_rules(config: JoinerConfig, text: str) -> None:
    """Log which rules of the running job, as JSON in `text`, the settings have changed since; "" = unknown,
    of an older job."""
    now = json.loads(config.rules.text)
    others = [f"{k} = {v}" for k, v in (json.loads(text) if text else {}).items() if now.get(k) != v]
    if others:
        log.warning(
            "the running job still has %s, unlike the settings; to apply them, stop it with a savepoint, "
            "from which the joiner starts the next one (docs/operations/day-two.md)",
            ", ".join(others),
        )


def wait_for_job(rest: FlinkRest, health: Health, stop: Stop) -> dict[str, Any]:
    """The job that another program submits. Raises UnavailableError when `stop` is set first."""
    logged = False
    while not stop.is_set():
        with health.waiting(f"Flink at {rest.url}"):
            job = retry(rest, rest.live_job, stop)
        if job:
            return job
        if not logged:
            log.info("waiting for a joiner job at %s; this program submits none (submits = false)", rest.url)
            logged = True
        health.turned("no job runs yet")
        stop.wait(POLL_S)
    raise UnavailableError("stopped while waiting for the job")


def watch(
    job: FlinkJob,
    metrics: JoinerMetrics,
    health: Health,
    stop: Stop,
    *,
    recovery_s: float = 0.0,
    clock: Clock | None = None,
) -> None:
    """Export the job's state and losses, and log state changes, until `stop` is set. The job may be unknown
    for `recovery_s`. Raises as `run_flink`."""
    watcher = _Watcher(job, metrics, health, stop, recovery_s, clock or SystemClock())
    while not stop.is_set():
        health.turned(watcher.poll())
        stop.wait(POLL_S)


class _Watcher:
    """What one call of `watch` remembers between its polls."""

    def __init__(
        self,
        job: FlinkJob,
        metrics: JoinerMetrics,
        health: Health,
        stop: Stop,
        recovery_s: float,
        clock: Clock,
    ) -> None:
        self.job, self.metrics, self.health, self.stop = job, metrics, health, stop
        self.recovery_s, self.clock = recovery_s, clock
        self._event_time, self._stands_still = EventTimeProgress(clock), ""
        self._logged_state, self._unknown_since_s = "", 0.0
        self._failure, self._failed_at_s = "", -_SETTLE_S
        self._read_gauges_at_s, self._count_losses_at_s = clock.monotonic_s(), 0.0

    def poll(self) -> str:
        """Poll the job once. Returns why it is not ready, or "". Raises as `run_flink`."""
        state = self._wait_for(partial(self.job.rest.state, self.job.id))
        if self._is_recovering(state):
            return "the job manager has not recovered the job yet"
        self._check_runs(state)
        if failing := state in ("RESTARTING", "FAILING"):
            self._failure = self._wait_for(partial(self.job.rest.failure, self.job.id))
            self._failed_at_s = self.clock.monotonic_s()
        if state != self._logged_state:
            log.info("the job is %s%s", state, f" ({self._failure})" if failing else "")
            self._logged_state = state
        self.metrics.running.set(state == "RUNNING")
        if state != "INITIALIZING":  # such a job has no numbers yet: Flink refuses, and logs, the questions
            self._export_gauges()
        self._count_losses()
        if state != "RUNNING":
            return f"the job is {state}"
        if (failed_s := self.clock.monotonic_s() - self._failed_at_s) < _SETTLE_S:
            return f"the job failed {failed_s:.0f} s ago: {self._failure}"
        return self._stands_still

    def _wait_for(self, call: Callable[[], T]) -> T:
        def ask() -> T:
            try:
                return call()
            except UnavailableError:
                self.metrics.running.set(0)  # the last answer is no longer current
                raise

        with self.health.waiting(f"Flink at {self.job.rest.url}"):
            return retry(self.job.rest, ask, self.stop)

    def _is_recovering(self, state: str) -> bool:
        """Whether the job is unknown, and has been for less than `recovery_s`."""
        if state != "UNKNOWN":
            self._unknown_since_s = 0.0
            return False
        now_s = self.clock.monotonic_s()
        self._unknown_since_s = self._unknown_since_s or now_s
        return now_s - self._unknown_since_s < self.recovery_s

    def _check_runs(self, state: str) -> None:
        if state not in (*ENDED, "UNKNOWN"):
            return
        self.metrics.running.set(0)
        why = "the job manager does not know it"
        if state != "UNKNOWN":
            why = f"{state}: {self.job.rest.failure(self.job.id)}"
        raise UnavailableError(
            f"job {self.job.id} no longer runs ({why}); restart the joiner to continue from a checkpoint"
        )

    def _export_gauges(self) -> None:
        if self.clock.monotonic_s() < self._read_gauges_at_s:
            return
        gauges = self._wait_for(partial(self.job.rest.gauges, self.job.id))
        self.metrics.set_job(gauges)
        self._stands_still = self._event_time.observe(
            gauges.values.get("watermark_ms"), gauges.values.get("records", 0.0), gauges.partition_ms
        )
        self._read_gauges_at_s = self.clock.monotonic_s() + _READ_GAUGES_EVERY_S

    def _count_losses(self) -> None:
        losses = self.job.losses
        if losses is None or self.clock.monotonic_s() < self._count_losses_at_s:
            return
        losses.update()
        self.metrics.lost.set(losses.num_lost)
        self._count_losses_at_s = self.clock.monotonic_s() + _COUNT_LOSSES_EVERY_S


def retry(rest: FlinkRest, call: Callable[[], T], stop: Stop) -> T:
    """The result of `call`, retried while the job manager is away. Raises UnavailableError only when `stop`
    is set."""
    return Backoff(what=f"Flink at {rest.url}").until(call, (UnavailableError,), stop)


def committed_by_joiner(config: JoinerConfig) -> FetchOffsets:
    """Of the consumer group to which a job's sources, or the local engine, commit after each checkpoint."""
    options = ConsumerOptions(partitions=all_partitions(EVENTS, config.partitions), prefix=config.prefix)
    client = consumer(config.broker, f"{config.prefix}{JOB_NAME}")
    return partial(committed_offsets, client, options)


def has_committed(fetch: FetchOffsets, stop: threading.Event) -> bool:
    """Whether a joiner has committed offsets to Kafka; `fetch` is retried while Kafka is away. Raises
    UnavailableError: `stop` was set."""
    offsets = Backoff(what="the joiner's offsets in Kafka").until(fetch, (UnavailableError,), stop)
    return any(offset.next >= 0 for offset in offsets.values())


def check_restore_point(config: JoinerConfig, fetch: FetchOffsets, stop: threading.Event) -> None:
    """Check that the folder `config.restore` has not lost its restore points. `fetch` returns what the
    joiner has committed to Kafka, which it does after each checkpoint; it is retried while Kafka is away.

    Raises:
        UnavailableError: a joiner has written checkpoints, but none is there; or `stop` was set.
    """
    if not config.restore or _restore_point(config.restore):
        return
    if has_committed(fetch, stop):
        raise UnavailableError(
            f"expected a savepoint or checkpoint in {config.restore}, because a joiner has committed its "
            "offsets to Kafka, got none: make the folder's files available again, or delete the consumer "
            f"group {config.prefix}{JOB_NAME} in Kafka to join all events again"
        )


def submit(config: JoinerConfig, stop: threading.Event, timeout_s: float = _SUBMIT_S) -> str:
    """Start the job, from `config.restore` if that is set. Returns its id. Takes about 15 s.

    Raises:
        SetupError: PyFlink is not installed. ConfigError: FLINK_HOME is wrong. OtherVersionError:
        `config.restore` is of another version of the joiner's state. UnavailableError: Flink's client failed
        (with its error) or took longer than `timeout_s`, or `stop` was set. Either no job was started, or
        `live_job` finds it.
    """
    address = re.sub(r"^https?://", "", config.flink.rstrip("/"))
    # A client that outlived this process would submit its job beside that of the next process.
    command = [sys.executable, "-I", "-S", str(die_with_parent.__file__), str(os.getpid())]
    command += [str(flink_home() / "bin" / "flink"), "run", "-d", "-m", address]
    restore = _restore_point(config.restore)
    if restore:
        command += ["-s", restore]
    log.info("submitting the job%s", f" from {restore}" if restore else ", which reads all events again")
    with tempfile.TemporaryDirectory(prefix="roostream-job-") as folder:
        script = Path(folder) / "roostream_joiner.py"
        script.write_text(_MAIN_SCRIPT, encoding="utf-8")
        settings = Path(folder) / "settings.json"  # a file, because all users can read a process's arguments
        settings.touch(mode=0o600)
        settings.write_text(json.dumps(dataclasses.asdict(config)), encoding="utf-8")
        command += ["-py", str(script), "--settings", str(settings)]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_client_environment(folder),
        ) as client:
            output = _wait(client, stop, timeout_s)
    found = re.search(r"JobID ([0-9a-f]{32})", output)
    if client.returncode or not found:
        log.debug("flink run printed:\n%s", output)
        if _FOREIGN_STATE in output:
            raise OtherVersionError(
                f"expected a savepoint with joiner state of version {VERSION}, got {restore}; "
                "continue with the build that wrote it, or remove the setting 'restore'"
            )
        raise UnavailableError(f"Flink did not accept the job: {_most_specific_line(output)}")
    return found[1]


def _restore_point(restore: str) -> str:
    """The setting, or where it is a folder of this machine, the newest restore point in it; "" = none."""
    folder = Path(restore)
    if not restore or not folder.is_dir() or (folder / "_metadata").exists():
        return restore
    return str(newest_restore_point(folder) or "")


def flink_home() -> Path:
    """FLINK_HOME, else the Flink inside PyFlink. Raises ConfigError: FLINK_HOME has no Flink."""
    if home := os.environ.get("FLINK_HOME"):
        if not (Path(home) / "bin" / "flink").is_file():
            raise ConfigError(
                f"FLINK_HOME: expected a folder with bin/flink, got {home}; infra/image/flink-home.sh makes "
                "one"
            )
        return Path(home)
    return pyflink_home()


def _client_environment(tmp: str) -> dict[str, str]:
    """Environment variables of Flink's command-line client.

    It runs the `python3` on PATH to build the job, and PYTHONPATH makes this project's packages importable
    there. It unpacks files into `tmp`, which must belong to this process: in a shared folder the client fails
    if another user's client has already written there.
    """
    root = str(Path(__file__).resolve().parent.parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "TMPDIR": tmp,
        "JVM_ARGS": f"{os.environ.get('JVM_ARGS', '')} {shlex.quote(f'-Djava.io.tmpdir={tmp}')}",
    }


def _wait(client: subprocess.Popen[str], stop: threading.Event, timeout_s: float) -> str:
    """What the client prints until it ends. It is ended after the time limit and by a stop."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            return client.communicate(timeout=0.2)[0]
        except subprocess.TimeoutExpired:
            if stop.is_set():
                _end(client)
                raise UnavailableError("stopped while submitting the job") from None
            if time.monotonic() >= until_s:
                _end(client)
                raise UnavailableError(
                    f"expected Flink's client to submit the job within {timeout_s:g} s, got no answer; check "
                    "the job manager's log, and restart the joiner"
                ) from None


def _end(client: subprocess.Popen[str]) -> None:
    client.terminate()
    try:
        client.wait(_END_S)
    except subprocess.TimeoutExpired:
        client.kill()


def _most_specific_line(output: str) -> str:
    """The last Python error, else the last Java cause, else the last line that the client printed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    python = [line for line in lines if re.match(r"^(?:\d\S* \w+ +\S+ +)?\w+(?:\.\w+)*Error: ", line)]
    java = [line for line in lines if line.startswith("Caused by")]
    return (python or java or lines or ["no output"])[-1]
