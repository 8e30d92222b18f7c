"""`build_inputs` turns a batch and its rows into the tensors that models read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from roostream.models.feature_encoders import pool_features
from roostream.models.inputs import (
    INPUT_NAMES,
    build_inputs,
    changed_inputs,
    input_names_tensor,
    time_buckets,
)
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.lookup import build_lookup
from roostream.wire.transform import apply_transforms
from tests.models.model_cases import CASES, inputs_of, make_batch, make_rows, make_schema


def test_rows_are_wrapped_without_a_copy_and_are_leaves_when_training() -> None:
    schema = make_schema("everything")
    batch = make_batch(schema, [2, 3])
    lookup = build_lookup(batch)
    rows = make_rows(schema, lookup)
    for train in (True, False):
        inputs = build_inputs(batch, lookup, rows, train=train)
        for stack, rows_UD in inputs.rows.items():
            assert rows_UD.data_ptr() == rows[stack].ctypes.data
            assert rows_UD.is_leaf and rows_UD.requires_grad == train


def test_read_only_arrays_are_accepted() -> None:
    schema = make_schema("candidate only")
    batch = make_batch(schema, [2])
    lookup = build_lookup(batch)
    rows = make_rows(schema, lookup)
    for array in (*rows.values(), batch.nro_float_BF, batch.request_index_B):
        array.flags.writeable = False
    assert build_inputs(batch, lookup, rows).nro_float_BG.shape == (2, 1)


def test_floats_are_asinh_of_the_transformed_ones() -> None:
    schema = make_schema("everything")
    batch = make_batch(schema, [2, 3])
    inputs = inputs_of(batch)
    ro, nro = apply_transforms(batch)
    np.testing.assert_array_equal(inputs.ro_float_RG, np.arcsinh(ro))
    np.testing.assert_array_equal(inputs.nro_float_BG, np.arcsinh(nro))
    assert inputs.nro_float_BG.shape[1] == 4  # ctr, age_s, ctr_rank, ctr_share
    assert inputs.ro_present_RP.shape[1] == len(schema.ro)


@pytest.mark.parametrize("case", CASES)
def test_pooling_is_the_mean_or_the_sum_weighted_by_asinh(case: str) -> None:
    schema = make_schema(case)
    batch = make_batch(schema, [2, 0, 3, 1])
    lookup = build_lookup(batch)
    rows = make_rows(schema, lookup)
    pooled = pool_features(build_inputs(batch, lookup, rows))
    for side, jagged in (("ro", batch.ro_lists), ("nro", batch.nro_lists)):
        for f in schema.lists(side):  # type: ignore[arg-type]
            stack = schema.table_by_name[f.table].stack
            offsets, index = jagged.offsets_of(f.name), lookup.stacks[stack].index[f.name]
            weights = jagged.weights_of(f.name)
            for n in range(jagged.num_rows):
                rows_of_list = rows[stack][index[offsets[n] : offsets[n + 1]]]
                if f.kind == "weighted_ids" and weights is not None:
                    expected = (rows_of_list * np.arcsinh(weights[offsets[n] : offsets[n + 1], None])).sum(
                        axis=0
                    )
                else:
                    expected = rows_of_list.sum(axis=0) / max(len(rows_of_list), 1)
                np.testing.assert_allclose(pooled[f.name][n], expected, atol=1e-6)


def test_gradients_of_rows_are_compact() -> None:
    schema = make_schema("candidate only")
    batch = make_batch(schema, [4, 4], seed=3)
    lookup = build_lookup(batch)
    inputs = build_inputs(batch, lookup, make_rows(schema, lookup), train=True)
    pool_features(inputs)["item"].sum().backward()
    (stack,) = [s for s, part in lookup.stacks.items() if len(part.id_U)]
    gradient = inputs.rows[stack].grad
    lengths = batch.nro_lists.lengths_KN[0]
    share = np.repeat(1 / np.maximum(lengths, 1), lengths)
    expected = np.bincount(
        lookup.stacks[stack].index["item"], weights=share, minlength=len(lookup.stacks[stack].id_U)
    )
    assert gradient is not None and gradient.shape == (len(expected), 4)
    torch.testing.assert_close(
        gradient, torch.from_numpy(np.repeat(expected[:, None], 4, axis=1).astype(np.float32))
    )


def test_a_sequence_is_jagged_and_its_padded_form_has_the_same_entries() -> None:
    schema = make_schema("everything")
    batch = make_batch(schema, [2, 0, 3, 1])
    lookup = build_lookup(batch)
    sequence = build_inputs(batch, lookup, make_rows(schema, lookup)).sequences["history"]
    length_R = batch.ro_lists.lengths_KN[batch.ro_lists.index("history")].tolist()
    assert sequence.length_R.tolist() == length_R
    assert sequence.offset_R1.tolist() == [0, *np.cumsum(length_R).tolist()]
    stack = lookup.stacks[schema.table_by_name["item"].stack]
    assert stack.id_U[sequence.index_L.numpy()].tolist() == batch.ro_lists.values_of("history").tolist()
    gap_ms = np.repeat(batch.time_ms_R, length_R) - batch.ro_lists.columns["history.time"]
    assert sequence.bucket_L["time"].tolist() == time_buckets(gap_ms).tolist()
    assert list(sequence.column_L) == ["action"] and len(sequence.column_L["action"]) == sum(length_R)
    with_candidates = [0, 2, 3]
    assert sequence.shape_RN == (3, max(length_R[r] for r in with_candidates))
    padded = sequence.pad(sequence.index_L).view(sequence.shape_RN)
    mask_RN = (
        torch.ones(sequence.shape_RN, dtype=torch.bool) if sequence.mask_RN is None else sequence.mask_RN
    )
    for row, mask, r in zip(padded, mask_RN, with_candidates, strict=True):
        assert (
            row[mask].tolist() == sequence.index_L[sequence.offset_R1[r] : sequence.offset_R1[r + 1]].tolist()
        )


def test_time_buckets_equal_the_formula() -> None:
    seconds = np.array([0, 1, 2, 10, 59, 3600, 86_400, 10**7], dtype=np.int64)
    expected = [math.floor(math.log(max(s, 1)) / 0.301) for s in seconds.tolist()]
    assert time_buckets(seconds * 1000).tolist() == expected
    # An event may be later than its request if a clock ran ahead.
    assert time_buckets(-seconds * 1000).tolist() == expected
    steps = time_buckets(np.arange(0, 10_000_000, 1000))
    assert (np.diff(steps) >= 0).all()
    assert time_buckets(np.array([2**63 - 1])).tolist() == [122]


def test_the_order_of_the_tables_of_columns_is_part_of_the_names_of_inputs() -> None:
    """Models read the columns of an entry in this order, which the fingerprint does not cover."""

    def declare(*columns: str) -> Schema:
        history: dict[str, Any] = {"name": "history", "kind": "sequence", "table": "item"}
        history |= {"columns": dict.fromkeys(("shop", "brand"), "ids")}
        history |= {"column_tables": dict.fromkeys(columns, "item")}
        return schema_from_dict(
            {
                "tables": {"item": {"dim": 4}},
                "ro": [history],
                "label": [{"name": "click", "action": "click"}],
            }
        )

    one, other = declare("shop", "brand"), declare("brand", "shop")
    assert one.fingerprint == other.fingerprint
    commit = {INPUT_NAMES: input_names_tensor(one)}
    assert changed_inputs(commit, other) and not changed_inputs(commit, one)
