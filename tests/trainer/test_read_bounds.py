"""A worker reads no further than it is handed out, says when that is trained, and is at the unit's end
then."""

from __future__ import annotations

from typing import Any

import pytest

from roostream.runtime.kafka.topics import nested
from tests.trainer import samples
from tests.trainer.loops import PARTITIONS, build
from tests.trainer.pipelines import pipelined
from tests.trainer.test_worker import Stage
from trainer.config import LoopConfig
from trainer.monitoring.caught_up import ReadPhase
from trainer.read_bounds import ReadBounds
from trainer.worker_monitor import read_phase

EVEN, ODD = PARTITIONS


def epoch(number: int, *ends: int) -> dict[str, Any]:
    return {"number": number, "units": [[f"samples/{p}", 0, end] for p, end in enumerate(ends)]}


def stage(*ends: int, **more: Any) -> Stage:
    stage = Stage(numbers=range(1, 25), **more)
    assert stage.do("restore", manifest="")["ok"]
    assert stage.do("start", epoch=epoch(1, *ends))["ok"]
    return stage


def trained(stage: Stage, turns: int = 8) -> list[int]:
    """Next offsets after so many turns."""
    for _ in range(turns):
        stage.worker.turn()
    return stage.built.offsets()


def test_a_worker_reads_to_the_ends_of_its_units() -> None:
    at = stage(5, 3)
    assert at.worker.report()["epoch_trained"] == 0
    at.worker.turn()
    assert at.worker.report()["epoch_trained"] == 0
    assert trained(at) == [5, 3]
    assert at.worker.report()["epoch_trained"] == 1


def test_a_commit_hands_out_the_next_units() -> None:
    at = stage(5, 3)
    assert trained(at) == [5, 3]
    cut = at.do("cut", seq=1)
    assert cut["offsets"] == nested({EVEN: 5, ODD: 3})
    assert at.do("resume", seq=1)["ok"] and trained(at) == [5, 3], "until it is committed"
    assert at.do("commit", seq=1, epoch=epoch(2, 8, 8))["ok"]
    assert trained(at) == [8, 8] and at.worker.report()["epoch_trained"] == 2


def test_without_phases_there_are_no_bounds() -> None:
    at = Stage(numbers=range(1, 25)).started()
    assert trained(at) == [12, 12] and "epoch_trained" not in at.worker.report()
    assert read_phase(at.worker.read_bounds) is ReadPhase.READ


def test_the_stream_has_no_bounds_and_the_configured_batch_size() -> None:
    at = stage(4, 4)
    assert read_phase(at.worker.read_bounds) is ReadPhase.HISTORY
    trained(at)
    assert read_phase(at.worker.read_bounds) is ReadPhase.WAIT
    assert at.do("restore", manifest="")["ok"]
    assert "epoch_trained" not in at.worker.report()
    assert at.do("start", epoch={"number": 0, "units": []})["ok"]
    assert read_phase(at.worker.read_bounds) is ReadPhase.STREAM
    assert trained(at) == [12, 12]


def test_history_uses_its_own_batch_size() -> None:
    built = build(
        samples.records(list(range(1, 25))),
        batch_requests=2,
        initial_batch_requests=8,
        first_batch_requests=8,
    )
    reach, steps = ReadBounds(built.loop), []
    for told in (epoch(1, 8, 8), {"number": 0, "units": []}):
        reach.begin(told)
        before = built.loop.num_steps
        built.train_all()
        steps.append(built.loop.num_steps - before)
    assert steps == [2, 4], "16 requests in batches of 8, then 8 in batches of 2"
    config = LoopConfig(batch_requests=3)
    assert config.in_phase(initial=True) is config, "nothing else is wanted for history"


def test_a_cut_moves_past_offsets_without_records() -> None:
    at = stage(5, 3)
    trained(at)
    at.worker.read_bounds.extend(epoch(1, 12, 12))
    at.built.reader.append(samples.records(list(range(1, 35)))[24:])
    at.built.reader.trim(EVEN, 15)  # the rest of partition 0 up to there is gone
    assert trained(at, 12) == [5, 12] and at.worker.report()["epoch_trained"] == 1
    assert at.do("cut", seq=1)["offsets"] == nested({EVEN: 12, ODD: 12})


def test_empty_units_count_as_trained() -> None:
    at = stage(0, 0)
    at.worker.turn()
    assert at.worker.report()["epoch_trained"] == 1 and at.built.offsets() == [0, 0]
    at.worker.read_bounds.extend({"number": 3, "units": []})
    assert at.worker.report()["epoch_trained"] == 3, "it has no partition"


@pytest.mark.parametrize(("ends", "exact"), [((12, 12), True), ((10, 3), True), ((0, 7), False)])
def test_reading_ahead_respects_the_bounds(ends: tuple[int, int], exact: bool) -> None:
    records, told = samples.records(list(range(1, 49))), [epoch(1, *ends), epoch(2, 24, 24)]

    def run(built: Any) -> tuple[list[Any], dict[str, bytes]]:
        reach, found = ReadBounds(built.loop), []
        reach.begin(told[0])
        for then in (told[1], None):
            while not reach.is_trained:
                built.loop.step()
            found.append(
                (built.loop.num_steps, built.offsets(), [built.loop.partitions.in_turn(n) for n in range(2)])
            )
            if then:
                reach.extend(then)
        built.loop.feed.drain()
        return found, built.shard.bits()

    serial = run(build(records, exact=exact))
    with pipelined(records, exact=exact) as piped:
        assert run(piped.built) == serial
    assert [offsets for _, offsets, _ in serial[0]] == [[*ends], [24, 24]]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("told", [None, epoch(1, 12, 12)])
def test_a_cut_does_not_wait_for_records(told: dict[str, Any] | None) -> None:
    """Reading ahead waits for more, in the source's thread, which is asked nothing then."""
    with pipelined(samples.records(list(range(1, 25)))) as piped:
        reach, loop = ReadBounds(piped.built.loop), piped.built.loop
        reach.begin(told)
        while piped.built.offsets() != [12, 12]:
            loop.step()
        assert not loop.step()
        reach.prepare_cut()
        loop.feed.drain()
        assert piped.built.offsets() == [12, 12] and not loop.step()
