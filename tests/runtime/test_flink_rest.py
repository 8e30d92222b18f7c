"""The client of Flink's REST interface, against a fake job manager with scripted answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from roostream.errors import UnavailableError
from roostream.runtime.flink_rest import JOB_NAME, FlinkRest
from tests.runtime.fake_flink import FakeFlink
from tests.runtime.raw_server import CUT_OFF, NOT_HTTP, raw_server

JOB = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def flink() -> Iterator[FakeFlink]:
    with FakeFlink() as running:
        yield running


@pytest.mark.parametrize(
    ("state", "live"),
    [
        ("RUNNING", True),
        ("CANCELLING", True),  # it still holds its slots and may write
        ("SUSPENDED", True),  # another job manager resumes it
        ("FINISHED", False),
        ("FAILED", False),
    ],
)
def test_a_job_is_live_until_it_has_ended(state: str, live: bool, flink: FakeFlink) -> None:
    job = {"jid": JOB, "name": JOB_NAME, "state": state}
    flink.answers["/jobs/overview"] = {"jobs": [{"jid": "1", "name": "other", "state": "RUNNING"}, job]}
    assert FlinkRest(flink.url).live_job() == (job if live else None)


@pytest.mark.parametrize("answer", [NOT_HTTP, CUT_OFF])
def test_a_job_manager_that_is_killed_while_it_answers_is_unavailable(answer: bytes) -> None:
    with raw_server(answer) as url:
        rest = FlinkRest(url)
        assert not rest.answers() and rest.task_managers() == set()
        with pytest.raises(UnavailableError, match=f"Flink at {url}"):
            rest.live_job()


def test_a_job_runs_when_all_its_tasks_do(flink: FakeFlink) -> None:
    rest = FlinkRest(f"{flink.url}/")
    assert not rest.is_running()
    for state, running, expected in (("RUNNING", 3, False), ("RESTARTING", 4, False), ("RUNNING", 4, True)):
        tasks = {"running": running, "total": 4}
        flink.answers["/jobs/overview"] = {
            "jobs": [{"jid": JOB, "name": JOB_NAME, "state": state, "tasks": tasks}]
        }
        assert rest.is_running() is expected


def test_readiness_of_a_cluster(flink: FakeFlink) -> None:
    rest = FlinkRest(flink.url)
    assert not rest.answers() and rest.task_managers() == set()
    flink.answers["/overview"] = {"slots-total": 1}
    flink.answers["/taskmanagers"] = {"taskmanagers": [{"id": "tm-0"}]}
    assert rest.answers() and rest.task_managers() == {"tm-0"}


def test_an_unreachable_job_manager_is_unavailable_and_not_ready() -> None:
    rest = FlinkRest("http://127.0.0.1:9")
    assert not rest.answers() and not rest.is_running() and rest.task_managers() == set()
    with pytest.raises(UnavailableError, match=r"Flink at http://127\.0\.0\.1:9"):
        rest.live_job()


def test_a_refusal_of_the_job_manager_is_reported(flink: FakeFlink) -> None:
    flink.answers["/jobs/overview"] = 503
    with pytest.raises(UnavailableError, match="answered 503 for /jobs/overview"):
        FlinkRest(flink.url).live_job()


def test_a_server_that_knows_no_jobs_does_not_say_that_none_runs(flink: FakeFlink) -> None:
    """A second job would join everything twice, and the checkpoints of the first one would be deleted."""
    with pytest.raises(UnavailableError, match="/jobs/overview"):
        FlinkRest(flink.url).live_job()


def test_the_state_of_an_unknown_job_is_unknown(flink: FakeFlink) -> None:
    rest = FlinkRest(flink.url)
    assert rest.state(JOB) == "UNKNOWN"
    flink.answers[f"/jobs/{JOB}"] = {"state": "FAILED"}
    assert rest.state(JOB) == "FAILED" and rest.failure(JOB) == "no reason given"


def test_gauges_are_read_of_the_job(flink: FakeFlink) -> None:
    busy = {"accumulated-busy-time": 70, "accumulated-idle-time": "NaN"}
    newest = {
        "latest_ack_timestamp": 5_000,
        "end_to_end_duration": 40,
        "checkpointed_size": 10,
        "state_size": 90,
    }
    flink.answers |= {
        f"/jobs/{JOB}/metrics?get=numRestarts": [{"id": "numRestarts", "value": "3"}],
        f"/jobs/{JOB}/checkpoints": {
            "counts": {"completed": 12, "failed": 2},
            "latest": {"completed": newest},
        },
        f"/jobs/{JOB}": {
            "state": "RUNNING",
            "vertices": [
                {"id": "s", "name": "Source: impressions -> event-time"},
                {"id": "v", "name": "watermark -> join -> write: Writer", "metrics": busy},
            ],
        },
        f"/jobs/{JOB}/vertices/v/watermarks": [{"id": "0.w", "value": "900"}, {"id": "1.w", "value": "800"}],
    }
    assert FlinkRest(flink.url).gauges(JOB).values == {
        "restarts": 3.0,
        "checkpoints": 12.0,
        "failed_checkpoints": 2.0,
        "checkpoint_ms": 5_000.0,
        "checkpoint_duration_ms": 40.0,
        "checkpoint_bytes": 10.0,
        "state_bytes": 90.0,
        "watermark_ms": 800.0,
        "busy_ms": 70.0,
    }


def test_operator_metrics_are_read_over_all_subtasks(flink: FakeFlink) -> None:
    of_source = ["Source__impressions.split.a-impressions-2.watermark.currentWatermark"]
    of_source.append("Source__impressions.numRecordsIn")
    of_join = ["join.outputs_samples_CLOSE_WINDOW", "watermark.requests_open", "watermark.rules_changed"]
    flink.answers[f"/jobs/{JOB}"] = {
        "vertices": [{"id": "s", "name": "Source: impressions"}, {"id": "v", "name": "watermark -> join"}]
    }
    for vertex, ids in (("s", of_source), ("v", of_join)):
        path = f"/jobs/{JOB}/vertices/{vertex}/subtasks/metrics"
        flink.answers[path] = [{"id": name} for name in [*ids, "numBytesIn"]]
        flink.answers[f"{path}?get={','.join(ids)}"] = [
            {"id": name, "min": 1.0, "max": 4.0, "sum": 7.0} for name in ids
        ]
    gauges = FlinkRest(flink.url).gauges(JOB)
    assert gauges.outputs == {("samples", "CLOSE_WINDOW"): 7.0}
    assert gauges.partition_ms == {("a-impressions", 2): 4.0}
    assert gauges.values["records"] == 7.0
    assert (gauges.values["requests_open"], gauges.values["rules_changed"]) == (7.0, 4.0)


def test_a_stop_with_savepoint_gives_its_path(flink: FakeFlink) -> None:
    flink.answers[f"/jobs/{JOB}/stop"] = {"request-id": "r"}
    done = {"status": {"id": "COMPLETED"}, "operation": {"location": "file:/points/1"}}
    flink.answers[f"/jobs/{JOB}/savepoints/r"] = done
    assert FlinkRest(flink.url).stop_with_savepoint(JOB, "file:/points", 5.0) == "file:/points/1"
    assert flink.posted[f"/jobs/{JOB}/stop"] == {"targetDirectory": "file:/points", "drain": False}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            {
                "status": {"id": "COMPLETED"},
                "operation": {"failure-cause": {"stack-trace": "disk full\n at x"}},
            },
            "disk full",
        ),
        ({"status": {"id": "IN_PROGRESS"}}, "no savepoint within 0 s"),
    ],
)
def test_a_failed_savepoint_is_reported(answer: dict[str, object], message: str, flink: FakeFlink) -> None:
    rest = FlinkRest(flink.url)
    with pytest.raises(UnavailableError, match=f"does not know /jobs/{JOB}/stop"):
        rest.stop_with_savepoint(JOB, "file:/points", 0.3)
    flink.answers[f"/jobs/{JOB}/stop"] = {"request-id": "r"}
    flink.answers[f"/jobs/{JOB}/savepoints/r"] = answer
    with pytest.raises(UnavailableError, match=message):
        rest.stop_with_savepoint(JOB, "file:/points", 0.3)
