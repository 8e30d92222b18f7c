"""The linear part reads floats, hinge functions of them and the floats of the request, so it can learn
piecewise linear functions."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from roostream.models.build import build_model
from roostream.models.config import RankerConfig
from roostream.models.feature_encoders import RateScale
from roostream.models.linear_part import (
    KNOTS,
    MORE_RATE_KNOTS,
    OTHER_KNOTS,
    Hinges,
    LinearColumns,
    LinearPart,
)
from roostream.models.loss import loss
from roostream.models.model import Targets
from roostream.models.ranker import Ranker
from roostream.schema.schema_file import schema_from_dict
from tests.models.model_cases import LABELS, inputs_of, make_batch
from trainer.dense_part import newton
from trainer.dense_part.adam import DenseAdam

SCHEMA = schema_from_dict(
    {
        "ro": [{"name": "hour"}],
        "nro": [{"name": "price"}, {"online": "ctr_24h"}],
        "label": LABELS,
        "transform": [
            {"input": "ctr_24h", "op": "rank"},
            {"input": "price", "op": "log1p"},
            {"input": "hour", "op": "standardize", "mean": 12.0, "std": 7.0},
        ],
    }
)
"""Candidates have price, ctr_24h and ctr_24h_rank."""


def test_columns_are_the_floats_and_hinges_of_candidate_and_request() -> None:
    inputs = inputs_of(make_batch(SCHEMA, [2, 3], seed=4))
    own_BG, ro_RG = inputs.nro_float_BG.numpy(), inputs.ro_float_RG.numpy()
    assert own_BG.shape == (5, 3) and ro_RG.shape == (2, 1)
    knots = np.arcsinh([OTHER_KNOTS, KNOTS["rate"], KNOTS["rank"]])
    hinges_BH = np.maximum(own_BG[:, :, None] - knots, 0).reshape(5, 6)
    of_request_RG = np.c_[ro_RG, np.maximum(ro_RG - np.arcsinh(KNOTS["standardize"]), 0)]
    of_rate_BH = np.maximum(own_BG[:, [1]] - np.arcsinh(MORE_RATE_KNOTS), 0)
    present_BP, of_request_BG = inputs.nro_present_BP.numpy(), of_request_RG[[0, 0, 1, 1, 1]]
    expected = np.c_[own_BG, present_BP, hinges_BH, of_request_BG, of_rate_BH]
    columns = LinearColumns(SCHEMA, knots=True)
    np.testing.assert_allclose(columns(inputs).numpy(), expected, rtol=0, atol=1e-6)
    assert columns.own.width + columns.added_width == expected.shape[1]


def test_scaled_rates_scale_their_columns_and_hinges() -> None:
    inputs = inputs_of(make_batch(SCHEMA, [2, 3], seed=4))
    rates, columns = RateScale(SCHEMA), LinearColumns(SCHEMA, knots=True)
    assert rates.of("nro").tolist() == [1, 8, 1] and rates.of("ro").tolist() == [1]
    scale_G = [1, 8, 1, *np.ones(inputs.nro_present_BP.shape[1]), 1, 1, 8, 8, 1, 1, 1, 1, 1, 8, 8, 8]
    expected = columns(inputs).numpy() * np.array(scale_G, np.float32)
    np.testing.assert_allclose(columns(rates(inputs), rates).numpy(), expected, rtol=0, atol=1e-6)


def test_without_knots_the_columns_are_the_candidates_floats() -> None:
    inputs = inputs_of(make_batch(SCHEMA, [2, 3], seed=4))
    columns = LinearColumns(SCHEMA, knots=False)
    assert columns(inputs).shape == (5, columns.own.width) and columns.added_width == 0


@pytest.mark.parametrize(
    ("floats", "has_knots", "has_part"), [(60, True, True), (120, False, True), (256, False, False)]
)
def test_many_floats_get_no_knots_and_very_many_no_linear_part(
    floats: int, has_knots: bool, has_part: bool
) -> None:
    schema = schema_from_dict({"nro": [{"name": f"f{n}"} for n in range(floats)], "label": LABELS})
    model = build_model(schema, RankerConfig(), seed=0)
    assert isinstance(model, Ranker) and (model.linear is not None) == has_part
    assert bool(model.linear_columns.added_width) == has_knots
    assert model(inputs_of(make_batch(schema, [3]))).isfinite().all()


@pytest.mark.parametrize("bends", [True, False])
def test_a_rule_that_is_not_linear_is_learned_with_knots(bends: bool) -> None:
    """Clicks are likely in the middle of the float's range only."""
    hinges = Hinges([[-1.0, 1.0] if bends else []])
    part = LinearPart(1, [[0.0, 0.0]], added_width=hinges.width)
    with torch.no_grad():
        part.adjust_initial_parameters()
    optimizer = DenseAdam(part.named_parameters(), learning_rate=0.1, linear=[part])
    rng = np.random.default_rng(0)
    for _ in range(60):
        optimizer.zero_grad()
        random_B1 = rng.uniform(-3, 3, (50, 1))
        is_click_B1 = rng.random((50, 1)) < np.where(np.abs(random_B1) < 1, 0.9, 0.1)
        x_B1, label_BT = (torch.tensor(each, dtype=torch.float32) for each in (random_B1, is_click_B1))
        x_BG = torch.cat([x_B1, hinges(x_B1)], dim=1)
        targets = Targets(label_BT=label_BT, weight_BT=torch.ones_like(label_BT))
        loss_of = functools.partial(loss, targets=targets)
        part.loss(x_BG, part.mixed(torch.zeros(50, 1), x_BG), loss_of).backward()  # type: ignore[no-untyped-call]
        newton.scale_gradients(part, torch.tensor([50.0]))
        assert optimizer.step()
    x_31 = torch.tensor([[-2.5], [0.0], [2.5]])
    low, middle, high = torch.sigmoid(part(torch.cat([x_31, hinges(x_31)], dim=1)))[:, 0].tolist()
    assert (middle > 0.6 and low < 0.4 and high < 0.4) == bends
