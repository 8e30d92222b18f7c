"""Training on single impressions instead of requests: the batches, exactly-once training through restores,
and gradients that equal those of requests."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import numpy as np
import pytest
import torch

from roostream.errors import ConfigError
from roostream.models.config import DcnConfig, DlrmConfig, ModelConfig, RankerConfig
from roostream.models.inputs import build_inputs
from roostream.models.model import Targets
from roostream.schema.schema import Transform
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.batch import Batch
from roostream.wire.transform import apply_transforms
from tests.models.model_cases import CASES, LABELS, make_batch, make_rows
from tests.models.model_checks import COUNTS, loss_and_gradients, trained_model
from tests.trainer import samples
from tests.trainer.loops import assert_a_restored_loop_continues_bit_equal, build
from tests.trainer.network import CONTROLLER
from tests.trainer.simulator import WORKER, Kill, Simulation
from trainer.expansion import Expansion, check_expandable

ON: dict[str, Any] = {"expand": "impressions", "batch_impressions": 5}
N24 = samples.records(list(range(1, 25)))  # each request has 3 candidates; a chunk has 4 requests
RAW = CASES["everything"]
SCHEMA = schema_from_dict(
    {**RAW, "tables": {name: {**t, "dim": 4} for name, t in RAW["tables"].items()}, "label": LABELS}
)  # its transforms use ranks and shares within the list; TorchRec's modules need tables of equal width


def test_batches_have_one_size_and_hold_each_impression_once_in_order() -> None:
    batches = [
        make_batch(SCHEMA, counts, seed) for seed, counts in enumerate([COUNTS, [], [0, 2], [9, 1], COUNTS])
    ]
    expansion, parts = Expansion(16, SCHEMA), []
    for batch in batches:
        parts += expansion.add(batch)
        assert expansion.num_waiting < 16
    assert {part.batch.num_candidates for part in parts} == {16}
    rest = expansion.take_waiting()
    assert rest is not None and expansion.take_waiting() is None and expansion.num_waiting == 0
    whole, trained = Batch.concat(batches), Batch.concat([part.batch for part in (*parts, rest)])
    assert trained.num_requests == trained.num_candidates == whole.num_candidates
    expected = whole.expand()
    for name in ("item_B", "label_BT", "weight_BT", "sample_id_R", "ro_float_RF", "nro_present_BF"):
        np.testing.assert_array_equal(getattr(trained, name), getattr(expected, name))
    np.testing.assert_array_equal(trained.ro_lists.values, expected.ro_lists.values)
    ro_RG, nro_BG = apply_transforms(whole)
    np.testing.assert_array_equal(
        np.concatenate([part.floats[1] for part in (*parts, rest) if part.floats]), nro_BG
    )
    np.testing.assert_array_equal(
        np.concatenate([part.floats[0] for part in (*parts, rest) if part.floats]),
        ro_RG[whole.request_index_B],
    )


@pytest.mark.parametrize("output", ["x_rank", ""])
def test_waiting_impressions_of_other_transforms_are_dropped_with_a_warning(
    output: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The fingerprint does not cover transforms, and waiting floats are transformed."""
    name = next(f.name for f in SCHEMA.floats("nro"))
    more = Transform(input=name, op="rank", output=output or name)
    changed = dataclasses.replace(SCHEMA, transforms=(*SCHEMA.transforms, more))
    before, after = Expansion(1000, SCHEMA), Expansion(1000, changed)
    before.add(make_batch(SCHEMA, COUNTS, 1))
    assert changed.fingerprint == SCHEMA.fingerprint and before.num_waiting
    after.load(before.state())
    assert after.num_waiting == 0 and "not trained" in caplog.text
    assert after.add(make_batch(changed, COUNTS, 2)) == [] and after.num_waiting


@pytest.mark.parametrize(
    "config", [DlrmConfig(), DcnConfig(), RankerConfig(list_layers=0)], ids=lambda config: config.kind
)
def test_g10_gradients_equal_those_of_requests_with_list_context(config: ModelConfig) -> None:
    torch.set_num_threads(1)
    model, batch = trained_model(SCHEMA, config), make_batch(SCHEMA, COUNTS, seed=3)
    value, dense, rows = loss_and_gradients(model, batch)
    (part,) = Expansion(batch.num_candidates, SCHEMA).add(batch)
    assert part.batch.num_requests == batch.num_candidates > batch.num_requests
    rows_by_stack = make_rows(SCHEMA, part.lookup)
    inputs = build_inputs(part.batch, part.lookup, rows_by_stack, train=True, floats=part.floats)
    targets = Targets(torch.from_numpy(part.batch.label_BT), torch.from_numpy(part.batch.weight_BT))
    model.zero_grad()
    expanded = model.loss(inputs, model(inputs), targets)
    expanded.backward()
    assert float(expanded.detach()) == pytest.approx(value, rel=1e-5)
    for name, parameter in model.named_parameters():
        if name in dense:
            torch.testing.assert_close(parameter.grad, dense[name], rtol=1e-4, atol=1e-6)
    num_equal = 0
    for stack, of_stack in part.lookup.stacks.items():
        gradient_UD = inputs.rows[stack].grad
        assert gradient_UD is not None
        for at, key in enumerate(zip(of_stack.table_U.tolist(), of_stack.id_U.tolist(), strict=True)):
            np.testing.assert_allclose(gradient_UD[at].numpy(), rows[key], rtol=1e-4, atol=1e-6)
            num_equal += 1
    assert num_equal > 50


def test_one_batch_of_all_impressions_gives_the_same_update_as_the_requests() -> None:
    requests = build(N24, batch_requests=24, average_steps=0).train_all()
    expanded = build(N24, batch_requests=24, average_steps=0, **{**ON, "batch_impressions": 72}).train_all()
    assert expanded.loop.optimizer.num_steps == requests.loop.optimizer.num_steps == 1
    for name, weight in expanded.loop.model.state_dict().items():
        torch.testing.assert_close(weight, requests.loop.model.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert expanded.shard.rows.keys() == requests.shard.rows.keys()
    for key, row in expanded.shard.rows.items():
        np.testing.assert_allclose(row.value_D, requests.shard.rows[key].value_D, rtol=1e-4, atol=1e-6)
    scores = [[score for p in built.predicted for score in p.scores] for built in (expanded, requests)]
    assert len(scores[0]) == 72 and scores[0] == scores[1]


def test_each_impression_is_trained_once_and_each_request_reported_once() -> None:
    built = build(N24, **ON).train_all()
    loop = built.loop
    assert loop.optimizer.num_steps == -(-72 // 5) and loop.num_steps == 6
    assert [p.sample_id for p in built.predicted] == list(range(1, 25))
    assert loop.counts.requests == loop.outcomes.total["trained"] == 24 and built.offsets() == [12, 12]
    assert loop.report()["request_auc"] is not None
    single = build(N24, **{**ON, "batch_impressions": 1}).train_all()
    assert set(single.pushes().values()) == {3}, (
        "a user's row is pushed once for each of the user's impressions"
    )


@pytest.mark.parametrize("exact", [False, True])
def test_g11_a_restored_loop_trains_the_same_batches(exact: bool) -> None:
    _, restored = assert_a_restored_loop_continues_bit_equal(N24, 3, exact=exact, **ON)
    assert restored.loop.optimizer.num_steps == (72 // 5 if exact else -(-72 // 5))
    restored.loop.reset()
    assert restored.loop.expansion is not None and restored.loop.expansion.num_waiting == 0


def test_commits_do_not_change_the_batches() -> None:
    with_snapshots, without = build(N24, **ON), build(N24, **ON).train_all()
    while with_snapshots.loop.step():
        with_snapshots.loop.snapshot()
    assert with_snapshots.train_all().bits() == without.bits()


Run = tuple[dict[str, bytes], dict[int, int], set[int]]


def run(kills: list[Kill]) -> Run:
    """Simulate a fleet with these kills. Returns rows and weights, pushes by user, and the reported
    samples."""
    loop = {"expand": "impressions", "batch_impressions": 7}
    simulation = Simulation(samples.records(list(range(1, 49))), exact=True, kills=kills, loop=loop)
    simulation.run()
    assert [kill.victim for kill in kills] == simulation.killed
    reported = {p.sample_id for p in simulation.outputs.predicted}
    return simulation.bits(), simulation.pushes(), reported


@functools.cache
def undisturbed() -> Run:
    return run([])


@pytest.mark.parametrize(
    ("moment", "victim", "occurrence"),
    [
        *(((WORKER, "push", "before"), WORKER, push) for push in (2, 9, 17)),
        ((WORKER, "push", "before"), "shard 0", 5),
        *(((WORKER, "cut", "after"), victim, 2) for victim in (WORKER, "shard 0")),
        *(((WORKER, "write", "after"), victim, 2) for victim in (WORKER, CONTROLLER)),
    ],
)
def test_g11_each_impression_is_trained_once_through_kills_and_commits(
    moment: tuple[str, str, str], victim: str, occurrence: int
) -> None:
    assert run([Kill(moment, victim, occurrence)]) == undisturbed()


def test_impressions_that_cannot_be_trained_after_a_restore_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = build(N24, **ON)
    before.loop.step()
    at = before.loop.snapshot()
    with caplog.at_level(logging.WARNING):
        build(N24).loop.restore(at)
    assert "2 impressions of the commit" in caplog.text and "expand = 'off'" in caplog.text
    assert before.loop.expansion is not None
    state = before.loop.expansion.state()
    caplog.clear()
    before.loop.expansion.load({**state, "expansion.schema": np.array([1], np.uint64)})
    assert before.loop.expansion.num_waiting == 0 and "the schema has changed" in caplog.text


def test_only_an_impression_with_non_finite_gradients_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(N24, **ON)
    train = built.loop.dense_trainer.train_unscored
    monkeypatch.setattr(
        built.loop.dense_trainer,
        "train_unscored",
        lambda pulled, targets: 7 not in pulled.part.batch.sample_id_R and train(pulled, targets),
    )
    built.train_all()
    assert built.loop.counts.non_finite == 3 and built.loop.counts.requests == 24
    assert set(range(1, 25)) - built.pushes().keys() == {7}


def test_models_and_labels_that_compare_candidates_are_rejected() -> None:
    with pytest.raises(ConfigError, match="expected list_layers = 0 in the model, got 1"):
        check_expandable(SCHEMA, RankerConfig())
    pairwise = dataclasses.replace(
        SCHEMA, labels=(dataclasses.replace(SCHEMA.labels[0], objective="pairwise"),)
    )
    with pytest.raises(ConfigError, match="another objective of 'click', got 'pairwise'"):
        check_expandable(pairwise, DlrmConfig())
    check_expandable(SCHEMA, DlrmConfig())
