"""The SIMD kernels, which process sixteen numbers at a time, equal numpy."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.models.simd import LANES, exponential, kernel, load, product, store

FLOATS = [np.float32, np.float64]


@kernel
def _exponentials(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.shape[0]):
        for j in range(0, x.shape[1], LANES):
            store(out, i, j, x.shape[1] - j, exponential(load(x, i, j, x.shape[1] - j, 0.0)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 17), (11, 2, 40), (3, 0, 5), (0, 3, 4)], ids=str)
def test_products_of_any_shape_and_memory_order(shape: tuple[int, int, int], dtype: type) -> None:
    i, k, j = shape
    rng = np.random.default_rng(0)
    a, b, out = (rng.standard_normal(s).astype(dtype) for s in ((i, k), (k, j), (i + 1, j + 1)))
    before = out.copy()
    for left in (a, np.ascontiguousarray(a.T).T):
        product(left, b, out[:i, :j])
        np.testing.assert_allclose(out[:i, :j], a @ b, rtol=1e-5 if dtype is np.float32 else 1e-12, atol=1e-5)
    assert (out[i] == before[i]).all() and (out[:, j] == before[:, j]).all(), (
        "memory outside the output must stay unchanged"
    )


@pytest.mark.parametrize(("dtype", "within"), [(np.float32, 3e-7), (np.float64, 5e-15)])
def test_exponentials(dtype: type, within: float) -> None:
    x = -np.linspace(0, 87, 1003, dtype=dtype)[None]
    out = np.zeros_like(x)
    _exponentials(x, out)
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=within)
    assert out[0, 0] == 1


def test_exponentials_of_very_small_numbers_and_nan() -> None:
    x, out = np.array([[-1e30, -np.inf, np.nan, -1.0]], dtype=np.float32), np.zeros((1, 4), dtype=np.float32)
    _exponentials(x, out)
    assert (
        (out[0, :2] < 2e-38).all()
        and (out[0, :2] >= 0).all()
        and np.isnan(out[0, 2])
        and out[0, 3] == np.float32(np.exp(-1))
    )
