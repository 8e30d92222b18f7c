"""A stack with several workers: kills during commits, and changes of the number of workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from infra.stack import Stack
from roostream.runtime.rpc.client import SocketTransport
from tests.e2e.loop_stack import (
    applied,
    check_nothing_lost_or_twice,
    kill_and_resume,
    newest,
    quick_options,
    wait_until,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

COMMITTING = ("cutting", "freezing", "writing", "linking", "committing")


def call_controller(stack: Stack, method: str, **fields: Any) -> dict[str, Any]:
    transport = SocketTransport(stack.endpoints.controller)
    try:
        return transport.call(method, fields, timeout_s=90.0)[0]
    finally:
        transport.close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = dataclasses.replace(quick_options(), num_workers=2)
    with Stack(tmp_path_factory.mktemp("workers"), options) as running:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=120)
        wait_until("a commit with trained samples", lambda: applied(running) > 50, 240)
        yield running


@pytest.mark.parametrize("victim", ["worker", "worker-1", "shard-0", "controller", "kafka"])
def test_g3_several_workers_continue_after_a_kill_during_a_commit(stack: Stack, victim: str) -> None:
    wait_until("a commit under way", lambda: call_controller(stack, "status")["state"] in COMMITTING, 60)
    assert kill_and_resume(stack, victim, timeout_s=240) >= 50


def test_the_requested_number_of_workers_trains(stack: Stack) -> None:
    for count in (1, 3, 2):
        assert call_controller(stack, "scale", workers=count, timeout_s=80.0)["running"]
        before = applied(stack)
        wait_until(
            f"50 more samples by {count} workers", lambda before=before: applied(stack) >= before + 50, 120
        )
        manifest = newest(stack)
        assert manifest is not None and len(manifest.workers) == count
        assert {p for part in manifest.workers.values() for p in part.offsets} == manifest.offsets.keys()


def test_g1_g2_several_workers_lose_nothing_and_train_nothing_twice(stack: Stack) -> None:
    check_nothing_lost_or_twice(stack)
