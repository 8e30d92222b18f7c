"""Every update rule follows its formula in float64, is bit-equal when repeated, and stays finite at its
limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

from param_server import kernels
from param_server.rules import KERNELS, MAX_GRADIENT, accumulators
from roostream.schema.update_rules import RULES, Adagrad, Adam, RowwiseAdagrad, Rule

State: TypeAlias = tuple[np.ndarray, np.ndarray]
"""(rows [N, D], state [N, A])"""


def adagrad(w: np.ndarray, a: np.ndarray, g: np.ndarray, rule: Any) -> State:
    a = a + g * g
    return w - rule.learning_rate * g / (np.sqrt(a) + rule.epsilon), a


def rowwise_adagrad(w: np.ndarray, a: np.ndarray, g: np.ndarray, rule: Any) -> State:
    a = a + (g * g).mean(axis=1, keepdims=True)
    return w - rule.learning_rate * g / (np.sqrt(a) + rule.epsilon), a


def adam(w: np.ndarray, state: np.ndarray, g: np.ndarray, rule: Any) -> State:
    dim = g.shape[1]
    t = state[:, 2 * dim :] + 1
    m = rule.beta1 * state[:, :dim] + (1 - rule.beta1) * g
    v = rule.beta2 * state[:, dim : 2 * dim] + (1 - rule.beta2) * g * g
    unbiased_m, unbiased_v = m / (1 - rule.beta1**t), v / (1 - rule.beta2**t)
    return w - rule.learning_rate * unbiased_m / (np.sqrt(unbiased_v) + rule.epsilon), np.hstack([m, v, t])


REFERENCE: dict[str, Callable[..., State]] = {
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "adam": adam,
}
NON_DEFAULT: dict[str, Rule] = {
    "adagrad": Adagrad(learning_rate=0.5, initial_accumulator=0.1, epsilon=1e-3),
    "rowwise_adagrad": RowwiseAdagrad(learning_rate=0.5, initial_accumulator=0.1, epsilon=1e-3),
    "adam": Adam(learning_rate=0.01, beta1=0.5, beta2=0.9, epsilon=1e-3),
}
"""Each rule with parameters that all differ from its defaults."""


def test_every_rule_has_a_kernel_and_a_reference() -> None:
    assert set(KERNELS) == set(REFERENCE) == set(NON_DEFAULT) == set(RULES)
    for name, rule in NON_DEFAULT.items():
        assert all(
            value != default for value, default in zip(rule.parameters, RULES[name]().parameters, strict=True)
        )


def initial_state(rule: Rule, dim: int) -> State:
    rows_ND = np.random.default_rng(dim).normal(size=(20, dim)).astype(np.float32)
    return rows_ND, np.full((20, rule.state_width(dim)), rule.first_state, np.float32)


def apply(
    state: State,
    rules: list[Rule],
    place_U: np.ndarray,
    gradient_UD: np.ndarray,
    rule_index_U: np.ndarray | None = None,
) -> None:
    """Apply gradients as a stack does whose tables have these rules. By default all rows belong to the first
    rule."""
    rule_index_U = np.zeros(len(place_U), np.int64) if rule_index_U is None else rule_index_U
    parameters_KP = np.array([rule.parameters for rule in rules], np.float64)
    KERNELS[rules[0].name](*state, place_U, gradient_UD, rule_index_U, parameters_KP)


RULE = pytest.mark.parametrize(
    "rule", [*(rule() for rule in RULES.values()), *NON_DEFAULT.values()], ids=lambda r: str(r.parameters)
)


@RULE
@pytest.mark.parametrize("dim", [1, 3, 380])
def test_a_rule_follows_its_formula_over_many_steps(rule: Rule, dim: int) -> None:
    rows_ND, state_NA = initial_state(rule, dim)
    w, state = rows_ND.astype(np.float64), state_NA.astype(np.float64)
    rng = np.random.default_rng(1)
    for _ in range(50):
        place_U = rng.choice(20, 8, replace=False)
        gradient_UD = rng.normal(size=(8, dim)).astype(np.float32)
        apply((rows_ND, state_NA), [rule], place_U, gradient_UD)
        w[place_U], state[place_U] = REFERENCE[rule.name](
            w[place_U], state[place_U], gradient_UD.astype(np.float64), rule
        )
    np.testing.assert_allclose(rows_ND, w, rtol=5e-5, atol=5e-6)
    np.testing.assert_allclose(state_NA, state, rtol=2e-5, atol=1e-6)


def test_adam_updates_a_row_like_torch_updates_it_alone() -> None:
    torch = pytest.importorskip("torch")
    rows_ND, state_NA = initial_state(Adam(), 5)
    weight = torch.tensor(rows_ND[3], requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=Adam().learning_rate)
    rng = np.random.default_rng(4)
    for step in range(300):
        gradient_UD = rng.normal(size=(2, 5)).astype(np.float32)
        apply(
            (rows_ND, state_NA),
            [Adam()],
            np.array([3, 7]) if step % 3 == 0 else np.array([9, 7]),
            gradient_UD,
        )
        if step % 3 == 0:
            weight.grad = torch.tensor(gradient_UD[0])
            optimizer.step()
    np.testing.assert_allclose(rows_ND[3], weight.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert state_NA[3, -1] == 100 and state_NA[7, -1] == 300 and state_NA[0, -1] == 0


@pytest.mark.parametrize("name", RULES)
def test_each_row_has_the_parameters_of_its_own_table(name: str) -> None:
    rules, rule_index_U = [RULES[name](), NON_DEFAULT[name]], np.arange(20) % 2
    gradient_UD = np.random.default_rng(3).normal(size=(20, 4)).astype(np.float32)
    mixed, separate = initial_state(rules[0], 4), initial_state(rules[0], 4)
    apply(mixed, rules, np.arange(20), gradient_UD, rule_index_U)
    for k, rule in enumerate(rules):
        apply(separate, [rule], np.flatnonzero(rule_index_U == k), gradient_UD[rule_index_U == k])
    assert mixed[0].tobytes() == separate[0].tobytes() and mixed[1].tobytes() == separate[1].tobytes()
    first_rule_only = initial_state(rules[0], 4)
    apply(first_rule_only, rules[:1], np.arange(20), gradient_UD)
    assert (first_rule_only[0][1] != mixed[0][1]).any() and (first_rule_only[0][0] == mixed[0][0]).all()


@RULE
def test_a_zero_gradient_without_state_changes_no_row(rule: Rule) -> None:
    rows_ND, state_NA = initial_state(rule, 4)
    state_NA[:] = 0
    before = rows_ND.copy()
    apply((rows_ND, state_NA), [rule], np.arange(20), np.zeros((20, 4), np.float32))
    assert (rows_ND == before).all() and np.isfinite(state_NA).all()


@RULE
def test_splitting_a_step_changes_no_bit(rule: Rule) -> None:
    gradient_UD = np.random.default_rng(2).normal(size=(20, 7)).astype(np.float32)
    whole, split = initial_state(rule, 7), initial_state(rule, 7)
    apply(whole, [rule], np.arange(20), gradient_UD)
    for part in (slice(0, 3), slice(3, 20)):
        apply(split, [rule], np.arange(20)[part], gradient_UD[part])
    assert whole[0].tobytes() == split[0].tobytes() and whole[1].tobytes() == split[1].tobytes()


@RULE
def test_a_row_given_twice_is_updated_twice(rule: Rule) -> None:
    twice, one_by_one = initial_state(rule, 4), initial_state(rule, 4)
    gradient_UD = np.ones((2, 4), np.float32)
    apply(twice, [rule], np.array([5, 5]), gradient_UD)
    for n in range(2):
        apply(one_by_one, [rule], np.array([5]), gradient_UD[n : n + 1])
    assert twice[0].tobytes() == one_by_one[0].tobytes()


@pytest.mark.parametrize("name", RULES)
def test_rows_stay_finite_at_the_limits_of_the_parameters(name: str) -> None:
    for field in dataclasses.fields(RULES[name]):
        bounds = field.metadata["bounds"]
        for value in (bounds.ge, min(bounds.le, 1e3)):
            rule = RULES[name](**{field.name: value})
            state = initial_state(rule, 3)
            for _ in range(5):
                apply(state, [rule], np.arange(20), np.full((20, 3), 1e20, np.float32))
            assert np.isfinite(state[0]).all(), (field.name, value)


@RULE
@pytest.mark.parametrize("start_at", [0.0, 2.0**65])
def test_gradients_within_the_bound_keep_the_state_finite(rule: Rule, start_at: float) -> None:
    """A large accumulator stops growing once a further square is lost in rounding, so any number of steps is
    safe."""
    rows_ND, state_NA = initial_state(rule, 4)
    state_NA[:, accumulators(rule.name, 4)] = start_at
    place_U, gradient_UD = np.arange(20), np.full((20, 4), MAX_GRADIENT, np.float32)
    for _ in range(200):
        apply((rows_ND, state_NA), [rule], place_U, gradient_UD)
    before = state_NA[:, accumulators(rule.name, 4)].copy()
    apply((rows_ND, state_NA), [rule], place_U, gradient_UD)
    assert np.isfinite(state_NA).all() and np.isfinite(rows_ND).all()
    if start_at:
        assert (state_NA[:, accumulators(rule.name, 4)] <= before).all()


def test_limiting_keeps_small_gradients_bit_equal_and_large_ones_in_direction() -> None:
    gradient_UD = np.array(
        [[1.5, -0.0, MAX_GRADIENT], [2 * MAX_GRADIENT, MAX_GRADIENT, 0], [3e38, -3e38, 1]], np.float32
    )
    out_UD = np.empty_like(gradient_UD)
    assert kernels.limit(gradient_UD, MAX_GRADIENT, out_UD) == 2
    assert out_UD[0].tobytes() == gradient_UD[0].tobytes()
    assert out_UD[1].tolist() == [MAX_GRADIENT, MAX_GRADIENT / 2, 0] and out_UD[2, :2].tolist() == [
        MAX_GRADIENT,
        -MAX_GRADIENT,
    ]
