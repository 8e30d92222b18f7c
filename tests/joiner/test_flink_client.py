"""Submitting and watching a Flink job, with a fake `flink` command and a fake job manager."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from joiner import flink_client
from joiner.config import JoinerConfig
from joiner.flink_client import check_restore_point, submit
from joiner.metrics import EventTimeProgress, JoinerMetrics
from roostream.errors import ConfigError, OtherVersionError, UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.runtime.flink_rest import JOB_NAME, RULES_KEY, FlinkRest, JobGauges
from roostream.runtime.health import Health
from roostream.runtime.kafka.broker import KafkaSecurity
from roostream.runtime.kafka.retention_loss import CommittedOffset, RetentionLossCounter
from roostream.runtime.kafka.topics import Partition
from roostream.runtime.program import Stop
from tests.runtime.fake_flink import FakeFlink

JOB = "0123456789abcdef0123456789abcdef"
SASL = KafkaSecurity(protocol="SASL_PLAINTEXT", username="joiner", password="s3cret")


@pytest.fixture
def flink() -> Iterator[FakeFlink]:
    with FakeFlink() as running:
        yield running


def write_fake_flink(folder: Path, script: str) -> None:
    """Write an executable `bin/flink` with this script."""
    (folder / "bin").mkdir()
    (folder / "bin" / "flink").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (folder / "bin" / "flink").chmod(0o755)


def test_the_client_unpacks_into_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fake_flink(
        tmp_path, f'echo "$JVM_ARGS" > {tmp_path}/args; echo "$TMPDIR" > {tmp_path}/tmp; echo JobID {JOB}'
    )
    monkeypatch.setenv("FLINK_HOME", str(tmp_path))
    monkeypatch.setenv("JVM_ARGS", "-Xmx1g")
    submit(JoinerConfig(flink="http://x:1"), threading.Event())
    folder = (tmp_path / "tmp").read_text().strip()
    assert (tmp_path / "args").read_text().split() == ["-Xmx1g", f"-Djava.io.tmpdir={folder}"]
    assert not Path(folder).exists(), "the folder must be deleted after the submission"


def test_a_flink_home_without_flink_is_a_wrong_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLINK_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="FLINK_HOME"):
        submit(JoinerConfig(flink="http://x:1"), threading.Event())


def test_the_job_is_submitted_detached_with_its_settings_and_its_restore_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fake_flink(
        tmp_path, f'echo "$@" > {tmp_path}/seen; cat "$8" "${{10}}" >> {tmp_path}/seen; echo "JobID {JOB}"'
    )
    monkeypatch.setenv("FLINK_HOME", str(tmp_path))
    config = JoinerConfig(
        flink="http://127.0.0.1:18081/", restore="/points/chk-7", window_ms=77, kafka_security=SASL
    )
    assert submit(config, threading.Event()) == JOB
    arguments = (tmp_path / "seen").read_text(encoding="utf-8")
    assert arguments.startswith("run -d -m 127.0.0.1:18081 -s /points/chk-7 -py ")
    assert '"window_ms": 77' in arguments and "from joiner.flink_job import main" in arguments
    assert "s3cret" in arguments
    assert "s3cret" not in arguments.splitlines()[0], (
        "every user of the machine can read a command's arguments"
    )


def test_the_newest_checkpoint_of_a_folder_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fake_flink(tmp_path, f'echo "$@" > {tmp_path}/seen; echo "JobID {JOB}"')
    monkeypatch.setenv("FLINK_HOME", str(tmp_path))
    flink = tmp_path / "flink"
    flink.mkdir()
    config = JoinerConfig(flink="http://x:1", restore=str(flink))
    submit(config, threading.Event())
    assert (tmp_path / "seen").read_text().startswith("run -d -m x:1 -py "), "the folder is empty"
    for number in (9, 10):
        (flink / f"checkpoints/a/chk-{number}").mkdir(parents=True)
    (flink / "checkpoints/a/chk-9/_metadata").write_text("x")
    submit(config, threading.Event())
    assert f" -s {flink}/checkpoints/a/chk-9 " in (tmp_path / "seen").read_text()
    submit(JoinerConfig(flink="http://x:1", restore=f"{flink}/checkpoints/a/chk-9"), threading.Event())
    assert f" -s {flink}/checkpoints/a/chk-9 " in (tmp_path / "seen").read_text()


def test_a_folder_that_lost_its_checkpoints_is_not_a_reason_to_join_everything_again(tmp_path: Path) -> None:
    """Samples that are older than the dedupe horizon would be trained a second time."""

    def committed(offset: int) -> Callable[[], Mapping[Partition, CommittedOffset]]:
        return lambda: {
            ("impressions", 0): CommittedOffset(0, -1),
            ("engagements", 0): CommittedOffset(0, offset),
        }

    stop = threading.Event()
    config = JoinerConfig(restore=str(tmp_path))
    check_restore_point(
        JoinerConfig(), committed(7), stop
    )  # without the setting, all events are joined again
    check_restore_point(config, committed(-1), stop)
    with pytest.raises(UnavailableError, match="consumer group"):
        check_restore_point(config, committed(7), stop)
    (tmp_path / "savepoints/a").mkdir(parents=True)
    (tmp_path / "savepoints/a/_metadata").write_text("x")
    check_restore_point(config, committed(7), stop)
    check_restore_point(JoinerConfig(restore=f"{tmp_path}/savepoints/a"), committed(7), stop)


@pytest.mark.parametrize(
    ("printed", "expected_message"),
    [
        (
            "Traceback (most recent call last):\\nImportError: no such thing\\nCaused by: java.lang.E: exits",
            "ImportError",
        ),
        ("at x\\nCaused by: java.net.ConnectException: refused\\n  ... 15 more", "ConnectException: refused"),
        ("", "no output"),
    ],
)
def test_an_error_of_flinks_client_is_reported_by_its_most_specific_line(
    printed: str, expected_message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fake_flink(tmp_path, f"printf '{printed}'; exit 1")
    monkeypatch.setenv("FLINK_HOME", str(tmp_path))
    with pytest.raises(UnavailableError, match=f"Flink did not accept the job: .*{expected_message}"):
        submit(JoinerConfig(flink="http://x:1"), threading.Event())


def test_a_savepoint_of_another_version_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fake_flink(
        tmp_path, "echo Caused by: E: Cannot map checkpoint/savepoint state for operator 1f; exit 1"
    )
    monkeypatch.setenv("FLINK_HOME", str(tmp_path))
    with pytest.raises(OtherVersionError, match="expected a savepoint with joiner state of version 3, got"):
        submit(JoinerConfig(flink="http://x:1", restore="/points/old"), threading.Event())


def test_a_stop_while_submitting_ends_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fake_flink(tmp_path, "exec sleep 60")
    monkeypatch.setenv("FLINK_HOME", str(tmp_path))
    stop = threading.Event()
    stop.set()
    with pytest.raises(UnavailableError, match="stopped while submitting"):
        submit(JoinerConfig(flink="http://x:1"), stop)


def test_a_client_that_hangs_is_ended_also_if_it_ignores_a_request_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fake_flink(tmp_path, "trap '' TERM; exec sleep 90")
    monkeypatch.setenv("FLINK_HOME", str(tmp_path))
    with pytest.raises(UnavailableError, match=r"submit the job within 0\.5 s"):
        submit(JoinerConfig(flink="http://x:1"), threading.Event(), timeout_s=0.5)
    stop = threading.Event()
    stop.set()
    with pytest.raises(UnavailableError, match="stopped while submitting"):
        submit(JoinerConfig(flink="http://x:1"), stop)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_a_joiner_that_is_killed_while_it_submits_a_job_leaves_no_client_behind(tmp_path: Path) -> None:
    """The client would submit its job after the next joiner has found none and submits another one."""
    write_fake_flink(tmp_path, f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 60")
    program = (
        "import threading; from joiner import config, flink_client; "
        "flink_client.submit(config.JoinerConfig(flink='http://x:1'), threading.Event())"
    )
    joiner = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "FLINK_HOME": str(tmp_path)}
    )
    pid_file = tmp_path / "pid"
    while not pid_file.exists():
        assert joiner.poll() is None, "the joiner must be submitting"
        time.sleep(0.05)
    pid = int(pid_file.read_text())
    joiner.kill()
    joiner.wait()
    try:
        for _ in range(100):
            if has_ended(pid):
                break
            time.sleep(0.05)
        assert has_ended(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_what_flink_counts_is_exported_as_metrics() -> None:
    metrics = JoinerMetrics(registry := CollectorRegistry())
    key, late = ("samples", "CLOSE_WINDOW"), ("samples", "CLOSE_LATE")
    values = {"restarts": 3.0, "watermark_ms": 800.0, "requests_open": 5.0, "checkpoint_ms": 2_000.0}
    partitions = {("impressions", 0): 900.0, ("impressions", 1): -1.0}
    metrics.set_job(JobGauges(values, {key: 10.0, late: 2.0}, partitions))
    metrics.set_job(JobGauges({}, {key: 14.0}))
    metrics.set_job(JobGauges({}, {key: 1.0}))  # the job was restarted
    for name, labels, expected in (
        ("watermark_timestamp_seconds", {}, 0.8),
        ("checkpoint_timestamp_seconds", {}, 2.0),
        ("job_restarts", {}, 3.0),
        ("requests", {"phase": "open"}, 5.0),
        ("late_requests", {}, 2.0),
        ("outputs_total", {"topic": "samples", "reason": "CLOSE_WINDOW"}, 15.0),
        ("partition_watermark_timestamp_seconds", {"topic": "impressions", "partition": "0"}, 0.9),
        ("partition_watermark_timestamp_seconds", {"topic": "impressions", "partition": "1"}, None),
    ):
        assert registry.get_sample_value(f"roostream_joiner_{name}", labels) == expected, name


def test_records_that_arrive_while_event_time_stands_still_are_reported() -> None:
    progress = EventTimeProgress(clock := FakeClock())
    partitions = {("impressions", 0): 900.0, ("impressions", 1): -1.0, ("engagements", 0): 800.0}

    def observe(watermark_ms: float | None, num_records: float, after_s: float = 40) -> str:
        clock.advance(after_s)
        return progress.observe(watermark_ms, num_records, partitions)

    assert [observe(None, n) for n in (0, 0, 0)] == [""] * 3, "no records arrive"
    assert [observe(None, n) for n in (1, 2)] == [""] * 2, "event time has stood still for a short time only"
    assert "impressions[1] is silent" in observe(None, 3)
    assert observe(5.0, 4) == "", "event time moves again"
    assert [observe(5.0, n) for n in (5, 6)] == [""] * 2
    assert observe(5.0, 0) == "", "the job was restarted"


@pytest.mark.parametrize(
    ("job", "expected_message"),
    [
        (None, "the job manager does not know it"),
        ({"state": "FAILED"}, "FAILED: boom ← Caused by: the root"),
        ({"state": "CANCELED"}, "CANCELED"),
    ],
)
def test_watching_ends_with_the_reason_when_the_job_has_ended(
    job: dict[str, str] | None, expected_message: str, flink: FakeFlink
) -> None:
    rest, answers = FlinkRest(flink.url), flink.answers
    if job is not None:
        answers[f"/jobs/{JOB}"] = job
    trace = "boom\n\tat x\nCaused by: middle\n\tat y\nCaused by: the root\n\tat z"
    answers[f"/jobs/{JOB}/exceptions?maxExceptions=1"] = {
        "exceptionHistory": {"entries": [{"stacktrace": trace}]}
    }
    with pytest.raises(UnavailableError, match=expected_message):
        flink_client.watch(
            flink_client.FlinkJob(rest, JOB), JoinerMetrics(CollectorRegistry()), Health(60), Stop()
        )


def test_a_running_job_is_adopted_and_left_running_on_stop(flink: FakeFlink, tmp_path: Path) -> None:
    rest, answers = FlinkRest(flink.url), flink.answers
    answers["/jobs/overview"] = {"jobs": [{"jid": JOB, "name": JOB_NAME, "state": "RUNNING"}]}
    stop = Stop()
    stop.set()
    flink_client.run_flink(JoinerConfig(flink=rest.url), JoinerMetrics(CollectorRegistry()), Health(60), stop)
    assert flink.posted == {}  # the job is neither submitted again nor stopped


@pytest.mark.parametrize("is_older", [True, False])
def test_of_two_jobs_that_were_submitted_at_once_the_older_one_stays(
    is_older: bool, flink: FakeFlink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two programs of one deployment started together, and both found a cluster without a job."""
    other, stop = "f" * 32, Stop()
    jobs = [
        {"jid": jid, "name": JOB_NAME, "state": "RUNNING", "start-time": time_ms}
        for jid, time_ms in ((other, 5), (JOB, 4 if is_older else 6))
    ]

    def submitted(config: JoinerConfig, stop: Stop) -> str:
        flink.answers["/jobs/overview"] = {"jobs": jobs}
        stop.set()
        return JOB

    flink.answers["/jobs/overview"] = {"jobs": []}
    monkeypatch.setattr(flink_client, "submit", submitted)
    monkeypatch.setattr(flink_client, "wait_for_topics", lambda *arguments: {})
    flink_client.run_flink(
        JoinerConfig(flink=flink.url), JoinerMetrics(CollectorRegistry()), Health(60), stop
    )
    assert flink.cancelled == ([] if is_older else [f"/jobs/{JOB}?mode=cancel"])


@pytest.mark.parametrize(("window_ms", "is_warned"), [(7, False), (8, True)])
def test_an_adopted_job_with_other_rules_is_named(
    window_ms: int, is_warned: bool, flink: FakeFlink, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on with the settings that it was started with."""
    config, rules = JoinerConfig(flink=flink.url, window_ms=7), JoinerConfig(window_ms=window_ms).rules
    flink.answers["/jobs/overview"] = {"jobs": [{"jid": JOB, "name": JOB_NAME, "state": "RUNNING"}]}
    flink.answers[f"/jobs/{JOB}/config"] = {"execution-config": {"user-config": {RULES_KEY: rules.text}}}
    stop = Stop()
    stop.set()
    flink_client.run_flink(config, JoinerMetrics(CollectorRegistry()), Health(60), stop)
    assert ("window_ms = 8" in caplog.text) == is_warned


def test_a_job_that_recovers_by_high_availability_is_awaited(flink: FakeFlink) -> None:
    stop, health = Stop(), Health(60)
    meters = JoinerMetrics(CollectorRegistry())
    threading.Timer(0.5, stop.set).start()
    flink_client.watch(flink_client.FlinkJob(FlinkRest(flink.url), JOB), meters, health, stop, recovery_s=60)
    assert health.unready() == "the job manager has not recovered the job yet"


@pytest.mark.parametrize(("state", "is_asked"), [("INITIALIZING", False), ("RESTARTING", True)])
def test_a_job_that_has_no_numbers_yet_is_not_asked_for_them(
    state: str, is_asked: bool, flink: FakeFlink
) -> None:
    """Flink logs each such question as an unhandled exception."""
    stop, meters = Stop(), JoinerMetrics(registry := CollectorRegistry())
    flink.answers[f"/jobs/{JOB}"] = {"state": state}
    flink.answers[f"/jobs/{JOB}/metrics?get=numRestarts"] = [{"id": "numRestarts", "value": "3"}]
    threading.Timer(0.5, stop.set).start()
    flink_client.watch(flink_client.FlinkJob(FlinkRest(flink.url), JOB), meters, Health(60), stop)
    assert registry.get_sample_value("roostream_joiner_job_restarts") == (3.0 if is_asked else 0.0)


def test_a_job_that_fails_again_and_again_is_never_ready(
    flink: FakeFlink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two failures, Flink calls such a job RUNNING."""
    monkeypatch.setattr(flink_client, "POLL_S", 0.01)
    stop, clock, reasons = Stop(), FakeClock(), list[str]()
    flink.answers[f"/jobs/{JOB}"] = {"state": "RESTARTING"}
    trace = {"exceptionHistory": {"entries": [{"stacktrace": "java.lang.IllegalStateException: no topic"}]}}
    flink.answers[f"/jobs/{JOB}/exceptions?maxExceptions=1"] = trace

    class Recorded(Health):
        def turned(self, missing: str = "") -> None:
            reasons.append(missing)
            flink.answers[f"/jobs/{JOB}"] = {"state": "RUNNING"}
            clock.advance(6)
            if len(reasons) == 3:
                stop.set()

    job, meters = flink_client.FlinkJob(FlinkRest(flink.url), JOB), JoinerMetrics(CollectorRegistry())
    flink_client.watch(job, meters, Recorded(60), stop, clock=clock)
    assert reasons[0] == "the job is RESTARTING"
    assert "6 s ago" in reasons[1] and "no topic" in reasons[1]
    assert reasons[2] == "", "it has run for a while"


def test_a_job_manager_that_cannot_name_a_failure_now_does_not_end_the_watch(flink: FakeFlink) -> None:
    """It goes away, or is too busy for an answer in time, above all while jobs fail."""
    stop, health, path = Stop(), Health(60), f"/jobs/{JOB}/exceptions?maxExceptions=1"
    flink.answers |= {f"/jobs/{JOB}": {"state": "RESTARTING"}, path: 503}
    threading.Timer(0.3, lambda: flink.answers.update({path: {}})).start()
    threading.Timer(2.0, stop.set).start()
    job, meters = flink_client.FlinkJob(FlinkRest(flink.url), JOB), JoinerMetrics(CollectorRegistry())
    flink_client.watch(job, meters, health, stop)
    assert health.unready() == "the job is RESTARTING"


def test_a_running_job_whose_event_time_stands_still_is_not_ready(flink: FakeFlink) -> None:
    metrics, stop, health = f"/jobs/{JOB}/vertices/s/subtasks/metrics", Stop(), Health(60)
    flink.answers[f"/jobs/{JOB}"] = {"state": "RUNNING", "vertices": [{"id": "s", "name": "Source: x"}]}
    flink.answers[metrics] = [{"id": "Source__x.numRecordsIn"}]

    class AdvancingClock(FakeClock):
        """A clock that advances 70 s at each reading. The fake job reads one more record at each reading."""

        num_records = 1

        def monotonic_s(self) -> float:
            self.advance(70)
            self.num_records += 1
            self.answer()
            if self.num_records > 6:
                stop.set()
            return super().monotonic_s()

        def answer(self) -> None:
            counted = {"id": "Source__x.numRecordsIn", "min": 0, "max": 0, "sum": self.num_records}
            flink.answers[f"{metrics}?get=Source__x.numRecordsIn"] = [counted]

    clock = AdvancingClock()
    clock.answer()
    job, meters = flink_client.FlinkJob(FlinkRest(flink.url), JOB), JoinerMetrics(CollectorRegistry())
    flink_client.watch(job, meters, health, stop, clock=clock)
    assert "event time stands still" in health.unready()


def test_records_that_retention_deleted_before_flink_read_them_are_exported(flink: FakeFlink) -> None:
    """Flink's source continues at the oldest record without reporting the loss."""
    stop, meters = Stop(), JoinerMetrics(registry := CollectorRegistry())
    flink.answers[f"/jobs/{JOB}"] = {"state": "RUNNING"}
    losses = RetentionLossCounter(
        lambda: {("impressions", 0): CommittedOffset(oldest=70, next=50)}, "the join"
    )
    threading.Timer(0.3, stop.set).start()
    flink_client.watch(flink_client.FlinkJob(FlinkRest(flink.url), JOB, losses), meters, Health(60), stop)
    assert registry.get_sample_value("roostream_joiner_lost_records") == 20


def test_a_job_does_not_count_as_running_while_the_job_manager_does_not_answer(flink: FakeFlink) -> None:
    stop, meters = Stop(), JoinerMetrics(registry := CollectorRegistry())
    flink.answers[f"/jobs/{JOB}"] = {"state": "RUNNING"}

    class StoppingFlink(FlinkRest):
        """A job manager that answers once, and then not until the stop."""

        num_calls = 0

        def state(self, job: str) -> str:
            self.num_calls += 1
            if self.num_calls == 1:
                return super().state(job)
            assert registry.get_sample_value("roostream_joiner_running") == (self.num_calls == 2)
            if self.num_calls > 2:
                stop.set()
            raise UnavailableError("no answer")

    with pytest.raises(UnavailableError):
        flink_client.watch(flink_client.FlinkJob(StoppingFlink(flink.url), JOB), meters, Health(60), stop)


def test_an_absent_job_manager_is_awaited_until_the_stop() -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(UnavailableError, match="stopped while waiting for Flink"):
        flink_client.run_flink(
            JoinerConfig(flink="http://127.0.0.1:9"), JoinerMetrics(CollectorRegistry()), Health(60), stop
        )


def test_a_job_that_another_program_submits_is_awaited(flink: FakeFlink) -> None:
    flink.answers["/jobs/overview"] = {"jobs": []}
    flink.answers[f"/jobs/{JOB}"] = {"state": "RUNNING"}
    stop, health, meters = Stop(), Health(60), JoinerMetrics(registry := CollectorRegistry())
    running = {"jobs": [{"jid": JOB, "name": JOB_NAME, "state": "RUNNING"}]}
    threading.Timer(0.3, lambda: flink.answers.update({"/jobs/overview": running})).start()
    threading.Timer(2.0, stop.set).start()
    flink_client.run_flink(JoinerConfig(flink=flink.url, submits=False), meters, health, stop)
    assert registry.get_sample_value("roostream_joiner_running") == 1


def test_waiting_for_another_programs_job_ends_with_a_signal(flink: FakeFlink) -> None:
    flink.answers["/jobs/overview"] = {"jobs": []}
    stop, health = Stop(), Health(60)
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(UnavailableError, match="stopped while waiting for the job"):
        flink_client.wait_for_job(FlinkRest(flink.url), health, stop)
    assert health.unready() == "no job runs yet"
