"""Snapshots of the dense weights and optimizer: a restore is bit-exact, or it fails and changes nothing."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from roostream.errors import OtherVersionError
from roostream.models.build import build_model, load_model_config
from roostream.models.ranker import Ranker
from roostream.runtime import tensor_file
from roostream.schema.schema_file import schema_from_dict
from tests.models.custom.test_loading import CODE, write_model
from tests.models.model_cases import LABELS, inputs_of, make_batch, make_schema
from tests.models.model_checks import SMALL, trained_model
from trainer.dense_part import dense_checkpoint
from trainer.dense_part.adam import DenseAdam


def train_small_model(width: int = 3, steps: int = 3) -> tuple[nn.Module, DenseAdam]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 2), nn.Linear(2, 1))
    optimizer = DenseAdam(model.named_parameters(), learning_rate=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, width)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_a_restore_continues_bit_for_bit() -> None:
    model, optimizer = train_small_model()
    tensors, metadata = tensor_file.decode(
        tensor_file.encode(dense_checkpoint.snapshot(model, optimizer), {"step": "3"})
    )
    assert metadata == {"step": "3"} and int(tensors["optimizer.step"]) == 3
    other, other_optimizer = train_small_model(steps=1)
    dense_checkpoint.restore(tensors, other, other_optimizer, same_schema=True)
    for each_model, each_optimizer in ((model, optimizer), (other, other_optimizer)):
        each_optimizer.zero_grad()
        each_model(torch.ones(4, 3)).sum().backward()
        each_optimizer.step()
    restored = dense_checkpoint.snapshot(other, other_optimizer)
    original = dense_checkpoint.snapshot(model, optimizer)
    assert restored.keys() == original.keys() and all(
        restored[k].tobytes() == original[k].tobytes() for k in restored
    )


def test_a_snapshot_is_a_copy() -> None:
    model, optimizer = train_small_model()
    tensors = dense_checkpoint.snapshot(model, optimizer)
    kept = {k: v.copy() for k, v in tensors.items()}
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert all((tensors[k] == v).all() for k, v in kept.items())


def test_an_untrained_optimizer_is_restored() -> None:
    model, optimizer = train_small_model(steps=0)
    tensors = dense_checkpoint.snapshot(model, optimizer)
    assert int(tensors["optimizer.step"]) == 0
    other, other_optimizer = train_small_model(steps=2)
    dense_checkpoint.restore(tensors, other, other_optimizer, same_schema=True)
    assert other_optimizer.num_steps == 0 and not any(
        v.any() for slots in other_optimizer.slots.values() for v in slots.values()
    )


def test_another_shape_is_rejected_under_the_same_schema() -> None:
    tensors = dense_checkpoint.snapshot(*train_small_model(width=3))
    model, optimizer = train_small_model(width=4)
    before = dense_checkpoint.snapshot(model, optimizer)
    with pytest.raises(OtherVersionError, match=r"expected model\.0\.weight of shape \(2, 4\), got \(2, 3\)"):
        dense_checkpoint.restore(tensors, model, optimizer, same_schema=True)
    assert all((before[k] == v).all() for k, v in dense_checkpoint.snapshot(model, optimizer).items())


BIAS = "self.bias = torch.nn.Parameter(torch.zeros(config.rows, len(schema.tasks)))"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("self.bias = torch.nn.Parameter(torch.zeros(5, 2))", r"bias of shape \(5, 2\), got \(3, 2\)"),
        (f"{BIAS}; self.more = torch.nn.Linear(2, 2)", r"more\.weight of shape \(2, 2\), got none"),
        ("self.first = torch.nn.Parameter(torch.zeros(3, 2))", r"first of shape \(3, 2\), got none"),
        ("pass", r"bias to be no weight, got \(3, 2\)"),
    ],
)
def test_a_commit_of_custom_code_with_other_weights_is_rejected(
    tmp_path: Path, weights: str, message: str
) -> None:
    trained = []
    for folder, code in {"committed": CODE, "corrected": CODE.replace(BIAS, weights)}.items():
        config = load_model_config(write_model(tmp_path / folder, code))
        model = build_model(make_schema("everything"), config, 0)
        trained.append((model, DenseAdam(model.named_parameters(), learning_rate=0.1)))
    tensors = dense_checkpoint.snapshot(*trained[0])
    with pytest.raises(
        OtherVersionError, match=rf"expected model\.own\.{message}.*; use the code that wrote"
    ):
        dense_checkpoint.restore(tensors, *trained[1], same_schema=True)


def test_a_changed_schema_keeps_the_weights_that_fit(caplog: pytest.LogCaptureFixture) -> None:
    tensors = dense_checkpoint.snapshot(*train_small_model(width=3))
    model, optimizer = train_small_model(width=4, steps=1)
    fresh = model.state_dict()["0.weight"].numpy().copy()
    with caplog.at_level(logging.WARNING):
        dense_checkpoint.restore(tensors, model, optimizer, same_schema=False)
    after = dense_checkpoint.snapshot(model, optimizer)
    assert (after["model.0.weight"] == fresh).all() and (
        after["model.1.weight"] == tensors["model.1.weight"]
    ).all()
    assert "model.0.weight" in caplog.text
    assert np.array_equal(after["optimizer.1.weight.exp_avg"], tensors["optimizer.1.weight.exp_avg"])


@pytest.mark.parametrize("part", ["first_order", "linear", "ranker.linear"])
def test_a_part_that_the_commit_lacks_starts_at_zero(part: str) -> None:
    model, optimizer = model_with_part(part, slope=0.7)
    before = {k: v for k, v in dense_checkpoint.snapshot(model, optimizer).items() if part not in k}
    other, other_optimizer = model_with_part(part, slope=1.0)
    dense_checkpoint.restore(before, other, other_optimizer, same_schema=True)
    assert other.get_parameter(f"{part}.weight").item() == 0.0
    after = dense_checkpoint.snapshot(other, other_optimizer)
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())


def test_a_commit_without_linear_knots_continues_with_the_same_scores() -> None:
    schema = make_schema("everything")
    before = trained_model(schema, dataclasses.replace(SMALL, linear_knots=False))
    after = build_model(schema, SMALL, seed=1)
    assert isinstance(before, Ranker) and isinstance(after, Ranker) and after.linear_columns.added_width
    first, second = (
        DenseAdam(model.named_parameters(), learning_rate=0.1, linear=[model.linear])
        for model in (before, after)
        if model.linear is not None
    )
    tensors = dense_checkpoint.snapshot(before, first)
    dense_checkpoint.restore(tensors, after, second, same_schema=True)
    inputs = inputs_of(make_batch(schema, [3, 1]))
    torch.testing.assert_close(after(inputs), before(inputs), rtol=0, atol=1e-6)


def test_a_commit_without_scaled_rates_continues_with_the_same_scores() -> None:
    schema = schema_from_dict({"nro": [{"name": "price"}, {"online": "ctr_24h"}], "label": LABELS})
    before = trained_model(schema, dataclasses.replace(SMALL, scale_rates=False))
    after = build_model(schema, SMALL, seed=1)
    inputs, old = inputs_of(make_batch(schema, [3, 1])), before
    for _ in range(2):  # in the second round, the commit already has the scale
        assert isinstance(before, Ranker) and isinstance(after, Ranker) and before.linear and after.linear
        first, second = (
            DenseAdam(model.named_parameters(), learning_rate=0.1, linear=[model.linear])
            for model in (before, after)
        )
        dense_checkpoint.restore(dense_checkpoint.snapshot(before, first), after, second, same_schema=True)
        torch.testing.assert_close(after(inputs), old(inputs), rtol=0, atol=1e-6)
        before, after = after, build_model(schema, SMALL, seed=2)


def test_a_commit_with_an_incomplete_part_is_rejected() -> None:
    model, optimizer = model_with_part("linear", slope=0.7)
    tensors = dense_checkpoint.snapshot(model, optimizer)
    tensors["model.linear.curvature"] = tensors.pop("model.linear.weight")
    with pytest.raises(OtherVersionError, match=r"model\.linear\.weight"):
        dense_checkpoint.restore(tensors, model, optimizer, same_schema=True)


def model_with_part(part: str, slope: float) -> tuple[nn.Module, DenseAdam]:
    """Build a model with a linear submodule at the path `part`, whose weight is `slope`."""
    model = nn.ModuleDict({"deep": nn.Linear(3, 1)})
    outer, _, inner = part.rpartition(".")
    submodule = nn.ModuleDict({inner: nn.Linear(1, 1, bias=False)})
    if outer:
        model[outer] = submodule
    else:
        model.update(submodule)
    nn.init.constant_(model.get_parameter(f"{part}.weight"), slope)
    return model, DenseAdam(model.named_parameters(), learning_rate=0.01)
