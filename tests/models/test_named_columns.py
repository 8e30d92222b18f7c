"""Training continues from a commit with changed features. Weights of the features that stayed are kept."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from roostream.errors import CheckpointError
from roostream.models import named_columns
from roostream.models.build import build_model
from roostream.models.config import CascadeConfig, HstuConfig, ModelConfig, TwoTowerConfig
from roostream.models.custom.model_checks import example_request
from roostream.models.model import Model
from roostream.models.named_columns import COLUMN_NAMES, carry_over, decode, encode
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from tests.models.model_cases import CASES, LABELS, make_schema
from tests.models.model_checks import (
    SMALL,
    loss_and_gradients,
    make_optimizer,
    make_sample_record,
    score,
    trained_model,
)
from trainer.dense_part import dense_checkpoint
from trainer.dense_part.adam import DenseAdam

BEFORE = make_schema("everything")
_SIZES = {f.name: getattr(SMALL, f.name) for f in dataclasses.fields(SMALL)}
CONFIGS: dict[str, ModelConfig] = {
    "dcn": SMALL,
    "dcn of full rank": dataclasses.replace(SMALL, cross_rank=0),
    "dhen": dataclasses.replace(SMALL, interaction="dhen"),
    "no request tower": dataclasses.replace(SMALL, request_layers=()),
    "user arch": dataclasses.replace(SMALL, request_side="both", userarch_embeddings=2),
    "hstu": HstuConfig(**{**_SIZES, "kind": "hstu"}, hstu_width=8, hstu_heads=2, hstu_layers=1),
    "cascade": CascadeConfig(**{**_SIZES, "kind": "cascade"}),
    "two towers": TwoTowerConfig(stage="ranking", item_floats=("age_s",), width=4, history="hstu"),
    "towers without layers": TwoTowerConfig(stage="ranking", width=4, user_layers=(), item_layers=()),
    "retrieval": TwoTowerConfig(stage="retrieval", item_floats=("age_s",), width=4),
}
IDS = {"kind": "ids", "table": "user"}
CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a float of candidates": lambda d: d["nro"].append({"name": "price"}),
    "a float of requests": lambda d: d["ro"].insert(0, {"name": "weekday"}),
    "a list of candidates": lambda d: d["nro"].append({"name": "brand", **IDS}),
    "a list of requests": lambda d: d["ro"].append({"name": "friends", **IDS}),
    "a transform": lambda d: d["transform"].append({"output": "age_rank", "input": "age_s", "op": "rank"}),
    "a wider table": lambda d: d["tables"].update(action={"dim": 3}),
    "another order": lambda d: (d["nro"].reverse(), d["ro"].reverse()),
}


def change_schema(change: str) -> Schema:
    tables = copy.deepcopy({**CASES["everything"], "label": LABELS})
    CHANGES[change](tables)
    return schema_from_dict(tables)


def decode_with_both_schemas(now: Schema) -> tuple[Batch, Batch]:
    """Decode the same requests with the old schema and with `now`. They have values for all features of
    `now`."""
    known = {s.fingerprint: s for s in (BEFORE, now)}
    records = []
    for seed, n in enumerate((3, 1, 5)):
        request = example_request(now, n, seed, known="all")
        records.append(make_sample_record(now, request.ro, request.nro, request.item_n, seed))
    first, second = (Decoder(s, known.get).decode(records)[0] for s in (BEFORE, now))
    return first, second


def restore_with_schema(before: Model, now: Schema, config: ModelConfig) -> tuple[Model, DenseAdam]:
    after = build_model(now, config, seed=2)
    optimizer = make_optimizer(after)
    groups = ("ro floats", "nro floats", "ro lists", "nro lists")
    dense_checkpoint.restore(
        dense_checkpoint.snapshot(before, make_optimizer(before)),
        after,
        optimizer,
        same_schema=False,
        fresh=dense_checkpoint.weights_of_inputs(now, config, groups),
    )
    return after, optimizer


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_changed_features_change_no_score_until_they_are_trained(kind: str, change: str) -> None:
    config, now = CONFIGS[kind], change_schema(change)
    before = trained_model(BEFORE, config)
    after, _ = restore_with_schema(before, now, config)
    first, second = decode_with_both_schemas(now)
    torch.testing.assert_close(score(after, second), score(before, first), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", [c for c in CHANGES if c != "another order"])
def test_new_columns_learn(change: str) -> None:
    now = change_schema(change)
    after, _ = restore_with_schema(trained_model(BEFORE), now, SMALL)
    names = after.column_names()
    (first,) = {"request_tower.layers.0.weight" if "requests" in change else "dense.layers.0.weight"}
    weight, columns = after.get_parameter(first), names[first][1]
    assert columns is not None
    old = trained_model(BEFORE).column_names()[first][1]
    assert old is not None
    new = [at for at, name in enumerate(columns) if name not in old]
    assert new and not weight[:, new].any()
    loss_and_gradients(after, decode_with_both_schemas(now)[1])
    assert weight.grad is not None and weight.grad[:, new].any()


def test_removing_a_feature_removes_only_its_columns() -> None:
    tables = copy.deepcopy({**CASES["everything"], "label": LABELS})
    tables["nro"] = [f for f in tables["nro"] if f["name"] != "age_s"]
    now = schema_from_dict(tables)
    before = trained_model(BEFORE)
    after, _ = restore_with_schema(before, now, SMALL)
    name = "dense.layers.0.weight"
    columns, old = after.column_names()[name][1], before.column_names()[name][1]
    assert columns is not None and old is not None and set(columns) < set(old)
    kept = before.get_parameter(name)[:, [old.index(column) for column in columns]]
    assert torch.equal(after.get_parameter(name), kept)


def test_optimizer_state_moves_with_its_columns() -> None:
    before = trained_model(BEFORE)
    optimizer = make_optimizer(before)
    for slots in optimizer.slots.values():
        for value in slots.values():
            value.copy_(torch.arange(value.numel()).view(value.shape))
    now = change_schema("another order")
    after = build_model(now, SMALL, seed=2)
    restored = make_optimizer(after)
    dense_checkpoint.restore(dense_checkpoint.snapshot(before, optimizer), after, restored, same_schema=False)
    name = "dense.layers.0.weight"
    columns, old = after.column_names()[name][1], before.column_names()[name][1]
    assert columns is not None and old is not None and columns != old
    order = [old.index(column) for column in columns]
    for slot in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(restored.slots[name][slot], optimizer.slots[name][slot][:, order])


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_parameter_with_a_column_for_each_feature_is_named(kind: str) -> None:
    config = CONFIGS[kind]
    model = build_model(BEFORE, config, seed=1)
    names = model.column_names()
    for parameter, by_dimension in names.items():
        shape = model.get_parameter(parameter).shape
        assert len(shape) == len(by_dimension)
        for size, columns in zip(shape, by_dimension, strict=True):
            assert columns is None or len(columns) == len(set(columns)) == size, parameter
    groups = ("ro floats", "nro floats", "ro lists", "nro lists")
    fresh = dense_checkpoint.weights_of_inputs(BEFORE, config, groups)
    assert fresh <= names.keys()


def test_decode_is_the_inverse_of_encode_and_rejects_invalid_names() -> None:
    names = build_model(BEFORE, SMALL, seed=1).column_names()
    assert decode({COLUMN_NAMES: encode(names)}) == names and decode({}) == {}
    for wrong in (b"\xff", b"[]", b'{"lists": [], "parameters": {"a": [0]}}'):
        with pytest.raises(CheckpointError, match=COLUMN_NAMES):
            decode({COLUMN_NAMES: np.frombuffer(wrong, np.uint8)})


@pytest.mark.parametrize(
    ("before", "now"),
    [((None, ("a",)), (None, ("a",))), ((("a", "b"),), (("a", "b"),)), ((("a", "b"), None), (None, None))],
    ids=["a name is missing", "a dimension is missing", "a dimension is not named"],
)
def test_names_that_do_not_fit_carry_nothing_over(
    before: named_columns.ColumnNames, now: named_columns.ColumnNames
) -> None:
    weights = np.ones((2, 2), np.float32)
    assert carry_over(weights, before, weights, now) is None
