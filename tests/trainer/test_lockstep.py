"""Several workers in lock-step train as one: what they sum, when they train, and when they take a snapshot
for a commit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import trainer.loop
from roostream.errors import UnavailableError
from roostream.models.inputs import Inputs, build_inputs
from roostream.runtime.clock import FakeClock
from tests.trainer import samples
from tests.trainer.fake_shard import FakeShard, Row
from tests.trainer.fleets import Fleet, Float64Rows, fake_shard, shared_rows, start_incarnation
from trainer.lockstep import TurnPlan, TurnReport, decode_report, plan_turn

N48 = samples.records(list(range(1, 49)))
REPORT = TurnReport(
    turn=7,
    cut=0,
    digest=0,
    leaving=False,
    ready=True,
    spare=False,
    epoch=0,
    weighted=True,
    requests=9,
    weight_T=(1.5, 0.1),
    times_ms=(1_700_000_000_001,),
)


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use float64 for models and their inputs."""

    def build(*args: Any, **kwargs: Any) -> Inputs:
        inputs = build_inputs(*args, **kwargs)
        return dataclasses.replace(
            inputs, ro_float_RG=inputs.ro_float_RG.double(), nro_float_BG=inputs.nro_float_BG.double()
        )

    monkeypatch.setattr(trainer.loop, "build_inputs", build)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def float64_fleet(workers: int, **settings: Any) -> tuple[Fleet, Float64Rows]:
    rows = Float64Rows(FakeClock(samples.T0))
    records = samples.records(list(range(1, 49)), num_partitions=4)
    return Fleet(
        records, workers, lambda worker: rows, num_partitions=4, batch_requests=16 // workers, **settings
    ), rows


@pytest.mark.usefixtures("in_float64")
def test_several_workers_equal_one_worker_with_the_combined_batch() -> None:
    (one, single_rows), (several, shared_float64_rows) = float64_fleet(1), float64_fleet(4)
    one.built[0].train_all()
    several.run()
    assert one.built[0].loop.num_steps == several.built[0].loop.num_steps == 3
    (expected,) = one.weights()
    for weights in several.weights():
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
        assert (
            weights["scorer.0.weight" if "scorer.0.weight" in weights else next(iter(weights))].dtype
            == torch.float64
        )
    assert shared_float64_rows.values.keys() == single_rows.values.keys()
    torch.testing.assert_close(shared_float64_rows.values, single_rows.values, rtol=0, atol=1e-6)
    assert several.predicted == one.predicted == list(range(1, 49))


@pytest.mark.usefixtures("in_float64")
def test_the_loss_is_divided_by_the_total_weight_of_all_workers() -> None:
    """The workers have different numbers of requests. An average of the workers' averages would give the
    requests of the smaller part a larger weight."""
    uneven = samples.records([1, 3, 5, 7, 9, 11, 2, 4])
    rows = [Float64Rows(FakeClock(samples.T0)) for _ in range(2)]
    one = Fleet(uneven, 1, lambda worker: rows[0], batch_requests=8)
    one.built[0].train_all()
    two = Fleet(uneven, 2, lambda worker: rows[1], batch_requests=6, max_batch_wait_ms=0).run()
    assert one.built[0].loop.num_steps == two.built[0].loop.num_steps == 1
    torch.testing.assert_close(two.weights()[1], one.weights()[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(rows[1].values, rows[0].values, rtol=0, atol=1e-6)


def test_a_worker_without_data_gets_the_same_weights() -> None:
    odd = samples.records([n for n in range(1, 25) if n % 2])
    shard = fake_shard()
    fleet = Fleet(odd, 2, shared_rows(shard)).run()
    assert not fleet.built[0].predicted and len(fleet.built[1].predicted) == 12
    assert fleet.built[0].loop.num_steps == fleet.built[1].loop.num_steps == 3
    first, second = fleet.weights()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {row.pushes for (table, _), row in shard.rows.items() if table == USER} == {1}
    assert fleet.built[0].loop.watermark_ms == fleet.built[1].loop.watermark_ms == samples.T0 + 23_500, (
        "both workers must have the same watermark"
    )


USER = samples.schema().table_by_name["user"].id


def test_idle_workers_exchange_only_reports_and_train_when_data_arrives() -> None:
    fleet = Fleet(N48[:3], 2, shared_rows(fake_shard()), max_batch_wait_ms=500)
    for _ in range(10):
        fleet.round()
    assert fleet.num_trained == 0 and fleet.reduction_hub.num_sums > 4
    for built in fleet.built:
        built.clock.advance(1)
    fleet.run()
    assert fleet.predicted == [1, 2, 3]


def poison(shard: FakeShard, *users: int) -> None:
    for user in users:
        shard.rows[USER, user] = Row(np.full(2, math.nan, np.float32), np.ones(2, np.float32), 0)


def test_a_non_finite_request_is_quarantined_on_any_worker() -> None:
    shard = fake_shard()
    poison(shard, 3, 8, 9)
    fleet = Fleet(samples.records(list(range(1, 13))), 2, shared_rows(shard), batch_requests=6).run()
    others = [n for n in range(1, 13) if n not in (3, 8, 9)]
    assert fleet.predicted == others
    pushed = {id_: row.pushes for (table, id_), row in shard.rows.items() if table == USER and row.pushes}
    assert pushed == dict.fromkeys(others, 1)
    assert [sorted(x.offset for x in built.letters) for built in fleet.built] == [[3], [1, 4]]
    first, second = fleet.weights()
    assert all(
        torch.equal(first[name], second[name]) and bool(first[name].isfinite().all()) for name in first
    )


def test_a_gradient_that_could_overflow_the_sum_is_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(samples.records(list(range(1, 9))), 2, shared_rows(fake_shard()))
    model = fleet.built[1].loop.model
    loss = model.loss
    monkeypatch.setattr(
        model,
        "loss",
        lambda inputs, *rest: loss(inputs, *rest) * (1e19 if len(inputs.ro_float_RG) > 1 else 1.0),
    )
    fleet.run()
    assert fleet.predicted == list(range(1, 9)) and not fleet.built[1].letters, (
        "each request alone has a finite gradient"
    )


def test_a_cut_follows_the_turn_in_which_all_workers_want_it() -> None:
    fleet = Fleet(N48, 2, shared_rows(fake_shard()), batch_requests=2)
    for _ in range(6):
        fleet.round()
    fleet.requested_cuts[0] = 1
    before = fleet.num_trained
    for _ in range(8):
        fleet.round()
    assert fleet.cuts == [None, None] and fleet.num_trained > before, (
        "training continues until every worker wants a cut"
    )
    fleet.requested_cuts[1] = 2
    for _ in range(4):
        fleet.round()
    assert fleet.cuts == [None, None], "the workers want cuts of different commits"
    at = fleet.cut(2)
    assert sum(at.progress.values()) == 4 * at.step, (
        "both workers must have trained the same number of whole chunks"
    )
    fleet.requested_cuts, fleet.cuts = [0, 0], [None, None]
    fleet.run()
    assert fleet.predicted == list(range(1, 49)), (
        "a chunk that was announced before the cut must be trained after it"
    )


def test_no_worker_begins_a_chunk_while_one_is_leaving() -> None:
    fleet = Fleet(N48, 2, shared_rows(fake_shard()), batch_requests=2)
    for _ in range(8):
        fleet.round()
    original_turn = fleet.steps[1].turn
    fleet.steps[1].turn = lambda *, cut=0, leaving=False: original_turn(cut=cut, leaving=True)  # type: ignore[method-assign]
    for _ in range(12):
        fleet.round()
    before = fleet.num_trained
    for _ in range(6):
        fleet.round()
    assert fleet.num_trained == before < 12 and fleet.cut().progress == fleet.progress


RAMP = {"first_batch_requests": 1, "batch_growth_requests": 6, "batch_requests": 4}


@pytest.mark.parametrize("turns", [3, 6, 15])
def test_g11_restored_workers_continue_with_the_same_batches_and_bits(turns: int) -> None:
    shards = fake_shard(), fake_shard()
    undisturbed = Fleet(N48, 2, shared_rows(shards[0]), exact=True, **RAMP)
    first = Fleet(N48, 2, shared_rows(shards[1]), exact=True, **RAMP)
    for _ in range(turns):
        first.round()
    snapshot = first.cut()
    start_incarnation(shards[1], 2)
    restored = Fleet(N48, 2, shared_rows(shards[1]), exact=True, at=snapshot, incarnation=2, **RAMP)
    for _ in range(300):
        undisturbed.round()
        restored.round(*((1, 0, 1) if turns % 2 else (0, 0, 1)))
    assert restored.built[0].loop.num_steps == undisturbed.built[0].loop.num_steps > snapshot.step > 0
    found, expected = restored.built[1].loop.snapshot(), undisturbed.built[1].loop.snapshot()
    assert {k: v.tobytes() for k, v in found.shared.items()} == {
        k: v.tobytes() for k, v in expected.shared.items()
    }
    assert shards[0].bits() == shards[1].bits()


def test_batches_grow_with_the_requests_of_all_workers() -> None:
    fleet = Fleet(N48, 2, shared_rows(fake_shard()), exact=True, **RAMP)
    for _ in range(200):
        fleet.round()
    steps = [p.step for p in fleet.built[0].predicted]
    sizes = [steps.count(step) for step in sorted(set(steps))]
    assert sizes == [1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4], (
        "a worker's batch grows by one for every six requests that it trains"
    )


def test_a_turn_report_round_trips() -> None:
    assert decode_report(REPORT.encode(), 2) == REPORT
    late = REPORT._replace(times_ms=tuple(range(40)), cut=3, digest=(1 << 52) - 1)
    assert decode_report(late.encode(), 2) == late._replace(times_ms=tuple(range(25, 40)))
    assert len(late.encode()) == len(REPORT.encode())
    assert decode_report(REPORT._replace(times_ms=(1 << 62,)).encode(), 2).times_ms == (1 << 52,)


def test_the_turn_plan_follows_from_all_reports() -> None:
    idle = REPORT._replace(ready=False, weighted=False, weight_T=(0.0, 0.0))
    one = plan_turn([REPORT, idle], TurnPlan(), exact=False)
    assert (one.trains, one.weighted, one.total_T, one.requests, one.cut) == (True, True, (1.5, 0.1), 18, 0)
    assert not plan_turn([idle, idle], TurnPlan(), exact=False).trains
    waits = plan_turn([REPORT, idle], TurnPlan(requests=4), exact=True)
    assert (waits.trains, waits.weighted, waits.requests) == (False, False, 4), (
        "in exact mode, batch sizes must not depend on the workers' speed"
    )
    finished = idle._replace(spare=True, epoch=3)
    assert plan_turn([REPORT._replace(epoch=3), finished], TurnPlan(requests=4), exact=True).trains
    assert not plan_turn([REPORT._replace(epoch=4), finished], TurnPlan(requests=4), exact=True).trains, (
        "the worker that finished epoch 3 may have work in epoch 4"
    )
    assert plan_turn([REPORT, REPORT._replace(weighted=False)], TurnPlan(requests=4), exact=True)[:3] == (
        True,
        True,
        (3.0, 0.2),
    )
    assert plan_turn([REPORT._replace(cut=5), REPORT._replace(cut=5)], TurnPlan(), exact=False).cut == 5
    assert plan_turn([REPORT._replace(cut=5), REPORT], TurnPlan(), exact=False).cut == 0
    assert plan_turn([REPORT, REPORT._replace(leaving=True)], TurnPlan(), exact=False).leaving


def test_diverged_workers_are_an_error() -> None:
    with pytest.raises(UnavailableError, match="turn"):
        plan_turn([REPORT, REPORT._replace(turn=8)], TurnPlan(), exact=False)
    with pytest.raises(UnavailableError, match="dense weights"):
        plan_turn(
            [REPORT._replace(cut=5, digest=1), REPORT._replace(cut=5, digest=2)], TurnPlan(), exact=False
        )
    fleet = Fleet(N48, 2, shared_rows(fake_shard()))
    for _ in range(6):
        fleet.round()
    with torch.no_grad():
        next(iter(fleet.built[1].loop.model.parameters())).add_(1e-3)
    with pytest.raises(UnavailableError, match="dense weights"):
        fleet.cut()


def test_all_workers_pull_once_in_a_training_turn() -> None:
    """With TorchRec, a pull is a collective call of all workers, and so is a push."""
    shard, pulls = fake_shard(), [0, 0]
    rows_of_worker = shared_rows(shard)

    def counted_rows(worker: int) -> Any:
        rows = rows_of_worker(worker)
        pull = rows.pull

        def counted_pull(lookup: Any) -> Any:
            pulls[worker] += 1
            return pull(lookup)

        rows.pull = counted_pull  # type: ignore[method-assign]
        return rows

    fleet = Fleet(samples.records(list(range(2, 41, 2))), 2, counted_rows).run()
    assert fleet.num_trained == pulls[0] == pulls[1] > 2
    assert [bool(built.predicted) for built in fleet.built] == [True, False]
