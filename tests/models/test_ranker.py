"""The ranker as a whole: guarantees G9 and G10 (docs/architecture.md), list context, and the scores of an
untrained model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from roostream.errors import SchemaError
from roostream.models.build import build_model
from roostream.models.config import RankerConfig
from roostream.models.feature_encoders import normalize_pooled
from roostream.models.inputs import build_inputs
from roostream.models.ranker import rate_rank
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.lookup import build_lookup
from roostream.wire.transform import output_names
from tests.models.expansion import expand_with_context
from tests.models.model_cases import CASES, LABELS, make_batch, make_rows, make_schema
from tests.models.model_checks import (
    COUNTS,
    SMALL,
    assert_same_gradients,
    score,
    trained_model,
)


def test_g9_bits_do_not_depend_on_the_alignment_of_rows() -> None:
    schema = make_schema("everything")
    model, batch = trained_model(schema), make_batch(schema, [19], seed=4, longest=30)
    lookup = build_lookup(batch)
    rows = make_rows(schema, lookup)
    shifted = {}
    for stack, rows_UD in rows.items():
        room = np.empty(rows_UD.size + 16, dtype=np.float32)
        shifted[stack] = room[1 : 1 + rows_UD.size].reshape(rows_UD.shape)
        shifted[stack][:] = rows_UD
    with torch.inference_mode():
        aligned, unaligned = (model(build_inputs(batch, lookup, r)) for r in (rows, shifted))
    assert aligned.numpy().tobytes() == unaligned.numpy().tobytes()


@pytest.mark.parametrize("case", [c for c in CASES if "transform" not in CASES[c]])
def test_g10_training_on_requests_equals_training_on_impressions(case: str) -> None:
    schema = make_schema(case)
    batch = make_batch(schema, COUNTS, seed=2)
    assert_same_gradients(
        trained_model(schema, dataclasses.replace(SMALL, list_layers=0)), batch, batch.expand()
    )


@pytest.mark.parametrize("case", CASES)
def test_g10_with_list_context_it_equals_impressions_that_carry_their_list(case: str) -> None:
    schema = make_schema(case)
    batch = make_batch(schema, [3, 1, 0, 6, 17], seed=3)
    assert_same_gradients(trained_model(schema), batch, expand_with_context(batch))


def test_candidates_see_each_other_only_with_list_context() -> None:
    schema = make_schema("candidate only")
    batch = make_batch(schema, [5], seed=8)
    changed_BF = batch.nro_float_BF.copy()
    changed_BF[0] += 1
    changed = dataclasses.replace(batch, nro_float_BF=changed_BF)
    apart = trained_model(schema, dataclasses.replace(SMALL, list_layers=0))
    together = trained_model(schema)
    torch.testing.assert_close(score(apart, batch)[1:], score(apart, changed)[1:], rtol=0, atol=0)
    assert (score(together, batch)[1:] - score(together, changed)[1:]).abs().max() > 1e-4


def test_the_order_of_candidates_does_not_matter() -> None:
    schema = make_schema("everything")
    model, batch = trained_model(schema), make_batch(schema, [6], seed=9)
    order = np.array([4, 0, 5, 2, 1, 3])
    expanded = batch.expand().take_requests(order)
    shuffled = dataclasses.replace(
        batch,
        **{
            f: getattr(expanded, f)
            for f in ("nro_float_BF", "nro_present_BF", "nro_lists", "item_B", "label_BT", "weight_BT")
        },
    )
    torch.testing.assert_close(score(model, shuffled), score(model, batch)[order], rtol=0, atol=1e-5)


def test_the_request_tower_runs_once_per_request() -> None:
    schema = make_schema("everything")
    model, batch = trained_model(schema), make_batch(schema, COUNTS, seed=1)
    rows = []
    model.request_tower.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[0]))
    score(model, batch)
    assert rows == [len(COUNTS)]


def test_normalized_rows_have_mean_0_and_variance_1_and_empty_pools_stay_0() -> None:
    x = torch.tensor([[3.0, 5.0, 4.0, 8.0], [0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    out = normalize_pooled({"item": x, "flag": torch.tensor([[0.3]])})
    torch.testing.assert_close(out["item"][0].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(out["item"][0].var(unbiased=False), torch.tensor(1.0), atol=1e-4, rtol=0)
    assert not out["item"][1:].any() and out["flag"].item() == pytest.approx(0.3), (
        "a vector of one number is not normalized"
    )


def test_an_untrained_model_predicts_the_prior_of_each_label() -> None:
    schema = make_schema("everything")
    first, *rest = schema.labels
    own = dataclasses.replace(schema, labels=(dataclasses.replace(first, prior=0.004), *rest))
    probability_BT = torch.sigmoid(
        score(build_model(own, RankerConfig(prior=0.03), 0), make_batch(own, COUNTS))
    )
    expected_T = torch.tensor([0.004] + [0.03] * len(rest))
    torch.testing.assert_close(probability_BT, expected_T.expand_as(probability_BT))
    assert own.fingerprint == schema.fingerprint


RANKED = {"inputs": ["ctr_{1h,24h}"], "op": "rank"}
RATES = {
    "nro": [{"online": "ctr_{1h,24h}"}, {"name": "price"}],
    "label": [*LABELS, {"name": "buy", "action": "buy"}],
    "transform": [RANKED],
}


def test_an_untrained_model_orders_candidates_by_the_longest_rate_of_the_label() -> None:
    schema = schema_from_dict(RATES)
    batch = make_batch(schema, [7])
    batch.nro_float_BF[:] = np.random.default_rng(0).uniform(0.01, 3.0, batch.nro_float_BF.shape)
    rate_B = batch.nro_float_BF[:, 1]
    logits_BT = score(build_model(schema, RankerConfig(prior=0.2), 0), batch)
    assert logits_BT[:, 0].argsort().tolist() == rate_B.argsort().tolist()
    middle = int(rate_B.argsort()[3])
    assert torch.sigmoid(logits_BT[middle, 0]).item() == pytest.approx(0.2, abs=1e-5)
    assert np.ptp(logits_BT[:, 1].numpy()) == 0.0, "no feature is a rate of purchases"


@pytest.mark.parametrize(
    ("nro", "transforms", "found"),
    [
        ([{"online": "ctr_{24h,1h}"}], [RANKED], "ctr_24h_rank"),
        ([{"name": "much", "online": "ctr_6h"}], [{"input": "much", "op": "rank", "output": "m"}], "m"),
        ([{"online": "views_24h"}], [{"input": "views_24h", "op": "rank", "output": "m"}], None),
        ([{"online": "ctr_24h"}], [], None),
        (
            [{"online": "ctr_{24h,1h}"}],
            [RANKED, {"input": "ctr_24h_rank", "op": "standardize", "mean": 0.5, "std": 0.3}],
            "ctr_1h_rank",
        ),
    ],
)
def test_the_rank_of_the_longest_rate_is_found(
    nro: list[dict[str, str]], transforms: list[dict[str, object]], found: str | None
) -> None:
    schema = schema_from_dict({"nro": nro, "label": LABELS, "transform": transforms})
    column = rate_rank(schema, "click")
    assert (None if column is None else output_names(schema, "nro")[column]) == found


def test_a_schema_without_features_is_rejected() -> None:
    with pytest.raises(SchemaError, match="at least one"):
        build_model(schema_from_dict({"label": LABELS}), RankerConfig(), 0)
