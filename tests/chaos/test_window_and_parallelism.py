"""A joiner with more parallel tasks than partitions joins everything, also after a restart from a savepoint
with half the window."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from infra.options import StackOptions
from infra.stack import Stack
from roostream.runtime.flink_rest import FlinkRest
from tests.e2e.loop_stack import applied, check_nothing_lost_or_twice, quick_options, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

WINDOW_MS = 8_000


def with_window(options: StackOptions, window_ms: int) -> StackOptions:
    overrides: dict[str, Mapping[str, Any]] = dict(options.overrides)
    overrides["joiner"] = {**overrides["joiner"], "window_ms": window_ms}
    return dataclasses.replace(options, overrides=overrides)


def test_more_tasks_than_partitions_join_everything_and_a_halved_window_continues_the_state(
    tmp_path: Path,
) -> None:
    options = dataclasses.replace(quick_options(), partitions=2, num_task_managers=3)
    with Stack(tmp_path, with_window(options, WINDOW_MS)) as stack:
        stack.start(["all", "simulate"])
        stack.wait_ready("serving", timeout_s=300)
        wait_until("a commit with trained samples", lambda: applied(stack) > 50, 300)
        report = stack.stop()
        assert "savepoint" not in report.failed_steps, report

    with Stack(tmp_path, with_window(options, WINDOW_MS // 2)) as stack:
        stack.start(["all", "simulate"])
        stack.wait_ready("serving", timeout_s=300)
        stack.wait_ready("joiner", timeout_s=300)
        flink = FlinkRest(stack.endpoints.flink)
        job = flink.live_job()
        assert job is not None
        checkpoints = flink.get(f"/jobs/{job['jid']}/checkpoints")
        assert checkpoints is not None
        restored = checkpoints["latest"]["restored"]
        assert "/flink/savepoints/" in restored["external_path"], (
            "the job must be restored from the savepoint; Flink also calls a given checkpoint a savepoint"
        )
        before = applied(stack)
        wait_until("50 more trained samples", lambda: applied(stack) >= before + 50, 300)
        check_nothing_lost_or_twice(stack, within_s=300)
