"""Building a batch from columns: interleaved float columns equal numpy's result bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.schema.schema import Feature, Label, Schema
from roostream.wire.batch import Batch
from roostream.wire.columnar import (
    MAX_COLUMNS,
    FlatColumn,
    batch_from_columns,
    columns_of,
    interleave_columns,
)
from tests.warehouse.sample_cases import (
    assert_same_batch,
    decode_records,
    rich_records,
    rich_schema,
    same_bits,
)

SPECIAL_FLOATS = np.array(
    [0x7FC12345, 0x80000000, 0x7F800000, 0xFF800000, 0xFFC00000, 1, 0x7F800001], dtype=np.uint32
).view(np.float32)
"""Three different NaNs, minus zero, both infinities and the smallest positive number."""


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 700])
@pytest.mark.parametrize("count", [1, 3, 4, 7, MAX_COLUMNS])
def test_interleaved_columns_keep_their_bits_and_defaults(rows: int, count: int) -> None:
    rng = np.random.default_rng(rows + count)
    columns = [
        rng.choice(np.concatenate([SPECIAL_FLOATS, rng.normal(size=9).astype(np.float32)]), rows)
        for _ in range(count)
    ]
    default_F = rng.normal(size=count + 2).astype(np.float32)
    float_NF = np.full((rows, count + 2), 5, dtype=np.float32)
    present_NF = np.ones((rows, count + 2), dtype=np.bool_)
    bits = [values.view(np.uint32) for values in columns]
    interleave_columns(
        tuple(bits + bits[:1] * (MAX_COLUMNS - count)),
        count,
        1,
        default_F.view(np.uint32),
        float_NF.view(np.uint32),
        present_NF,
    )
    for n, values in enumerate(columns, 1):
        assert same_bits(present_NF[:, n], ~np.isnan(values))
        assert same_bits(float_NF[:, n], np.where(np.isnan(values), default_F[n], values))
    assert (float_NF[:, [0, -1]] == 5).all() and present_NF[:, [0, -1]].all(), (
        "other columns must stay unchanged"
    )


def batch_of_many_floats() -> Batch:
    """Build a batch with more floats than one kernel call interleaves. Some have a default, some are
    missing."""
    nro = tuple(Feature(name=f"f{n}", default=float(n % 3)) for n in range(2 * MAX_COLUMNS + 5))
    schema = Schema(nro=nro, labels=(Label(name="click", action="click"),))
    empty = decode_records(rich_schema(), rich_records(rich_schema(), 40))
    counts_R, rng = empty.num_candidates_R, np.random.default_rng(1)
    columns = {
        name: column for name, column in columns_of(empty).items() if not name.startswith(("ro__", "nro__"))
    }
    for feature in nro[1:]:
        values = rng.normal(size=int(counts_R.sum())).astype(np.float32)
        values[rng.random(len(values)) < 0.3] = np.nan
        values.flags.writeable = rng.random() < 0.5
        columns[f"nro__{feature.name}"] = FlatColumn(values)
    batch = batch_from_columns(schema, columns, counts_R, 3)
    for n, feature in enumerate(nro):
        found = columns.get(
            f"nro__{feature.name}", FlatColumn(np.full(batch.num_candidates, np.nan, dtype=np.float32))
        ).values
        assert same_bits(
            batch.nro_float_BF[:, n], np.where(np.isnan(found), np.float32(feature.default), found)
        ), feature.name
        assert same_bits(batch.nro_present_BF[:, n], ~np.isnan(found)), feature.name
    return batch


def test_more_floats_than_one_kernel_call_and_an_absent_float() -> None:
    batch = batch_of_many_floats()
    assert_same_batch(batch_from_columns(batch.schema, columns_of(batch), batch.num_candidates_R, 3), batch)


def test_a_column_with_another_number_of_rows_is_rejected() -> None:
    batch = batch_of_many_floats()
    columns = columns_of(batch)
    with pytest.raises(AssertionError):
        batch_from_columns(
            batch.schema,
            {**columns, "nro__f4": FlatColumn(np.zeros(1, np.float32))},
            batch.num_candidates_R,
            3,
        )
