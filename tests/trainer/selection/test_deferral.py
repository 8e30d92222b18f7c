"""Gradients of rows that hardly move wait, none is lost, and a row that moves again is pushed at once."""

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


class Rows:
    """Rows at zero that go down by RATE times what is pushed; and what was given for each in all."""

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


def build(**settings: float) -> Rows:
    return Rows(Deferral(DeferralConfig(**{"share": 0.5, "min_visits": 3, **settings}), schema()))  # type: ignore[arg-type]


def by_hand(
    config: DeferralConfig, batches: list[tuple[list[int], np.ndarray, np.ndarray, int]], late_ms: int
) -> list[list[Any]]:
    """What is pushed of each batch of (ids, rows, gradients, time), as the module's first lines say it."""
    known: dict[int, dict[str, Any]] = {}
    recent, T, out = list[np.float32](), np.float32(-np.inf), []
    f, zero_D = np.float32, np.zeros(D, np.float32)
    for take, (ids, row_UD, gradient_UD, now_ms) in enumerate(batches, 1):
        for i, row_D in zip(ids, row_UD, strict=True):
            its = known.setdefault(
                i, {"v": 0, "m": f(np.inf), "b": zero_D, "c": 0, "carried": 0, "pushed_ms": 0, "w": zero_D}
            )
            if its["carried"]:
                d = f(
                    math.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(row_D, its["w"], strict=True)))
                    / its["carried"]
                )
                its["m"], its["carried"] = (
                    d if np.isinf(its["m"]) else f(0.9) * its["m"] + (f(1) - f(0.9)) * d,
                    0,
                )
            its["v"] += 1
            if its["v"] >= config.min_visits and np.isfinite(its["m"]):
                recent = [*recent, its["m"]][-config.window :]
        if recent and (take < 8 or take % 8 == 0):
            T = sorted(recent)[math.ceil(config.share * len(recent) - 1e-9) - 1]
        pushed = []
        for i, row_D, g_D in zip(ids, row_UD, gradient_UD, strict=True):
            its = known[i]
            is_calm, may_wait = its["m"] <= T, now_ms - its["pushed_ms"] < late_ms
            if its["v"] >= config.min_visits and is_calm and its["c"] < config.visits - 1 and may_wait:
                its["b"], its["c"] = its["b"] + g_D, its["c"] + 1
                continue
            pushed.append((i, (its["b"] + g_D).tobytes()))
            its.update(w=row_D, b=zero_D, carried=its["c"] + 1, c=0, pushed_ms=now_ms)
        out.append(pushed)
    return out


def still_and_moving(rows: Rows, visits: int) -> None:
    """Row 1 hardly moves, row 2 does."""
    for _ in range(visits):
        rows.visit({1: 1e-4, 2: 1.0})


@pytest.mark.parametrize("expire_after_ms", [0, 120])
def test_what_is_pushed_is_what_a_dictionary_of_rows_would_push_to_the_bit(expire_after_ms: int) -> None:
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
        batches, by_hand(config, batches, expire_after_ms // 4 or 1 << 62), strict=True
    ):
        row_UD, gradient_UD = arrays
        keys = StackLookup(np.full(len(ids), deferral.schema.tables[0].id, np.uint32), np.array(ids), {})
        pushed = deferral.take(Lookup({STACK: keys}), {STACK: row_UD}, {STACK: gradient_UD}, now_ms)
        its = pushed.lookup.stacks[STACK]
        assert its.table_U.tolist() == [deferral.schema.tables[0].id] * len(expected)
        assert [
            (i, g.tobytes()) for i, g in zip(its.id_U.tolist(), pushed.gradients[STACK], strict=True)
        ] == expected
        num_waited += len(ids) - len(expected)
    assert num_waited > 50


def test_a_row_that_hardly_moves_waits_and_is_pushed_at_every_kth_visit() -> None:
    rows = build(visits=4)
    still_and_moving(rows, 200)
    assert rows.num_pushes[2] == 200, "what moves is pushed at each visit"
    assert 50 <= rows.num_pushes[1] < 75, "the first visits, then one in four"
    report = rows.deferral.report()
    assert report["row_visits"] == 400 and report["row_pushes"] == 200 + rows.num_pushes[1]


def test_no_gradient_is_lost_and_a_flush_ends_all_waiting() -> None:
    rows, random = build(visits=8), np.random.default_rng(0)
    for _ in range(300):
        ids = np.unique(random.integers(0, 30, 8))
        rows.visit({int(i): float(random.normal() * (0.001 if i % 2 else 1)) for i in ids})
    assert rows.deferral.num_waiting > 0
    rows.apply(rows.deferral.flush())
    assert rows.deferral.num_waiting == 0 and rows.deferral.flush() is None
    for i, given_D in rows.given.items():
        np.testing.assert_allclose(rows.pushed[i], given_D, rtol=1e-5, atol=1e-6)


def test_the_control_takes_rows_by_chance_whatever_they_do() -> None:
    config = DeferralConfig(share=0.5, min_visits=3, visits=4, choice="random")
    rows = Rows(Deferral(config, schema()))
    for _ in range(40):
        rows.visit({i: 1.0 for i in range(40)})
    waited = [i for i, pushes in rows.num_pushes.items() if pushes < 40]
    assert 10 <= len(waited) <= 30


@pytest.mark.parametrize("settings", [{"visits": 1}, {"share": 0.0}])
def test_without_waiting_every_gradient_goes_out_as_it_is(settings: dict[str, float]) -> None:
    rows = build(**settings)
    assert not rows.deferral.config.is_on
    keys = StackLookup(np.full(3, rows.table, np.uint32), np.arange(3), {})
    for n in range(40):
        gradient_UD = np.random.default_rng(n).normal(size=(3, D)).astype(np.float32)
        zero = {STACK: np.zeros((3, D), np.float32)}
        pushed = rows.deferral.take(Lookup({STACK: keys}), zero, {STACK: gradient_UD}, 0)
        assert pushed.gradients[STACK].tobytes() == gradient_UD.tobytes()
        assert pushed.lookup.stacks[STACK].id_U.tolist() == [0, 1, 2]


def test_a_row_that_moves_again_is_pushed_within_k_visits_and_waits_no_more_within_ten_pushes() -> None:
    rows = build(visits=8, window=400)
    still_and_moving(rows, 150)
    before = rows.num_pushes[1]
    for _ in range(8):
        rows.visit({1: 3.0, 2: 1.0})
    assert rows.num_pushes[1] > before
    visits_per_push = []
    for _ in range(10):
        start, n = rows.num_pushes[1], 0
        while rows.num_pushes[1] == start:
            rows.visit({1: 3.0, 2: 1.0})
            n += 1
        visits_per_push.append(n)
    assert visits_per_push[-1] == 1 and rows.deferral.report()["unfrozen_rows"]


def test_a_row_whose_table_expires_is_pushed_in_time() -> None:
    rows = Rows(Deferral(DeferralConfig(share=0.5, visits=1000, min_visits=3), schema(expire_after_ms=400)))
    pushed_at = [0]
    for now_ms in range(0, 4000, 10):
        before = rows.num_pushes.get(1, 0)
        rows.visit({1: 1e-4, 2: 1.0}, now_ms)
        if rows.num_pushes[1] > before:
            pushed_at.append(now_ms)
    assert max(np.diff(pushed_at)) == 100, "a quarter of expire_after_ms"


def test_no_more_rows_are_remembered_than_there_is_room_for_and_none_that_waits_is_forgotten() -> None:
    rows, random = build(visits=8, max_rows=16), np.random.default_rng(1)
    for step in range(400):
        new = {1000 + 4 * step + n: 1.0 for n in range(4)}
        rows.visit({**{i: 1e-4 for i in range(3)}, **new})
        assert all(len(its.rows) <= 16 for its in rows.deferral.stacks.values())
        if random.random() < 0.02:
            rows.visit({5_000_000 + n: 1.0 for n in range(40)})
    assert rows.deferral.report()["row_deferred_share"] > 0.1  # type: ignore[operator]
    rows.apply(rows.deferral.flush())
    for i, given_D in rows.given.items():
        np.testing.assert_allclose(rows.pushed[i], given_D, rtol=1e-5)


def test_what_waits_goes_with_its_row_when_it_gets_the_place_of_one_that_gave_way() -> None:
    rows = build(visits=100, max_rows=16)
    rows.visit({i: 1.0 for i in range(13)})
    for _ in range(20):
        rows.visit({1000 + i: 1e-4 * (i + 1) for i in range(2)} | {2000: 1.0})
    (its,) = rows.deferral.stacks.values()
    (before,) = its.rows.find(np.array([rows.table], np.uint32), np.array([1000]))
    assert rows.deferral.num_waiting
    rows.visit({3000 + i: 1.0 for i in range(12)})
    (after,) = its.rows.find(np.array([rows.table], np.uint32), np.array([1000]))
    assert after < before, "it moved"
    assert not its.b_ND[its.state_N["c"] == 0].any(), "and left nothing behind"
    rows.apply(rows.deferral.flush())
    for i, given_D in rows.given.items():
        np.testing.assert_allclose(rows.pushed[i], given_D, rtol=1e-5)


def test_of_rows_visited_equally_long_ago_the_first_give_way_but_none_of_the_batch() -> None:
    rows = build(max_rows=16)
    rows.visit({i: 1.0 for i in range(16)})
    rows.visit({1: 1.0, **{100 + i: 1.0 for i in range(4)}})
    (its,) = rows.deferral.stacks.values()
    asked = [*range(16), 100, 101, 102, 103]
    number = its.rows.find(np.full(len(asked), rows.table, np.uint32), np.array(asked))
    assert [i for i, n in zip(asked, number, strict=True) if n < 0] == [0, 2, 3, 4]
    assert its.state_N["v"][number[1]] == 2, "it was not forgotten in between"


def test_places_are_made_for_many_at_a_time_and_a_place_that_nobody_has_is_in_no_state() -> None:
    rows, made = build(visits=4, max_rows=1 << 12), set()
    for step in range(200):
        rows.visit({10 * step + n: 1.0 for n in range(10)})
        (its,) = rows.deferral.stacks.values()
        made.add(len(its.b_ND))
        assert not any(x.ctypes.data % 64 for x in (its.state_N, its.b_ND, its.w_ND)), (
            "a row is in as few lines of a cache as may be"
        )
        assert len(its.state_N) == len(its.b_ND) == len(its.w_ND) >= len(its.rows)
    assert len(its.rows) == 2000 and len(made) <= 10, "not for each batch"
    state = rows.deferral.state()
    prefix = f"deferral.{STACK}."
    assert {
        len(state[prefix + name])
        for name in ("table", "id", "b", "w", "v", "m", "c", "carried", "pushed_ms", "seen")
    } == {2000}
    for step in range(200, 900):
        rows.visit({10 * step + n: 1.0 for n in range(10)})
    assert max(len(its.b_ND), len(its.rows)) <= 1 << 12, "no more places than rows that may be"


def test_who_is_restored_from_what_was_kept_goes_on_in_the_same_bits() -> None:
    first = build(visits=4, max_rows=40)
    random = np.random.default_rng(2)
    batches = [
        {int(i): float(random.normal()) for i in np.unique(random.integers(0, 60, 10))} for _ in range(120)
    ]
    for gradients in batches[:70]:
        first.visit(gradients)
    kept = {name: value.copy() for name, value in first.deferral.state().items()}
    second = build(visits=4, max_rows=40)
    second.deferral.load(kept)
    second.value, second.num_pushes = dict(first.value), dict(first.num_pushes)
    for gradients in batches[70:]:
        first.visit(gradients)
        second.visit(gradients)
    assert first.num_pushes == second.num_pushes
    assert all((first.value[i] == second.value[i]).all() for i in first.value)
    assert {k: v.tobytes() for k, v in first.deferral.state().items()} == {
        k: v.tobytes() for k, v in second.deferral.state().items()
    }


def test_a_width_or_a_table_of_before_is_forgotten() -> None:
    rows = build()
    still_and_moving(rows, 20)
    kept = rows.deferral.state()
    wider = Deferral(rows.deferral.config, schema(dim=4))
    wider.load({name.replace("d2-", "d4-"): value for name, value in kept.items()})
    assert len(wider.stacks["d4-adagrad"].rows) == 0
    kept[f"deferral.{STACK}.table"] = kept[f"deferral.{STACK}.table"] + np.uint32(1)
    other = build()
    other.deferral.load(kept)
    assert len(other.deferral.stacks[STACK].rows) == 0
