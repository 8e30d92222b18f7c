"""Two stacks on one machine share no ports, topics or files."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.stack import Stack
from tests.e2e.loop_stack import applied, check_nothing_lost_or_twice, quick_options, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_stacks_run_side_by_side(tmp_path: Path) -> None:
    with Stack(tmp_path / "a", quick_options()) as a, Stack(tmp_path / "b", quick_options()) as b:
        for stack in (a, b):
            stack.start(["all", "simulate"])
        for stack in (a, b):
            wait_until("a commit with trained samples", lambda stack=stack: applied(stack) > 50, 240)
        for stack in (a, b):
            check_nothing_lost_or_twice(stack)
        assert not {*a.endpoints.shards, a.endpoints.kafka} & {*b.endpoints.shards, b.endpoints.kafka}
