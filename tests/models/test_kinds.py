"""Checks of every model kind and every optional part of a ranker: guarantees G9, G10 and G11
(docs/architecture.md), independence of requests, and gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from roostream.errors import SchemaError
from roostream.models.build import build_model
from roostream.models.compiled.scorer import build_scorer
from roostream.models.config import CascadeConfig, TwoTowerConfig
from roostream.models.named_columns import wrong_names
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.lookup import build_lookup
from tests.models.expansion import expand_with_context
from tests.models.kind_cases import CONFIGS
from tests.models.model_cases import CASES, HISTORY, LABELS, make_batch, make_rows, make_schema
from tests.models.model_checks import (
    COUNTS,
    assert_row_gradients,
    assert_same_bits_as_served,
    assert_same_gradients,
    assert_same_in_any_batch,
    loss_and_gradients,
    score,
    trained_model,
)


@pytest.mark.parametrize("n", [1, 11, 40])
@pytest.mark.parametrize("name", CONFIGS)
def test_g9_a_request_alone_scores_the_same_bits_in_training_and_serving(name: str, n: int) -> None:
    assert_same_bits_as_served(make_schema("everything"), CONFIGS[name], n)


@pytest.mark.parametrize("name", CONFIGS)
def test_g9_in_any_batch_and_order_logits_agree_to_1e5(name: str) -> None:
    schema = make_schema("everything")
    assert_same_in_any_batch(schema, trained_model(schema, CONFIGS[name]))


@pytest.mark.parametrize("name", CONFIGS)
def test_g10_training_on_requests_equals_impressions_that_carry_their_list(name: str) -> None:
    schema = make_schema("everything")
    batch = make_batch(schema, [3, 1, 0, 6, 17], seed=3)
    config = CONFIGS[name]
    if isinstance(config, CascadeConfig):
        # A repeated list gives the towers more negatives. The test without list context covers the towers.
        config = dataclasses.replace(config, retrieval_weight=0.0)
    with_lists = not isinstance(config, TwoTowerConfig)  # towers do not read the list
    assert_same_gradients(
        trained_model(schema, config), batch, expand_with_context(batch) if with_lists else batch.expand()
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_g10_without_list_context_requests_equal_their_impressions(name: str) -> None:
    schema = make_schema("plain history")
    config = dataclasses.replace(
        CONFIGS[name],
        **{key: off for key, off in (("list_layers", 0), ("item_floats", ())) if hasattr(CONFIGS[name], key)},
    )
    batch = make_batch(schema, COUNTS, seed=2)
    assert_same_gradients(trained_model(schema, config), batch, batch.expand())


@pytest.mark.parametrize("counts", [[], [0], COUNTS], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_batch_shape_scores_and_learns(name: str, counts: list[int]) -> None:
    schema = make_schema("everything")
    model, batch = trained_model(schema, CONFIGS[name]), make_batch(schema, counts, seed=5)
    assert score(model, batch).shape == (sum(counts), 2)
    value, dense, rows = loss_and_gradients(model, batch)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in rows.values())
    if sum(counts) > 1:
        assert [
            n for n, p in model.named_parameters() if n not in dense or not torch.isfinite(dense[n]).all()
        ] == []
    if not sum(counts):
        assert value == 0.0


@pytest.mark.parametrize("name", CONFIGS)
def test_g11_learning_is_deterministic(name: str) -> None:
    schema = make_schema("everything")
    batch = make_batch(schema, COUNTS, seed=5)
    # As in exact mode. Torch raises on an operation without a deterministic implementation.
    torch.use_deterministic_algorithms(True)
    try:
        (_, dense, rows), (_, dense2, rows2) = (
            loss_and_gradients(trained_model(schema, CONFIGS[name]), batch) for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(dense[k].numpy().tobytes() == dense2[k].numpy().tobytes() for k in dense)
    assert all(rows[k].tobytes() == rows2[k].tobytes() for k in rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_the_whole_model(name: str) -> None:
    schema = make_schema("everything", labels=1)
    assert_row_gradients(
        trained_model(schema, CONFIGS[name]), make_batch(schema, [2, 0, 3], seed=11, longest=3)
    )


@pytest.mark.parametrize("case", ["candidate only", "history without candidate ids"])
def test_hstu_without_a_history_or_candidate_ids_is_rejected(case: str) -> None:
    with pytest.raises(SchemaError, match=r"expected an \[\[ro\]\] sequence and \[\[nro\]\] ids for HSTU"):
        build_model(make_schema(case), CONFIGS["hstu"], 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_names_that_torch_modules_use_as_attributes_are_names_like_others(name: str) -> None:
    raw = CASES["everything"]
    history = {
        **HISTORY,
        "columns": {"type": "ids", "values": "time_ms"},
        "column_tables": {"type": "action"},
    }
    renamed: dict[str, dict[str, Any]] = {
        "user": {"name": "items"},
        "topics": {"name": "keys"},
        "history": history,
    }
    ro = [{**feature, **renamed.get(feature["name"], {})} for feature in raw["ro"]]
    usual, unusual = make_schema("everything"), schema_from_dict({**raw, "ro": ro, "label": LABELS})
    expected, model = trained_model(usual, CONFIGS[name]), build_model(unusual, CONFIGS[name], seed=1)
    with torch.no_grad():
        for own, same in zip(model.parameters(), expected.parameters(), strict=True):
            own.copy_(same)
    batch = make_batch(unusual, COUNTS)
    logits_BT = score(model, batch)
    assert torch.equal(logits_BT, score(expected, make_batch(usual, COUNTS)))
    lookup = build_lookup(batch)
    served_BT = build_scorer(model, unusual)(batch, lookup, make_rows(unusual, lookup))
    np.testing.assert_allclose(served_BT, logits_BT.numpy(), atol=1e-5)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    assert not wrong_names(model.column_names(), shapes)
