"""Batches one after the other are the batch of all their records."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.jagged import Jagged
from tests.trainer import samples


def arrays(of: object) -> dict[str, object]:
    found: dict[str, object] = {}
    for field in dataclasses.fields(of):  # type: ignore[arg-type]
        value = getattr(of, field.name)
        found |= (
            {f"{field.name}.{k}": v for k, v in arrays(value).items()}
            if isinstance(value, Jagged)
            else {field.name: value}
        )
    return found


@settings(max_examples=25)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_concatenated_parts_equal_the_batch(sizes: list[int]) -> None:
    whole, _ = Decoder(samples.schema(), {}.get).decode(samples.records(list(range(1, 1 + sum(sizes)))))
    ends = np.cumsum(sizes)
    parts = [whole.take_requests(np.arange(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    got, expected = arrays(Batch.concat(parts)), arrays(whole)
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert got[name].dtype == value.dtype
            assert np.array_equal(got[name], value, equal_nan=value.dtype.kind == "f"), name  # type: ignore[union-attr, arg-type]
