"""A row's first value is a function of (seed, table, id), the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.initial_rows import initial_rows
from roostream.schema.ids import MASK64, splitmix64


def by_hand(seed: int, table: int, id_: int, dim: int, scale: float) -> list[np.float32]:
    s = splitmix64(splitmix64(splitmix64(seed & MASK64) ^ table) ^ (id_ & MASK64))
    tops = [splitmix64((s + j) & MASK64) >> 40 for j in range(dim)]
    return [np.float32((k - 2**23) / 2**23) * np.float32(scale) for k in tops]


@settings(deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    table=st.integers(0, 2**32 - 1),
    id_=st.integers(-(2**63), 2**63 - 1),
)
def test_equals_the_formula_in_plain_integers(seed: int, table: int, id_: int) -> None:
    rows = initial_rows(seed, np.array([table], np.uint32), np.array([id_], np.int64), 5, 0.05)
    assert rows[0].tolist() == [float(x) for x in by_hand(seed, table, id_, 5, 0.05)]


def test_golden_values_never_change() -> None:
    rows = initial_rows(7, np.array([1, 2], np.uint32), np.array([3, -4], np.int64), 3, 1.0)
    assert rows.tobytes().hex() == GOLDEN


GOLDEN = "a0486bbf680c39beb628443f006f8bbcc6dc433f166540bf"


def test_depends_on_seed_table_and_id_but_not_on_company() -> None:
    tables, ids = np.array([1, 1, 2], np.uint32), np.array([5, 6, 5], np.int64)
    together = initial_rows(0, tables, ids, 8, 0.1)
    assert len({row.tobytes() for row in together}) == 3
    for n in range(3):
        alone = initial_rows(0, tables[n : n + 1], ids[n : n + 1], 8, 0.1)
        assert alone.tobytes() == together[n].tobytes()
    assert not np.array_equal(initial_rows(1, tables, ids, 8, 0.1), together)


@pytest.mark.parametrize("scale", [0.0, 0.05, 3.0])
def test_is_uniform_within_the_scale(scale: float) -> None:
    rows = initial_rows(0, np.zeros(4000, np.uint32), np.arange(4000, dtype=np.int64), 8, scale)
    assert (np.abs(rows) <= np.float32(scale)).all()
    assert abs(float(rows.mean())) <= 0.02 * scale
    assert rows.std() == pytest.approx(scale / 3**0.5, rel=0.02)


def test_a_scale_for_each_row() -> None:
    tables, ids = np.zeros(2, np.uint32), np.array([1, 1], np.int64)
    rows = initial_rows(0, tables, ids, 4, np.array([0.0, 2.0], np.float32))
    assert not rows[0].any() and rows[1].all()
