"""The verdict compares model and baselines on the same requests."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.cli.replay.verdict import RULES, PairedRequests, Verdict, likely_reasons
from roostream.schema.schema import Feature, Label, Schema, Table, Transform

TABLES = (Table(name="item", dim=4),)
LABELS = (Label(name="click", action="click"),)
BARE = Schema(name="bare", tables=TABLES, labels=LABELS, nro=(Feature(name="price"),))
RICH = Schema(
    name="rich",
    tables=TABLES,
    labels=LABELS,
    ro=(Feature(name="history", kind="sequence", table="item", online="history"),),
    nro=(Feature(name="item", kind="ids", table="item"), Feature(name="ctr_1h", online="ctr_1h")),
    transforms=(Transform(output="ctr_1h_rank", input="ctr_1h", op="rank"),),
)


def compared(model_N: np.ndarray, rule_N: np.ndarray, measure_from_ms: int = 0) -> Verdict:
    """Requests in order; `item` is the best rule. The two sides arrive in different portions."""
    rng, paired, ids = np.random.default_rng(0), PairedRequests(), np.arange(len(model_N))
    rules = {name: rule_N - (0.0 if name == "item" else 0.1) for name in RULES}
    order = rng.permutation(len(ids))
    half = len(ids) // 2
    paired.add_model(ids[:half].tolist(), ids[:half], ids[:half] * 1000, model_N[:half])
    for part in np.array_split(order, 3):
        paired.add_rules(part.tolist(), {name: x[part] for name, x in rules.items()})
    paired.add_model(ids[half:].tolist(), ids[half:], ids[half:] * 1000, model_N[half:])
    return paired.verdict(measure_from_ms)


def noise(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.3, 0.9, n)


def test_a_constant_difference_is_found_below_large_differences_between_requests() -> None:
    rule_N = noise(1000, 1)
    verdict = compared(rule_N + 0.002 + 0.001 * noise(1000, 2), rule_N)
    assert verdict.state == "ahead" and verdict.baseline == "item" and verdict.ahead_since == 1
    assert verdict.difference is not None and verdict.difference[0] == pytest.approx(0.0026, abs=1e-4)
    assert sum(window.requests for window in verdict.windows) == 1000
    assert "since request 1:" in verdict.sentence()


def test_the_request_from_which_on_the_model_is_ahead_is_named() -> None:
    rule_N = noise(2000, 3)
    model_N = rule_N + np.where(np.arange(2000) < 800, -0.05, 0.05)
    assert compared(model_N, rule_N).ahead_since == 801
    assert compared(model_N, rule_N, measure_from_ms=1_900_000).requests == 100


def test_intervals_are_compared_with_the_best_baseline_of_each() -> None:
    paired, ids = PairedRequests(), list(range(250))
    place_N = np.arange(250)
    better = np.where(place_N < 100, 0.5, 0.7)
    paired.add_model(ids, place_N, place_N * 1000, np.full(250, 0.6))
    paired.add_rules(ids, {name: better if name == "recent" else np.full(250, 0.55) for name in RULES})
    first, second = paired.between((0, 100, 300, 1000))
    assert (first.last_request, first.requests) == (100, 100)
    assert (second.last_request, second.requests) == (300, 150)
    assert first.difference[0] == pytest.approx(0.05) and second.difference[0] == pytest.approx(-0.1)
    assert second.rules["recent"] == pytest.approx(0.7)


def test_differences_within_the_interval_are_level() -> None:
    verdict = compared(noise(1000, 4), noise(1000, 5))
    assert verdict.state == "level" and verdict.ahead_since is None


def test_a_model_that_is_behind_has_at_most_three_reasons_with_a_setting() -> None:
    rule_N = noise(1000, 6)
    verdict = compared(rule_N - 0.05, rule_N)
    assert verdict.state == "behind"
    reasons = likely_reasons(verdict, BARE, num_requests=1000)
    assert len(reasons) == 3 and "ctr" in reasons[0] and '"item"' in reasons[1] and "history" in reasons[2]
    assert "batch_requests" in likely_reasons(verdict, RICH, num_requests=1000)[0]
    assert "model.KEY" in likely_reasons(verdict, RICH, num_requests=50_000)[0]


def test_few_requests_have_no_verdict() -> None:
    verdict = compared(noise(150, 7), noise(150, 8))
    assert verdict.state == "unknown" and "at least 100" in verdict.sentence()
    assert likely_reasons(verdict, BARE, num_requests=150) == []


def test_requests_that_only_one_side_scored_do_not_count() -> None:
    paired, ids = PairedRequests(), np.arange(300)
    paired.add_model(ids.tolist(), ids, ids, np.ones(300))
    paired.add_rules([*range(100, 300)], dict.fromkeys(RULES, np.zeros(200)))
    assert paired.verdict().requests == 100
