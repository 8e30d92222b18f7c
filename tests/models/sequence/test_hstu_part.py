"""HSTU as an encoder within models: which features it reads, which parameters learn, and what the vector of a
history depends on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from roostream.models.config import HstuConfig
from roostream.models.feature_encoders import FeatureEncoder, pool_features
from roostream.models.inputs import build_inputs
from roostream.models.layers import init_parameters
from roostream.models.ranker import candidate_encoders
from roostream.models.sequence.history_encoders import HistoryEncoder, HstuTargetEncoder
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.batch import Batch
from roostream.wire.jagged import Jagged
from roostream.wire.lookup import build_lookup
from tests.models.model_cases import CASES, LABELS, inputs_of, make_batch, make_rows, make_schema

CONFIG = HstuConfig(hstu_width=4, max_history=5)
SCHEMA = make_schema("everything")


def perturb_parameters(part: FeatureEncoder) -> FeatureEncoder:
    init_parameters(part, seed=1)
    with torch.no_grad():
        for i, parameter in enumerate(part.parameters()):
            parameter.add_(0.3 * torch.sin(torch.arange(parameter.numel()) + i).view(parameter.shape))
    return part


def encode_batch(part: FeatureEncoder, batch: Batch) -> np.ndarray:
    lookup = build_lookup(batch)
    with torch.inference_mode():
        inputs = build_inputs(batch, lookup, make_rows(batch.schema, lookup))
        return part(inputs, pool_features(inputs)).numpy()


def target_encoder(schema: Schema) -> HstuTargetEncoder:
    part = candidate_encoders(schema, CONFIG)["hstu_history"]
    assert isinstance(part, HstuTargetEncoder)
    return part


def with_history(batch: Batch, **changes: Any) -> Batch:
    """Replace fields, such as values or columns, of the batch's request-side lists."""
    lists: Jagged = batch.ro_lists
    return dataclasses.replace(batch, ro_lists=dataclasses.replace(lists, **changes))


def history_encoder() -> HistoryEncoder:
    part = perturb_parameters(
        HistoryEncoder(SCHEMA, next(f for f in SCHEMA.ro if f.name == "history"), CONFIG)
    )
    assert isinstance(part, HistoryEncoder)
    return part


def test_all_parameters_and_rows_learn() -> None:
    batch = make_batch(SCHEMA, [3, 2], seed=2)
    inputs = inputs_of(batch, train=True)
    part = perturb_parameters(target_encoder(SCHEMA))
    part(inputs, pool_features(inputs)).square().sum().backward()
    assert [name for name, p in part.named_parameters() if p.grad is None or not p.grad.any()] == []
    for table in ("item", "action"):
        gradient = inputs.rows[SCHEMA.table_by_name[table].stack].grad
        assert gradient is not None and gradient.any()


def test_candidates_without_an_id_in_the_historys_table_use_their_context() -> None:
    other = {"name": "topic", "kind": "ids", "table": "action"}
    schema = schema_from_dict(
        {**CASES["everything"], "nro": [other, *CASES["everything"]["nro"][2:]], "label": LABELS}
    )
    part, batch = perturb_parameters(target_encoder(schema)), make_batch(schema, [3, 2], seed=2)
    out_BD = encode_batch(part, batch)
    assert out_BD.shape == (5, 4) and len(np.unique(out_BD.round(5), axis=0)) > 1


def test_order_and_times_of_entries_count() -> None:
    batch, part = make_batch(SCHEMA, [1, 1, 1], seed=7), history_encoder()
    lists = batch.ro_lists
    place = slice(
        *lists.offsets_of("history")[[0, -1]]
        + sum(lists.total_of(k) for k in lists.keys[: lists.index("history")])
    )
    turned = lists.values.copy()
    turned[place] = turned[place][::-1]
    later = lists.columns | {"history.time": lists.columns["history.time"] - 10**8}
    before = encode_batch(part, batch)
    assert before.shape == (3, 4)
    for other in (with_history(batch, values=turned), with_history(batch, columns=later)):
        assert np.abs(encode_batch(part, other) - before).max() > 1e-4


def test_requests_without_history_or_candidates_have_a_vector() -> None:
    batch = make_batch(SCHEMA, [2, 0, 1, 1, 1, 1], seed=1)
    length_R = batch.ro_lists.lengths_KN[batch.ro_lists.index("history")]
    out_RD = encode_batch(history_encoder(), batch)
    empty = out_RD[length_R == 0]
    assert 2 <= len(empty) < 6 and np.isfinite(out_RD).all()
    np.testing.assert_allclose(empty, np.broadcast_to(empty[0], empty.shape), atol=1e-6)
    assert np.abs(out_RD[length_R > 0] - empty[0]).max(axis=1).min() > 1e-4
