"""The job's graph and settings, built with Flink's Python API."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BUILD = """
from joiner.config import JoinerConfig
from joiner.flink_job import build
build(JoinerConfig(window_ms=1_000))
"""


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
