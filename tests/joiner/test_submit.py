"""Submitting and watching a job, against a fake client and a fake job manager."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from prometheus_client import CollectorRegistry

from joiner import main
from joiner.config import JoinerConfig
from joiner.meters import Meters
from joiner.submit import JOB_NAME, FlinkRest, submit
from roo.errors import UnavailableError
from runtime.broker import KafkaSecurity
from runtime.program import Stop

JOB = "0123456789abcdef0123456789abcdef"
SASL = KafkaSecurity(protocol="SASL_PLAINTEXT", username="joiner", password="s3cret")


class FakeFlink(http.server.BaseHTTPRequestHandler):
    """Answers what the class attribute says; 404 for all else."""

    answers: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        found = self.answers.get(self.path)
        body = json.dumps(found).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def flink() -> Iterator[tuple[FlinkRest, dict[str, Any]]]:
    FakeFlink.answers = {}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeFlink)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield FlinkRest(f"http://127.0.0.1:{server.server_address[1]}/"), FakeFlink.answers
    server.shutdown()
    thread.join()
    server.server_close()


def client(folder: Path, script: str) -> None:
    """A `flink` of our own."""
    (folder / "bin").mkdir()
    (folder / "bin" / "flink").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (folder / "bin" / "flink").chmod(0o755)


def test_the_job_is_submitted_detached_with_its_settings_and_its_restore_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client(
        tmp_path,
        f'echo "$@" > {tmp_path}/seen; cat "$8" "${{10}}" >> {tmp_path}/seen; echo "Job has been submitted with JobID {JOB}"',
    )
    monkeypatch.setenv("FLINK_HOME", str(tmp_path))
    config = JoinerConfig(flink="http://127.0.0.1:18081/", restore="/points/chk-7", window_ms=77, kafka_security=SASL)
    assert submit(config, threading.Event()) == JOB
    arguments = (tmp_path / "seen").read_text(encoding="utf-8")
    assert arguments.startswith("run -d -m 127.0.0.1:18081 -s /points/chk-7 -py ")
    assert '"window_ms": 77' in arguments and "from joiner.job import main" in arguments
    assert "s3cret" in arguments and "s3cret" not in arguments.splitlines()[0], "arguments can be read by everybody"


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        (
            "Traceback (most recent call last):\\nImportError: no such thing\\nCaused by: java.lang.RuntimeException: exits",
            "ImportError",
        ),
        ("at x\\nCaused by: java.net.ConnectException: refused\\n  ... 15 more", "ConnectException: refused"),
        ("", "no output"),
    ],
)
def test_a_client_that_fails_is_told_with_its_most_telling_line(
    printed: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client(tmp_path, f"printf '{printed}'; exit 1")
    monkeypatch.setenv("FLINK_HOME", str(tmp_path))
    with pytest.raises(UnavailableError, match=f"Flink did not take the job: .*{told}"):
        submit(JoinerConfig(flink="http://x:1"), threading.Event())


def test_a_stop_while_submitting_ends_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client(tmp_path, "exec sleep 60")
    monkeypatch.setenv("FLINK_HOME", str(tmp_path))
    stop = threading.Event()
    stop.set()
    with pytest.raises(UnavailableError, match="stopped while submitting"):
        submit(JoinerConfig(flink="http://x:1"), stop)


def test_the_live_job_is_found_by_its_name_and_state(flink: tuple[FlinkRest, dict[str, Any]]) -> None:
    rest, answers = flink
    jobs = [{"jid": "1", "name": "other", "state": "RUNNING"}, {"jid": "2", "name": JOB_NAME, "state": "FAILED"}]
    answers["/jobs/overview"] = {"jobs": jobs}
    assert rest.live_job() == ""
    jobs.append({"jid": JOB, "name": JOB_NAME, "state": "RESTARTING"})
    assert rest.live_job() == JOB


def test_gauges_are_read_and_exported(flink: tuple[FlinkRest, dict[str, Any]]) -> None:
    rest, answers = flink
    answers[f"/jobs/{JOB}/metrics?get=numRestarts"] = [{"id": "numRestarts", "value": "3"}]
    answers[f"/jobs/{JOB}/checkpoints"] = {"counts": {"completed": 12}}
    answers[f"/jobs/{JOB}"] = {"state": "RUNNING", "vertices": [{"id": "v", "name": "join -> write: Writer"}]}
    answers[f"/jobs/{JOB}/vertices/v/watermarks"] = [{"id": "0.w", "value": "900"}, {"id": "1.w", "value": "800"}]
    gauges = rest.gauges(JOB)
    assert gauges == {"restarts": 3.0, "checkpoints": 12.0, "watermark_ms": 800.0}
    registry = CollectorRegistry()
    Meters(registry).job(True, gauges)
    assert registry.get_sample_value("roostream_joiner_watermark_ms") == 800.0
    assert registry.get_sample_value("roostream_joiner_job_restarts") == 3.0


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (None, "the job manager does not know it"),
        ({"state": "FAILED"}, "it is FAILED: boom ← Caused by: the root"),
        ({"state": "CANCELED"}, "it is CANCELED"),
    ],
)
def test_watching_ends_with_a_clear_line_when_the_job_has_ended(
    job: dict[str, str] | None, told: str, flink: tuple[FlinkRest, dict[str, Any]]
) -> None:
    rest, answers = flink
    if job is not None:
        answers[f"/jobs/{JOB}"] = job
    trace = "boom\n\tat x\nCaused by: middle\n\tat y\nCaused by: the root\n\tat z"
    answers[f"/jobs/{JOB}/exceptions?maxExceptions=1"] = {"exceptionHistory": {"entries": [{"stacktrace": trace}]}}
    with pytest.raises(UnavailableError, match=told):
        main.watch(rest, JOB, Meters(CollectorRegistry()), Stop())


def test_a_running_job_is_adopted_and_left_running_on_stop(flink: tuple[FlinkRest, dict[str, Any]], tmp_path: Path) -> None:
    rest, answers = flink
    answers["/jobs/overview"] = {"jobs": [{"jid": JOB, "name": JOB_NAME, "state": "RUNNING"}]}
    stop = Stop()
    stop.set()
    main.run_flink(JoinerConfig(flink=rest.url), Meters(CollectorRegistry()), stop)


def test_an_absent_job_manager_is_waited_for_until_stopped() -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(UnavailableError, match="stopped while waiting for Flink"):
        main.run_flink(JoinerConfig(flink="http://127.0.0.1:9"), Meters(CollectorRegistry()), stop)
