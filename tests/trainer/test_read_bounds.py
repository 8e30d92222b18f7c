"""In the initial phase a worker reads only the work units that the controller assigns to it. It reports when
all of them are trained."""

from __future__ import annotations

from typing import Any

import pytest

from roostream.runtime.kafka.topics import nested
from tests.trainer import samples
from tests.trainer.loops import PARTITIONS, build
from tests.trainer.pipelines import pipelined
from tests.trainer.test_worker import WorkerHarness
from trainer.config import LoopConfig
from trainer.monitoring.caught_up import ReadPhase
from trainer.read_bounds import ReadBounds
from trainer.worker_monitor import read_phase

EVEN, ODD = PARTITIONS


def epoch(number: int, *ends: int) -> dict[str, Any]:
    return {"number": number, "units": [[f"samples/{p}", 0, end] for p, end in enumerate(ends)]}


def started_harness(*ends: int, **more: Any) -> WorkerHarness:
    harness = WorkerHarness(numbers=range(1, 25), **more)
    assert harness.do("restore", manifest="")["ok"]
    assert harness.do("start", epoch=epoch(1, *ends))["ok"]
    return harness


def trained(harness: WorkerHarness, turns: int = 8) -> list[int]:
    """Run some turns, and return the next offsets to train."""
    for _ in range(turns):
        harness.worker.turn()
    return harness.built.offsets()


def test_a_worker_reads_to_the_ends_of_its_units() -> None:
    harness = started_harness(5, 3)
    assert harness.worker.report()["epoch_trained"] == 0
    harness.worker.turn()
    assert harness.worker.report()["epoch_trained"] == 0
    assert trained(harness) == [5, 3]
    assert harness.worker.report()["epoch_trained"] == 1


def test_a_commit_hands_out_the_next_units() -> None:
    harness = started_harness(5, 3)
    assert trained(harness) == [5, 3]
    cut = harness.do("cut", seq=1)
    assert cut["offsets"] == nested({EVEN: 5, ODD: 3})
    assert harness.do("resume", seq=1)["ok"] and trained(harness) == [5, 3], "the next units come with COMMIT"
    assert harness.do("commit", seq=1, epoch=epoch(2, 8, 8))["ok"]
    assert trained(harness) == [8, 8] and harness.worker.report()["epoch_trained"] == 2


def test_without_phases_there_are_no_bounds() -> None:
    harness = WorkerHarness(numbers=range(1, 25)).started()
    assert trained(harness) == [12, 12] and "epoch_trained" not in harness.worker.report()
    assert read_phase(harness.worker.read_bounds) is ReadPhase.READ


def test_the_stream_has_no_bounds_and_the_configured_batch_size() -> None:
    harness = started_harness(4, 4)
    assert read_phase(harness.worker.read_bounds) is ReadPhase.HISTORY
    trained(harness)
    assert read_phase(harness.worker.read_bounds) is ReadPhase.WAIT
    assert harness.do("restore", manifest="")["ok"]
    assert "epoch_trained" not in harness.worker.report()
    assert harness.do("start", epoch={"number": 0, "units": []})["ok"]
    assert read_phase(harness.worker.read_bounds) is ReadPhase.STREAM
    assert trained(harness) == [12, 12]


def test_history_uses_its_own_batch_size() -> None:
    built = build(
        samples.records(list(range(1, 25))),
        batch_requests=2,
        initial_batch_requests=8,
        first_batch_requests=8,
    )
    bounds, steps = ReadBounds(built.loop), []
    for first in (epoch(1, 8, 8), {"number": 0, "units": []}):
        bounds.begin(first)
        before = built.loop.num_steps
        built.train_all()
        steps.append(built.loop.num_steps - before)
    assert steps == [2, 4], "16 requests in batches of 8, then 8 in batches of 2"
    config = LoopConfig(batch_requests=3)
    assert config.in_phase(initial=True) is config, "no setting differs for history"


def test_a_cut_moves_past_offsets_without_records() -> None:
    harness = started_harness(5, 3)
    trained(harness)
    harness.worker.read_bounds.extend(epoch(1, 12, 12))
    harness.built.reader.append(samples.records(list(range(1, 35)))[24:])
    harness.built.reader.trim(EVEN, 15)  # retention deletes the records of partition 0 below offset 15
    assert trained(harness, 12) == [5, 12] and harness.worker.report()["epoch_trained"] == 1
    assert harness.do("cut", seq=1)["offsets"] == nested({EVEN: 12, ODD: 12})


def test_empty_units_count_as_trained() -> None:
    harness = started_harness(0, 0)
    harness.worker.turn()
    assert harness.worker.report()["epoch_trained"] == 1 and harness.built.offsets() == [0, 0]
    harness.worker.read_bounds.extend({"number": 3, "units": []})
    assert harness.worker.report()["epoch_trained"] == 3, "an epoch without units is trained at once"


@pytest.mark.parametrize(("ends", "exact"), [((12, 12), True), ((10, 3), True), ((0, 7), False)])
def test_reading_ahead_respects_the_bounds(ends: tuple[int, int], exact: bool) -> None:
    records, epochs = samples.records(list(range(1, 49))), [epoch(1, *ends), epoch(2, 24, 24)]

    def run(built: Any) -> tuple[list[Any], dict[str, bytes]]:
        bounds, found = ReadBounds(built.loop), []
        bounds.begin(epochs[0])
        for following in (epochs[1], None):
            while not bounds.is_trained:
                built.loop.step()
            found.append(
                (built.loop.num_steps, built.offsets(), [built.loop.partitions.in_turn(n) for n in range(2)])
            )
            if following:
                bounds.extend(following)
        built.loop.feed.drain()
        return found, built.shard.bits()

    serial = run(build(records, exact=exact))
    with pipelined(records, exact=exact) as pipeline:
        assert run(pipeline.built) == serial
    assert [offsets for _, offsets, _ in serial[0]] == [[*ends], [24, 24]]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("first", [None, epoch(1, 12, 12)])
def test_a_cut_does_not_wait_for_records(first: dict[str, Any] | None) -> None:
    """The source's thread waits for further records meanwhile. A cut must not call into it."""
    with pipelined(samples.records(list(range(1, 25)))) as pipeline:
        bounds, loop = ReadBounds(pipeline.built.loop), pipeline.built.loop
        bounds.begin(first)
        while pipeline.built.offsets() != [12, 12]:
            loop.step()
        assert not loop.step()
        bounds.prepare_cut()
        loop.feed.drain()
        assert pipeline.built.offsets() == [12, 12] and not loop.step()
