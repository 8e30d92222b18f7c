"""Requests close early, and later labels become corrections. Two workers train samples and corrections
exactly once in spite of kills."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from infra.stack import Stack
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.kafka.topics import CORRECTIONS
from roostream.schema.ids import signed
from roostream.wire import records as wire
from tests.e2e.loop_stack import (
    applied,
    auditor,
    check_nothing_lost_or_twice,
    kill_and_resume,
    newest,
    quick_options,
    wait_until,
)
from tests.joiner.joined_topics import consume
from trainer.dedupe import merged
from trainer.partitions import read_partitions

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    quick = quick_options()
    joiner = {**quick.overrides["joiner"], "early_close_ms": 500, "window_ms": 8_000}
    overrides = {**quick.overrides, "joiner": joiner, "worker": {"corrections": "on"}}
    with Stack(
        tmp_path_factory.mktemp("late"), dataclasses.replace(quick, overrides=overrides, num_workers=2)
    ) as running:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=120)
        wait_until(
            "a commit with trained corrections",
            lambda: applied(running) > 50 and trained_corrections(running),
            240,
        )
        yield running


def trained_corrections(stack: Stack) -> list[int]:
    """Ids of the corrections in the committed parameters. An id that several partitions contain is listed
    once for each."""
    manifest, store = newest(stack), FileStore(stack.home.store)
    assert manifest is not None
    found: list[int] = []
    for part in manifest.workers.values():
        for (topic, _), cut in read_partitions(store, part).items():
            if topic == CORRECTIONS:
                found += merged(cut.dedupe.runs).id_N.tolist() if cut.dedupe.runs else []
    return found


def emitted_corrections(stack: Stack) -> set[int]:
    """Ids of the trainable corrections in the topic, without duplicates."""
    values = [m.value() for m in consume(stack.endpoints.kafka, stack.prefix, CORRECTIONS)]
    return {signed(m.sample_id) for _, m in map(wire.decode, values) if not m.untrainable}  # type: ignore[attr-defined]


@pytest.mark.parametrize("victim", ["worker-1", "worker", "shard-0", "flink-tm-0", "controller"])
def test_g3_training_on_corrections_continues_after_a_kill(stack: Stack, victim: str) -> None:
    before = len(trained_corrections(stack))
    assert kill_and_resume(stack, victim, timeout_s=240) >= 50
    wait_until("more corrections", lambda: len(trained_corrections(stack)) > before, 120)


def test_g1_g2_every_sample_and_every_correction_is_trained_once(stack: Stack) -> None:
    check_nothing_lost_or_twice(stack)
    audit = auditor(stack)
    try:
        audit.poll(5.0)
        assert audit.sums(ended=True).corrections > 100, "most labels must arrive after the early close"
    finally:
        audit.close()
    wait_until("all corrections", lambda: set(trained_corrections(stack)) >= emitted_corrections(stack), 60)
    ids = trained_corrections(stack)
    assert len(ids) == len(set(ids)) and set(ids) == emitted_corrections(stack)
