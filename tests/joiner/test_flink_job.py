"""The job's graph and settings, built with Flink's Python API."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.options import ROOT
from joiner import flink_job
from roostream.errors import UnavailableError
from roostream.runtime.flink_rest import JOB_NAME
from tests.runtime.fake_flink import FakeFlink

SCHEMA = ROOT / "examples" / "shop" / "shop.toml"

BUILD = """
from joiner.config import JoinerConfig
from joiner.flink_job import build
build(JoinerConfig(window_ms=1_000), {})
"""


@pytest.mark.slow
def test_unaligned_checkpoints_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "execution.checkpointing.unaligned.enabled: true\n", encoding="utf-8"
    )
    completed = subprocess.run(
        [sys.executable, "-c", BUILD],
        env={**os.environ, "FLINK_CONF_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    error = completed.stderr.splitlines()[-1]
    assert "execution.checkpointing.unaligned.enabled" in error and "expected false" in error


def test_no_job_is_submitted_if_another_program_did_so_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building the job takes seconds, in which a second joiner finds no job either."""
    submitted: list[str] = []
    job = SimpleNamespace(execute=submitted.append)
    monkeypatch.setattr(flink_job, "wait_for_topics", lambda *arguments: {})
    monkeypatch.setattr(flink_job, "build", lambda config, topics: job)
    monkeypatch.setattr(sys, "argv", ["joiner_job.py", "--settings", f"{tmp_path}/settings.json"])
    with FakeFlink() as flink:
        (tmp_path / "settings.json").write_text(f'{{"flink": "{flink.url}"}}', encoding="utf-8")
        running = {"jid": "a" * 32, "name": JOB_NAME, "state": "INITIALIZING"}
        flink.answers["/jobs/overview"] = {"jobs": [running]}
        with pytest.raises(UnavailableError, match="a" * 32):
            flink_job.main()
        assert submitted == []
        flink.answers["/jobs/overview"] = {"jobs": []}
        flink_job.main()
    assert submitted == [JOB_NAME]


def test_the_program_in_a_job_manager_does_not_wait_for_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job manager that is stopped ends a waiting program first, takes that for a failure of the
    application, cancels the job, and deletes what it would be recovered from."""
    settings = f'bootstrap = "x:1"\nschema = "{SCHEMA}"\nstore = "{tmp_path}"\n'
    (tmp_path / "joiner.toml").write_text(settings, encoding="utf-8")
    submitted: list[str] = []
    monkeypatch.setattr(flink_job, "register", lambda store, schema: None)
    monkeypatch.setattr(flink_job, "wait_for_topics", lambda *arguments: {})
    job = SimpleNamespace(execute_async=submitted.append)
    monkeypatch.setattr(flink_job, "build", lambda config, topics: job)
    monkeypatch.setattr(sys, "argv", ["joiner_job.py", "--config", f"{tmp_path}/joiner.toml"])
    flink_job.application_main()
    assert submitted == [JOB_NAME]
