"""Readings of a stack after kills of its broker: unknown while Kafka is down, and good again soon after."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from infra.stack import Stack
from tests.chaos.readings import auc, bad_readings, monitor_of, status_of
from tests.e2e.loop_stack import applied, quick_options, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

_RECOVERY_S = 30.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = dataclasses.replace(quick_options(), num_workers=2)
    with Stack(tmp_path_factory.mktemp("broker"), options) as running:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=240)
        wait_until("a commit with trained samples", lambda: applied(running) > 50, 240)
        yield running


def test_every_reading_is_good_again_within_30_s_of_every_restart_of_the_broker(stack: Stack) -> None:
    monitor, num_trained = monitor_of(stack), 0

    def bad() -> list[str]:
        return bad_readings(stack, monitor)

    try:
        for _ in range(3):
            wait_until("good readings before the kill", lambda: not bad(), 120, bad)
            stack.kill("kafka")
            stack.wait_ready("kafka", timeout_s=180)
            wait_until("good readings", lambda: not bad(), _RECOVERY_S, bad)
            now = status_of(stack, monitor)["trainer"]["trained"]
            assert now >= num_trained, "a restart may not lose committed training"
            num_trained = now
        wait_until("the AUC of both workers", lambda: auc(stack, monitor) is not None, 60)
    finally:
        monitor.close()
