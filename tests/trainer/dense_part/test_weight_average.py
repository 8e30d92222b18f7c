"""Predictions use an exponential average of the weights over the last steps. Training does not depend on
it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from roostream.models.inputs import build_inputs
from roostream.wire.decode import Decoder
from roostream.wire.lookup import build_lookup
from tests.trainer import samples
from tests.trainer.fake_shard import FakeShard
from tests.trainer.fleets import Fleet, fake_shard, shared_rows
from tests.trainer.loops import Built, build
from trainer.dense_part.adam import DenseAdam, WeightAverage
from trainer.loop import Snapshot

N24 = samples.records(list(range(1, 25)))


def train_one_weight(steps: int, average: int) -> tuple[list[float], float]:
    """Train one weight; return its value after each step and its average after the last step."""
    weight = nn.Parameter(torch.tensor([4.0]))
    scoring = nn.ParameterDict({"w": nn.Parameter(torch.tensor([4.0]))})
    optimizer = DenseAdam([("w", weight)], learning_rate=0.5)
    optimizer.average = WeightAverage(scoring, average)  # type: ignore[arg-type]
    weights_seen = []
    for _ in range(steps):
        weight.grad = weight.detach().clone()
        assert optimizer.step()
        weights_seen.append(weight.item())
    return weights_seen, scoring["w"].item()


@pytest.mark.parametrize(("steps", "average"), [(1, 100), (2, 100), (40, 10), (60, 3), (5, 1)])
def test_the_average_is_exponential_with_a_growing_window(steps: int, average: int) -> None:
    weights_seen, got = train_one_weight(steps, average)
    expected = 4.0
    for t, weight in enumerate(weights_seen, 1):
        kept = min(1 - 1 / average, t / (t + 9))
        expected = kept * expected + (1 - kept) * weight
    assert got == pytest.approx(expected, abs=1e-6)


def weights(model: nn.Module) -> dict[str, np.ndarray]:
    return {k: v.detach().numpy().copy() for k, v in model.state_dict().items()}


def equal_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() for k in a)


def rows(shard: FakeShard) -> dict[tuple[int, int], bytes]:
    return {key: row.value_D.tobytes() for key, row in shard.rows.items()}


def test_averaging_does_not_change_training() -> None:
    without, averaged = (build(N24, average_steps=steps).train_all() for steps in (0, 50))
    assert equal_bits(weights(without.loop.model), weights(averaged.loop.model))
    assert rows(without.shard) == rows(averaged.shard)
    assert without.loop.dense_trainer.scorer is without.loop.model
    assert not equal_bits(weights(averaged.loop.dense_trainer.scorer), weights(averaged.loop.model))


def scores_of(built: Built, model: nn.Module, records: list[Any]) -> list[float]:
    batch, _ = Decoder(samples.schema(), {}.get).decode(records)
    lookup = build_lookup(batch)
    with torch.no_grad():
        score_BT = torch.sigmoid(model(build_inputs(batch, lookup, built.loop.rows.pull(lookup))))
    return [float(x) for x in score_BT.ravel()]


def test_predictions_use_the_average_before_the_step() -> None:
    built = build(N24[:8])
    assert built.loop.step()
    expected = scores_of(built, built.loop.dense_trainer.scorer, N24[4:8])
    assert expected != scores_of(built, built.loop.model, N24[4:8])
    batch, _ = Decoder(samples.schema(), {}.get).decode(N24[4:8])
    assert built.loop.scores(batch).ravel().tolist() == expected
    assert built.loop.step()
    assert [s for p in built.predicted[4:] for s in p.scores] == expected


def restored_from(at: Snapshot, **settings: Any) -> Built:
    built = build(N24, **settings)
    built.loop.restore(at)
    return built


def test_g11_a_restored_average_continues_bit_for_bit() -> None:
    uninterrupted = build(N24).train_all()
    interrupted = build(N24[:12]).train_all()
    at = interrupted.loop.snapshot()
    restored = build(N24)
    restored.shard.rows = {key: row.copy() for key, row in interrupted.shard.rows.items()}
    restored.loop.restore(at)
    assert equal_bits(
        weights(restored.loop.dense_trainer.scorer), weights(interrupted.loop.dense_trainer.scorer)
    )
    restored.train_all()
    assert equal_bits(restored.loop.snapshot().shared, uninterrupted.loop.snapshot().shared)


def test_the_checkpoint_has_the_scoring_and_the_trained_weights() -> None:
    loop = build(N24).train_all().loop
    shared = loop.snapshot().shared
    for prefix, model in (("model.", loop.dense_trainer.scorer), ("trained.", loop.model)):
        assert equal_bits(
            {k.removeprefix(prefix): v for k, v in shared.items() if k.startswith(prefix)}, weights(model)
        )


def test_an_average_that_a_checkpoint_lacks_starts_at_the_weights() -> None:
    at = build(N24, average_steps=0).train_all().loop.snapshot()
    assert not any(name.startswith("trained.") for name in at.shared)
    loop = restored_from(at).loop
    expected = {k.removeprefix("model."): v for k, v in at.shared.items() if k.startswith("model.")}
    assert equal_bits(weights(loop.model), expected) and equal_bits(
        weights(loop.dense_trainer.scorer), expected
    )


def test_without_averaging_a_restore_uses_the_trained_weights() -> None:
    before = build(N24).train_all()
    loop = restored_from(before.loop.snapshot(), average_steps=0).loop
    assert equal_bits(weights(loop.model), weights(before.loop.model))
    assert not any(name.startswith("trained.") for name in loop.snapshot().shared)


def test_a_reset_restarts_the_average() -> None:
    built = build(N24).train_all()
    built.loop.reset()
    assert equal_bits(weights(built.loop.dense_trainer.scorer), weights(built.loop.model))


def test_several_workers_have_the_same_average() -> None:
    fleet = Fleet(N24, 2, shared_rows(fake_shard()), batch_requests=4).run()
    averages = [weights(built.loop.dense_trainer.scorer) for built in fleet.built]
    assert equal_bits(*averages) and not equal_bits(averages[0], weights(fleet.built[0].loop.model))
