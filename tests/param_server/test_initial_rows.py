"""A row's initial value is a function of (seed, table, id), equal in all programs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from param_server.initial_rows import initial_rows
from roostream.schema.ids import MASK64, splitmix64


def expected_row(seed: int, table: int, id_: int, dim: int, scale: float) -> list[np.float32]:
    s = splitmix64(splitmix64(splitmix64(seed & MASK64) ^ table) ^ (id_ & MASK64))
    high_bits = [splitmix64((s + j) & MASK64) >> 40 for j in range(dim)]
    return [np.float32((k - 2**23) / 2**23) * np.float32(scale) for k in high_bits]


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    table=st.integers(0, 2**32 - 1),
    id_=st.integers(-(2**63), 2**63 - 1),
)
def test_initial_rows_equal_the_formula_in_plain_integers(seed: int, table: int, id_: int) -> None:
    rows = initial_rows(seed, np.array([table], np.uint32), np.array([id_], np.int64), 5, 0.05)
    assert rows[0].tolist() == [float(x) for x in expected_row(seed, table, id_, 5, 0.05)]


def test_golden_values_never_change() -> None:
    rows = initial_rows(7, np.array([1, 2], np.uint32), np.array([3, -4], np.int64), 3, 1.0)
    assert rows.tobytes().hex() == GOLDEN


GOLDEN = "a0486bbf680c39beb628443f006f8bbcc6dc433f166540bf"


def test_each_row_may_have_its_own_scale() -> None:
    tables, ids = np.zeros(2, np.uint32), np.array([1, 1], np.int64)
    rows = initial_rows(0, tables, ids, 4, np.array([0.0, 2.0], np.float32))
    assert not rows[0].any() and rows[1].all()
