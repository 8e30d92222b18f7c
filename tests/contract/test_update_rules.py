"""Every update rule: against its formula in float64, bit-equal when repeated, and safe at the edges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from param_server.rules import RULES


def adagrad(w: np.ndarray, a: np.ndarray, g: np.ndarray, lr: float) -> tuple[np.ndarray, np.ndarray]:
    a = a + g * g
    return w - lr * g / (np.sqrt(a) + 1e-8), a


def rowwise_adagrad(w: np.ndarray, a: np.ndarray, g: np.ndarray, lr: float) -> tuple[np.ndarray, np.ndarray]:
    a = a + (g * g).mean(axis=1, keepdims=True)
    return w - lr * g / (np.sqrt(a) + 1e-8), a


REFERENCE: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {"adagrad": adagrad, "rowwise_adagrad": rowwise_adagrad}


def test_every_rule_has_a_reference() -> None:
    assert set(REFERENCE) == set(RULES)


def start(rule: str, dim: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(dim)
    rows_ND = rng.normal(size=(20, dim)).astype(np.float32)
    return rows_ND, np.full((20, RULES[rule].accumulator_width(dim)), 0.1, np.float32)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dim", [1, 3, 16, 380])
def test_follows_its_formula_over_many_steps(rule: str, dim: int) -> None:
    rows_ND, accumulator_NA = start(rule, dim)
    w, a = rows_ND.astype(np.float64), accumulator_NA.astype(np.float64)
    rng = np.random.default_rng(1)
    for _ in range(50):
        place_U = rng.choice(20, 8, replace=False)
        gradient_UD = rng.normal(size=(8, dim)).astype(np.float32)
        RULES[rule].apply(rows_ND, accumulator_NA, place_U, gradient_UD, np.float32(0.05))
        w[place_U], a[place_U] = REFERENCE[rule](w[place_U], a[place_U], gradient_UD.astype(np.float64), float(np.float32(0.05)))
    np.testing.assert_allclose(rows_ND, w, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(accumulator_NA, a, rtol=2e-5)


@pytest.mark.parametrize("rule", RULES)
def test_leaves_other_rows_alone(rule: str) -> None:
    rows_ND, accumulator_NA = start(rule, 4)
    before = rows_ND.copy(), accumulator_NA.copy()
    RULES[rule].apply(rows_ND, accumulator_NA, np.array([7]), np.ones((1, 4), np.float32), np.float32(0.1))
    others = np.arange(20) != 7
    assert (rows_ND[others] == before[0][others]).all() and (accumulator_NA[others] == before[1][others]).all()
    assert (rows_ND[7] != before[0][7]).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_zero_gradient_on_a_zero_accumulator_changes_nothing(rule: str) -> None:
    rows_ND, accumulator_NA = start(rule, 4)
    accumulator_NA[:] = 0
    before = rows_ND.copy()
    RULES[rule].apply(rows_ND, accumulator_NA, np.arange(20), np.zeros((20, 4), np.float32), np.float32(0.1))
    assert (rows_ND == before).all() and not accumulator_NA.any()


@pytest.mark.parametrize("rule", RULES)
def test_a_huge_finite_gradient_leaves_rows_finite(rule: str) -> None:
    rows_ND, accumulator_NA = start(rule, 4)
    RULES[rule].apply(rows_ND, accumulator_NA, np.arange(20), np.full((20, 4), 3e38, np.float32), np.float32(0.1))
    assert np.isfinite(rows_ND).all()


@pytest.mark.parametrize("rule", RULES)
def test_the_same_steps_give_the_same_bits_however_they_are_cut(rule: str) -> None:
    gradient_UD = np.random.default_rng(2).normal(size=(20, 7)).astype(np.float32)
    whole, cut = start(rule, 7), start(rule, 7)
    RULES[rule].apply(*whole, np.arange(20), gradient_UD, np.float32(0.05))
    for part in (slice(0, 3), slice(3, 20)):
        RULES[rule].apply(*cut, np.arange(20)[part], gradient_UD[part], np.float32(0.05))
    assert whole[0].tobytes() == cut[0].tobytes() and whole[1].tobytes() == cut[1].tobytes()


@pytest.mark.parametrize("rule", RULES)
def test_a_row_given_twice_is_updated_twice(rule: str) -> None:
    twice, one_by_one = start(rule, 4), start(rule, 4)
    gradient_UD = np.ones((2, 4), np.float32)
    RULES[rule].apply(*twice, np.array([5, 5]), gradient_UD, np.float32(0.05))
    for n in range(2):
        RULES[rule].apply(*one_by_one, np.array([5]), gradient_UD[n : n + 1], np.float32(0.05))
    assert twice[0].tobytes() == one_by_one[0].tobytes()
