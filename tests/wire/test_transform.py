"""Transforms of float features equal their definitions and do not depend on the rest of the batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.rebatch import concatenate
from roostream.schema.schema import Schema
from roostream.wire import transform
from roostream.wire.batch import Batch
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.decode import Decoder
from tests.wire.sample_builders import parse_schema

TEXT = """
[[ro]]
name = "gap"
default = 3.0
[[nro]]
name = "ctr"
default = 0.5
[[nro]]
name = "age"
[[label]]
name = "click"
action = "click"
[[transform]]
output = "age"
input = "age"
op = "log1p"
[[transform]]
output = "ctr_rank"
input = "ctr"
op = "rank"
[[transform]]
output = "ctr_share"
input = "ctr"
op = "share"
[[transform]]
output = "age_clip"
input = "age"
op = "clip"
low = -1
high = 2
[[transform]]
output = "gap_z"
input = "gap"
op = "standardize"
mean = 1
std = 4
[[transform]]
output = "rank_rank"
input = "ctr_rank"
op = "rank"
[[transform]]
output = "ctr_log"
input = "ctr"
op = "log"
"""


@pytest.fixture(scope="module")
def ranked() -> Schema:
    return parse_schema(TEXT)


def batch_of(
    schema: Schema, ctr: list[float | None], age: list[float | None], gap: float | None = None
) -> Batch:
    nro = encode_nro(schema, {"ctr": ctr, "age": age}, len(ctr))
    ids = np.arange(len(ctr), dtype=np.int64)
    return Decoder(schema, lambda _: None).decode_request(encode_ro(schema, {"gap": gap}), nro, ids, 0)


def test_outputs_are_in_declared_order(ranked: Schema) -> None:
    assert transform.output_names(ranked, "ro") == ("gap", "gap_z")
    assert transform.output_names(ranked, "nro") == (
        "ctr",
        "age",
        "ctr_rank",
        "ctr_share",
        "age_clip",
        "rank_rank",
        "ctr_log",
    )


def test_every_operation_equals_its_definition(ranked: Schema) -> None:
    transform.precompile()
    ro, nro = transform.apply_transforms(
        batch_of(ranked, [0.0, 3.0, None, 1.0, 0.5], [0.0, 1.0, -1.0, 100.0, None], gap=7.0)
    )
    columns = dict(zip(transform.output_names(ranked, "nro"), nro.T.tolist(), strict=True))
    assert ro.tolist() == [[7.0, 1.5]]
    assert columns["ctr"] == [0.0, 3.0, 0.5, 1.0, 0.5]
    assert columns["age"] == np.array([0, np.log(2), -np.log(2), np.log(101), 0], np.float32).tolist()
    assert columns["ctr_rank"] == [0.0, 1.0, 0.375, 0.75, 0.375]
    assert columns["ctr_share"] == np.array([0, 3 / 5, 0.1, 0.2, 0.1], np.float32).tolist()
    assert columns["age_clip"] == np.array([0, np.log(2), -np.log(2), 2, 0], np.float32).tolist()
    assert columns["rank_rank"] == columns["ctr_rank"]
    logs = np.log([1e-9, 3.0, 0.5, 1.0, 0.5])
    assert columns["ctr_log"] == logs.astype(np.float32).tolist(), "0 counts as 1e-9"


@pytest.mark.parametrize(
    ("ctr", "rank", "share"),
    [
        ([], [], []),
        ([4.0], [0.5], [1.0]),
        ([0.0], [0.5], [0.0]),
        ([2.0, 2.0], [0.5, 0.5], [0.5, 0.5]),
        ([-1.0, 1.0], [0.0, 1.0], [0.0, 1.0]),
        ([-1.0, -2.0], [1.0, 0.0], [0.0, 0.0]),
    ],
)
def test_edge_cases_of_rank_and_share(
    ranked: Schema, ctr: list[float], rank: list[float], share: list[float]
) -> None:
    nro = transform.apply_transforms(batch_of(ranked, list(ctr), [0.0] * len(ctr)))[1]
    assert nro[:, 2].tolist() == rank and nro[:, 3].tolist() == share


def test_results_stay_finite_at_the_edge_of_float32() -> None:
    schema = parse_schema(TEXT.replace("std = 4", "std = 1e-30"))
    ro, _ = transform.apply_transforms(batch_of(schema, [1.0], [1.0], gap=3e38))
    assert ro[0, 1] == np.finfo(np.float32).max


@settings(max_examples=50)
@given(
    lists=st.lists(st.lists(st.floats(-100, 100, width=32) | st.none(), max_size=9), min_size=1, max_size=6)
)
def test_a_request_gives_the_same_bits_alone_and_in_any_batch(
    ranked: Schema, lists: list[list[float | None]]
) -> None:
    alone = [batch_of(ranked, values, values[::-1], gap=float(i)) for i, values in enumerate(lists)]
    ro, nro = transform.apply_transforms(concatenate(alone))
    assert ro.tobytes() == b"".join(transform.apply_transforms(b)[0].tobytes() for b in alone)
    assert nro.tobytes() == b"".join(transform.apply_transforms(b)[1].tobytes() for b in alone)
    assert np.isfinite(nro).all()
