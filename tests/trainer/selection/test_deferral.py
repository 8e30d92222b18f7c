"""Deferral collects the gradients of rows that hardly change and pushes them later. No gradient is lost, and
a row that changes again is pushed at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.lookup import Lookup, StackLookup
from trainer.selection.config import DeferralConfig
from trainer.selection.deferral import Deferral, GradientPush

STACK, D, RATE = "d2-adagrad", 2, 0.1


def schema(expire_after_ms: int = 0, dim: int = D) -> Schema:
    return schema_from_dict(
        {
            "tables": {"user": {"dim": dim, "expire_after_ms": expire_after_ms}},
            "ro": [{"name": "user", "kind": "ids", "table": "user"}],
            "label": [{"name": "click", "action": "click", "fold": "any"}],
        }
    )


class SimulatedRows:
    """Simulated embedding rows. They start at zero, decrease by RATE times the pushed gradients, and record
    the given and the pushed gradients of each row."""

    def __init__(self, deferral: Deferral) -> None:
        self.deferral, self.table = deferral, deferral.schema.tables[0].id
        self.value: dict[int, np.ndarray] = {}
        self.given: dict[int, np.ndarray] = {}
        self.pushed: dict[int, np.ndarray] = {}
        self.num_pushes: dict[int, int] = {}

    def visit(self, gradients: dict[int, float], now_ms: int = 0) -> None:
        ids = np.array(list(gradients), np.int64)
        keys = StackLookup(np.full(len(ids), self.table, np.uint32), ids, {})
        row_UD = np.array([self.value.get(i, np.zeros(D)) for i in gradients], np.float32).reshape(-1, D)
        gradient_UD = np.repeat(np.array(list(gradients.values()), np.float32)[:, None], D, axis=1)
        for i, g_D in zip(gradients, gradient_UD, strict=True):
            self.given[i] = self.given.get(i, np.zeros(D)) + g_D
        self.apply(self.deferral.take(Lookup({STACK: keys}), {STACK: row_UD}, {STACK: gradient_UD}, now_ms))

    def apply(self, pushed: GradientPush | None) -> None:
        if pushed is None:
            return
        for i, g_D in zip(pushed.lookup.stacks[STACK].id_U.tolist(), pushed.gradients[STACK], strict=True):
            self.value[i] = self.value.get(i, np.zeros(D)) - RATE * g_D
            self.pushed[i] = self.pushed.get(i, np.zeros(D)) + g_D
            self.num_pushes[i] = self.num_pushes.get(i, 0) + 1


def make_rows(**settings: float) -> SimulatedRows:
    return SimulatedRows(Deferral(DeferralConfig(**{"share": 0.5, "min_visits": 3, **settings}), schema()))  # type: ignore[arg-type]


def expected_pushes(
    config: DeferralConfig, batches: list[tuple[list[int], np.ndarray, np.ndarray, int]], late_ms: int
) -> list[list[Any]]:
    """Compute the pushes for each batch of (ids, rows, gradients, time) by the formula in the module
    docstring of trainer/selection/deferral.py."""
    known: dict[int, dict[str, Any]] = {}
    recent, T, out = list[np.float32](), np.float32(-np.inf), []
    f, zero_D = np.float32, np.zeros(D, np.float32)
    for take, (ids, row_UD, gradient_UD, now_ms) in enumerate(batches, 1):
        for i, row_D in zip(ids, row_UD, strict=True):
            state = known.setdefault(
                i, {"v": 0, "m": f(np.inf), "b": zero_D, "c": 0, "carried": 0, "pushed_ms": 0, "w": zero_D}
            )
            if state["carried"]:
                d = f(
                    math.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(row_D, state["w"], strict=True)))
                    / state["carried"]
                )
                state["m"], state["carried"] = (
                    d if np.isinf(state["m"]) else f(0.9) * state["m"] + (f(1) - f(0.9)) * d,
                    0,
                )
            state["v"] += 1
            if state["v"] >= config.min_visits and np.isfinite(state["m"]):
                recent = [*recent, state["m"]][-config.window :]
        if recent and (take < 8 or take % 8 == 0):
            T = sorted(recent)[math.ceil(config.share * len(recent) - 1e-9) - 1]
        pushed = []
        for i, row_D, g_D in zip(ids, row_UD, gradient_UD, strict=True):
            state = known[i]
            is_calm, may_wait = state["m"] <= T, now_ms - state["pushed_ms"] < late_ms
            if state["v"] >= config.min_visits and is_calm and state["c"] < config.visits - 1 and may_wait:
                state["b"], state["c"] = state["b"] + g_D, state["c"] + 1
                continue
            pushed.append((i, (state["b"] + g_D).tobytes()))
            state.update(w=row_D, b=zero_D, carried=state["c"] + 1, c=0, pushed_ms=now_ms)
        out.append(pushed)
    return out


def visit_still_and_moving_row(rows: SimulatedRows, visits: int) -> None:
    """Visit row 1, which hardly changes, and row 2, which does."""
    for _ in range(visits):
        rows.visit({1: 1e-4, 2: 1.0})


@pytest.mark.parametrize("expire_after_ms", [0, 120])
def test_pushes_equal_those_of_the_formula_bit_for_bit(expire_after_ms: int) -> None:
    config = DeferralConfig(share=0.6, min_visits=3, visits=4, window=200)
    deferral, random = Deferral(config, schema(expire_after_ms)), np.random.default_rng(7)
    batches = []
    for step in range(150):
        ids = random.permutation(np.unique(random.zipf(1.4, 12) % 60)).tolist()
        scale_U1 = np.array([[0.01 if i % 3 else 1.0] for i in ids])
        row_UD, gradient_UD = (
            (random.normal(size=(len(ids), D)) * scale_U1).astype(np.float32) for _ in range(2)
        )
        batches.append((ids, row_UD, gradient_UD, 5 * step))
    num_waited = 0
    for (ids, *arrays, now_ms), expected in zip(
        batches, expected_pushes(config, batches, expire_after_ms // 4 or 1 << 62), strict=True
    ):
        row_UD, gradient_UD = arrays
        keys = StackLookup(np.full(len(ids), deferral.schema.tables[0].id, np.uint32), np.array(ids), {})
        pushed = deferral.take(Lookup({STACK: keys}), {STACK: row_UD}, {STACK: gradient_UD}, now_ms)
        pushed_rows = pushed.lookup.stacks[STACK]
        assert pushed_rows.table_U.tolist() == [deferral.schema.tables[0].id] * len(expected)
        assert [
            (i, g.tobytes()) for i, g in zip(pushed_rows.id_U.tolist(), pushed.gradients[STACK], strict=True)
        ] == expected
        num_waited += len(ids) - len(expected)
    assert num_waited > 50


def test_a_row_that_hardly_moves_is_deferred_until_it_moves_again() -> None:
    rows = make_rows(visits=4)
    visit_still_and_moving_row(rows, 200)
    assert rows.num_pushes[2] == 200, "a row that changes is pushed at each visit"
    assert 50 <= rows.num_pushes[1] < 75, "the first visits are pushed, then one in four"
    report = rows.deferral.report()
    assert report["row_visits"] == 400 and report["row_pushes"] == 200 + rows.num_pushes[1]
    for _ in range(80):
        rows.visit({1: 3.0, 2: 1.0})
    before = rows.num_pushes[1]
    rows.visit({1: 3.0, 2: 1.0})
    assert rows.num_pushes[1] == before + 1 and rows.deferral.report()["unfrozen_rows"]


def test_a_flush_pushes_all_deferred_gradients() -> None:
    rows, random = make_rows(visits=8), np.random.default_rng(0)
    for _ in range(300):
        ids = np.unique(random.integers(0, 30, 8))
        rows.visit({int(i): float(random.normal() * (0.001 if i % 2 else 1)) for i in ids})
    assert rows.deferral.num_waiting > 0
    rows.apply(rows.deferral.flush())
    assert rows.deferral.num_waiting == 0 and rows.deferral.flush() is None
    for i, given_D in rows.given.items():
        np.testing.assert_allclose(rows.pushed[i], given_D, rtol=1e-5, atol=1e-6)


def test_choice_random_defers_rows_independently_of_movement() -> None:
    config = DeferralConfig(share=0.5, min_visits=3, visits=4, choice="random")
    rows = SimulatedRows(Deferral(config, schema()))
    for _ in range(40):
        rows.visit({i: 1.0 for i in range(40)})
    waited = [i for i, pushes in rows.num_pushes.items() if pushes < 40]
    assert 10 <= len(waited) <= 30


def test_the_number_of_watched_rows_is_bounded_and_no_gradient_is_lost() -> None:
    rows, random = make_rows(visits=8, max_rows=16), np.random.default_rng(1)
    for step in range(150):
        new = {1000 + 4 * step + n: 1.0 for n in range(4)}
        rows.visit({**{i: 1e-4 for i in range(3)}, **new})
        assert all(len(stack.rows) <= 16 for stack in rows.deferral.stacks.values())
        if random.random() < 0.02:
            rows.visit({5_000_000 + n: 1.0 for n in range(40)})
    assert rows.deferral.report()["row_deferred_share"] > 0.1  # type: ignore[operator]
    rows.apply(rows.deferral.flush())
    for i, given_D in rows.given.items():
        np.testing.assert_allclose(rows.pushed[i], given_D, rtol=1e-5)


def test_g11_a_restored_state_continues_bit_for_bit() -> None:
    first = make_rows(visits=4, max_rows=40)
    random = np.random.default_rng(2)
    batches = [
        {int(i): float(random.normal()) for i in np.unique(random.integers(0, 60, 10))} for _ in range(120)
    ]
    for gradients in batches[:70]:
        first.visit(gradients)
    saved = {name: value.copy() for name, value in first.deferral.state().items()}
    second = make_rows(visits=4, max_rows=40)
    second.deferral.load(saved)
    second.value, second.num_pushes = dict(first.value), dict(first.num_pushes)
    for gradients in batches[70:]:
        first.visit(gradients)
        second.visit(gradients)
    assert first.num_pushes == second.num_pushes
    assert all((first.value[i] == second.value[i]).all() for i in first.value)
    assert {k: v.tobytes() for k, v in first.deferral.state().items()} == {
        k: v.tobytes() for k, v in second.deferral.state().items()
    }


def test_a_longer_window_counts_only_visits_that_were_saved() -> None:
    short, long = make_rows(visits=4, window=8), make_rows(visits=4, window=64)
    for _ in range(40):
        short.visit({i: 1.0 for i in range(1, 5)})
    long.deferral.load(short.deferral.state())
    (before,), (after,) = short.deferral.stacks.values(), long.deferral.stacks.values()
    assert before.num_recent > len(before.recent) and after.num_recent == len(before.recent)


def test_rows_of_another_width_or_an_unknown_table_are_forgotten() -> None:
    rows = make_rows()
    visit_still_and_moving_row(rows, 20)
    saved = rows.deferral.state()
    wider = Deferral(rows.deferral.config, schema(dim=4))
    wider.load({name.replace("d2-", "d4-"): value for name, value in saved.items()})
    assert len(wider.stacks["d4-adagrad"].rows) == 0
    saved[f"deferral.{STACK}.table"] = saved[f"deferral.{STACK}.table"] + np.uint32(1)
    other = make_rows()
    other.deferral.load(saved)
    assert len(other.deferral.stacks[STACK].rows) == 0
