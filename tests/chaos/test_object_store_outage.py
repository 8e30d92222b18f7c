"""A running stack with its checkpoint store in a bucket. The bucket answers 503 for a while, or the disks of
all shards are lost. Commits wait or rows are fetched, and nothing is lost.

OUTAGE_S=600 sets the length of the outage in seconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.options import demo
from infra.stack import Stack
from roostream.runtime.store_identity import init_store
from tests.chaos.object_store import FaultyStore, object_store, store_of, with_store
from tests.chaos.stack_faults import control_status
from tests.e2e.loop_stack import applied, check_nothing_lost_or_twice, quick_options, wait_until

OUTAGE_S = float(os.environ.get("OUTAGE_S", "30"))

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900 + OUTAGE_S)]


@contextlib.contextmanager
def committing_stack(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stack, FaultyStore]]:
    """A stack that has committed samples to a bucket. After the block, checks that nothing is lost and that
    all programs run."""
    with object_store(monkeypatch) as faulty:
        init_store(store := store_of(folder))
        options = with_store(demo(overrides=quick_options().overrides, num_archivers=0), store)
        with Stack(folder, options) as stack:
            stack.start(["all", "simulate"])
            stack.wait_ready("serving", timeout_s=240)
            wait_until("a commit with trained samples", lambda: applied(stack) > 50, 240)
            yield stack, faulty
            check_nothing_lost_or_twice(stack, within_s=240)
            assert stack.failed() == []


def wait_for_more_commits(stack: Stack, before: int) -> None:
    wait_until(
        "50 more committed samples",
        lambda: applied(stack) >= before + 50,
        240,
        lambda: (applied(stack), control_status(stack)),
    )


def test_commits_wait_for_an_object_store_that_answers_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"OUTAGE_S={OUTAGE_S:g}")
    with committing_stack(tmp_path, monkeypatch) as (stack, faulty):
        before = applied(stack)
        faulty.is_unavailable = True
        try:
            wait_until(
                "the controller reports that the store is unavailable",
                lambda: control_status(stack).get("away"),
                120,
                lambda: control_status(stack),
            )
            time.sleep(OUTAGE_S)
            during = control_status(stack)
        finally:
            faulty.is_unavailable = False
        assert faulty.num_refused and during["away"] and during["rollbacks"] == 0, during
        wait_for_more_commits(stack, before)


def test_programs_killed_during_an_outage_of_the_object_store_recover_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OUTAGE_S=180 is longer than the time for which the supervisor restarts a program that ends at once."""
    print(f"OUTAGE_S={OUTAGE_S:g}")
    with committing_stack(tmp_path, monkeypatch) as (stack, faulty):
        before = applied(stack)
        faulty.is_unavailable = True
        try:
            for name in ("shard-0", "controller", "worker", "serving", "joiner", "flink-jm"):
                stack.kill(name)
            time.sleep(OUTAGE_S)
        finally:
            faulty.is_unavailable = False
        assert faulty.num_refused
        assert stack.failed() == []
        wait_for_more_commits(stack, before)


def test_rows_come_back_from_the_store_after_the_disks_of_all_shards_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with committing_stack(tmp_path, monkeypatch) as (stack, _):
        before = applied(stack)
        shards = [name for name in stack.supervisor.slots if name.startswith("shard")]
        for name in shards:
            stack.kill(name)
            shutil.rmtree(stack.home.root / name)
        wait_for_more_commits(stack, before)
        logs = "".join(path.read_text() for path in stack.home.root.rglob("shard*.log"))
        assert logs.count("from the checkpoint store") >= len(shards), logs[-2000:]
