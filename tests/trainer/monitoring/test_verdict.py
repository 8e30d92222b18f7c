"""The verdict states whether the model is better than the baselines on the same requests."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.monitoring.verdict import RULES, PairedRequests, RequestScores, Verdict, request_scores

_SIZE = 10  # candidates of a request; one of them is clicked


def scores_of(auc_N: np.ndarray, loss_N: np.ndarray | None = None) -> RequestScores:
    return RequestScores(auc_N, np.full(len(auc_N), 3.0) if loss_N is None else loss_N)


def add_model(paired: PairedRequests, ids: np.ndarray, scores: RequestScores, first: int = 0) -> None:
    """Add the model's scores of requests that are one second apart. The first request has the number
    `first`."""
    place_R = first + np.arange(len(ids))
    paired.add_model(
        ids.tolist(),
        scores,
        place_R=place_R,
        time_ms_R=place_R * 1000,
        candidates_R=np.full(len(ids), _SIZE),
        positives_R=np.ones(len(ids)),
    )


def verdict_of(model: RequestScores, rule: RequestScores, measure_from_ms: int = 0) -> Verdict:
    """Return the verdict on the model against `rule` (as `item`, the best baseline) and worse baselines.
    Model and baselines arrive in different portions and orders."""
    rng, paired, ids = np.random.default_rng(0), PairedRequests(), np.arange(len(model.auc_R))
    rules = {
        name: rule if name == "item" else RequestScores(rule.auc_R - 0.1, rule.log_loss_R + 0.5)
        for name in RULES
    }
    half = len(ids) // 2
    add_model(paired, ids[:half], RequestScores(*(x[:half] for x in model)))
    for part in np.array_split(rng.permutation(len(ids)), 3):
        paired.add_rules(part.tolist(), {n: RequestScores(*(x[part] for x in r)) for n, r in rules.items()})
    add_model(paired, ids[half:], RequestScores(*(x[half:] for x in model)), first=half)
    return paired.verdict(measure_from_ms)


def noise(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.3, 0.9, n)


def test_a_constant_difference_is_found_below_large_differences_between_requests() -> None:
    rule_N = noise(1000, 1)
    verdict = verdict_of(scores_of(rule_N + 0.002 + 0.001 * noise(1000, 2)), scores_of(rule_N))
    auc = verdict.request_auc
    assert verdict.state == auc.state == "ahead" and auc.nearest == "item" and auc.ahead_since == 1
    item = auc.baselines["item"]
    assert item.difference == pytest.approx(0.0026, abs=1e-4) and 0 < item.low < item.difference < item.high
    assert auc.baselines["place"].difference == pytest.approx(item.difference + 0.1)
    assert sum(window.request_auc.requests for window in verdict.windows) == 1000
    assert verdict.requests == auc.requests == 500, "the verdict uses the second half of the requests"
    assert "ahead since request 1 " in verdict.sentence()


def test_the_verdict_names_the_first_request_from_which_the_model_stays_ahead() -> None:
    rule_N = noise(2000, 3)
    model_N = rule_N + np.where(np.arange(2000) < 800, -0.05, 0.05)
    assert verdict_of(scores_of(model_N), scores_of(rule_N)).request_auc.ahead_since == 801
    assert verdict_of(scores_of(model_N), scores_of(rule_N), measure_from_ms=1_900_000).requests == 100


def test_a_window_in_which_the_model_is_behind_moves_the_first_request() -> None:
    rule_N = noise(2000, 3)
    model_N = rule_N + np.where(np.arange(2000) // 200 == 6, -0.05, 0.05)
    assert verdict_of(scores_of(model_N), scores_of(rule_N)).request_auc.ahead_since == 1401


def test_the_model_is_behind_if_one_baseline_is_better_by_more_than_its_interval() -> None:
    rule_N = noise(1000, 6)
    verdict = verdict_of(scores_of(rule_N - 0.05 + 0.01 * noise(1000, 7)), scores_of(rule_N))
    item = verdict.request_auc.baselines["item"]
    assert verdict.state == "behind" and item.low < item.difference < item.high < 0
    assert verdict.request_auc.baselines["linear"].low > 0, "the model is ahead of the other baselines"
    sentence = verdict.sentence()
    assert sentence.startswith(f"behind 'item' by {-item.difference:.4f} [{-item.high:.4f}, {-item.low:.4f}]")


def test_differences_within_the_interval_are_undecided() -> None:
    verdict = verdict_of(scores_of(noise(1000, 4)), scores_of(noise(1000, 5)))
    assert verdict.state == "undecided" and verdict.request_auc.ahead_since is None
    item = verdict.request_auc.baselines["item"]
    assert item.low < 0 < item.high and f"[{item.low:+.4f}, {item.high:+.4f}]" in verdict.sentence()


def test_an_undecided_verdict_names_a_baseline_whose_interval_contains_0() -> None:
    """Another baseline is nearer, but the model is clearly better than that one, because its interval is
    above 0."""
    paired, ids, base_N = PairedRequests(), np.arange(1000), noise(1000, 8)
    add_model(paired, ids, scores_of(base_N))
    near = scores_of(base_N - 0.01 + 0.01 * (noise(1000, 9) - 0.6))
    noisy = scores_of(base_N - 0.02 + 2.0 * (noise(1000, 10) - 0.6))
    paired.add_rules(ids.tolist(), dict.fromkeys(RULES, near) | {"place": noisy})
    auc = paired.verdict().request_auc
    assert auc.baselines["item"].low > 0 and auc.baselines["place"].low < 0 < auc.baselines["place"].high
    assert auc.baselines["item"].difference < auc.baselines["place"].difference
    assert auc.state == "undecided" and auc.nearest == "place"


def test_a_model_that_orders_well_is_behind_if_its_probabilities_are_worse() -> None:
    rule_N, loss_N = noise(1000, 1), noise(1000, 2)
    verdict = verdict_of(scores_of(rule_N + 0.05, loss_N + 0.1 * noise(1000, 3)), scores_of(rule_N, loss_N))
    assert (verdict.request_auc.state, verdict.ne.state, verdict.state) == ("ahead", "behind", "behind")
    first, second = verdict.sentence().split("; ")
    assert "in NE" in first and "ahead" in second


def test_requests_without_an_order_are_judged_by_ne_alone() -> None:
    rng = np.random.default_rng(4)
    auc_N, loss_N = np.full(1000, np.nan), rng.uniform(0.5, 2, 1000)
    verdict = verdict_of(scores_of(auc_N, loss_N - 0.1 * rng.random(1000)), scores_of(auc_N, loss_N))
    assert (verdict.request_auc.state, verdict.ne.state, verdict.state) == ("unknown", "ahead", "ahead")


def test_scores_that_are_no_probabilities_are_judged_by_request_auc_alone() -> None:
    """As of a first label with the objective "amount", whose baselines predict its probability."""
    rng, requests = np.random.default_rng(5), 1000
    index_B, positive_B = np.repeat(np.arange(requests), 2), np.tile([True, False], requests)
    rules = scores_of(noise(requests, 1), noise(requests, 2))
    arguments = (rng.random(2 * requests), positive_B, index_B, requests)
    verdict = verdict_of(request_scores(*arguments, is_probability=False), rules)
    assert (verdict.state, verdict.ne.state, verdict.ne.requests) == ("behind", "unknown", 0)
    assert verdict.sentence().endswith("NE not defined for the first label")
    assert verdict_of(request_scores(*arguments), rules).ne.state == "behind"


def test_ne_and_its_interval_equal_those_of_a_bootstrap() -> None:
    """NE equals its definition. The interval equals that of 2,000 resamples of requests, in which the base
    rate varies too."""
    rng, n = np.random.default_rng(5), 600
    size_N = rng.integers(1, 30, n)
    index_B = np.repeat(np.arange(n), size_N)
    truth_B = rng.beta(1, 6, len(index_B))
    positive_B = rng.random(len(index_B)) < truth_B
    sides = {name: np.clip(truth_B + rng.normal(0, s, len(index_B)), 0.01, 0.9) for name, s in _NOISE.items()}
    scored = {name: request_scores(p_B, positive_B, index_B, n) for name, p_B in sides.items()}
    paired = PairedRequests(rules=("rule",))
    paired.add_rules(range(n), {"rule": scored["rule"]})
    positive_N = np.bincount(index_B, positive_B, n)
    paired.add_model(
        range(n),
        scored["model"],
        place_R=np.arange(n),
        time_ms_R=np.arange(n),
        candidates_R=size_N,
        positives_R=positive_N,
    )
    found = paired.verdict(measure_from_ms=1).ne
    kept = np.arange(1, n)
    assert found.requests == len(kept)

    def difference(chosen: np.ndarray) -> float:
        rate = positive_N[chosen].sum() / size_N[chosen].sum()
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
        losses = (scored["model"].log_loss_R - scored["rule"].log_loss_R)[chosen]
        return float(losses.sum() / size_N[chosen].sum() / entropy)

    resampled = [difference(rng.choice(kept, len(kept))) for _ in range(2000)]
    low, high = np.quantile(resampled, (0.025, 0.975))
    rule = found.baselines["rule"]
    assert rule.difference == pytest.approx(difference(kept), rel=1e-12)
    assert (rule.low, rule.high) == pytest.approx((low, high), abs=0.1 * (high - low))


_NOISE = {"model": 0.05, "rule": 0.08}


def test_equal_models_are_called_ahead_or_behind_in_few_runs() -> None:
    """Four baselines differ from the model by noise only. At most about 5 % of the verdicts are wrong."""
    rng, wrong = np.random.default_rng(6), 0
    for _ in range(200):
        paired, ids = PairedRequests(), np.arange(400)
        add_model(paired, ids, scores_of(rng.random(400)))
        paired.add_rules(ids.tolist(), {name: scores_of(rng.random(400)) for name in RULES})
        wrong += paired.verdict().request_auc.state != "undecided"
    assert wrong <= 20


def test_weights_of_requests_count() -> None:
    paired, ids = PairedRequests(rules=("rule",)), np.arange(200)
    auc_N = np.where(ids % 2, 0.9, 0.1)
    paired.add_rules(ids.tolist(), {"rule": scores_of(np.full(200, 0.5))})
    paired.add_model(
        ids.tolist(),
        scores_of(auc_N),
        place_R=ids,
        time_ms_R=ids + 1,
        candidates_R=np.full(200, _SIZE),
        positives_R=np.ones(200),
        weight_R=np.where(ids % 2, 3.0, 1.0),
    )
    assert paired.verdict(measure_from_ms=1).request_auc.model == pytest.approx(0.7)


def test_few_requests_or_positives_have_no_verdict() -> None:
    verdict = verdict_of(scores_of(noise(150, 7)), scores_of(noise(150, 8)))
    assert verdict.state == "unknown" and "at least 100" in verdict.sentence()
    assert PairedRequests().verdict().state == "unknown"


def test_requests_with_positives_only_have_no_verdict_and_it_says_what_is_missing() -> None:
    paired, ids, scores = PairedRequests(), np.arange(300), scores_of(np.full(300, np.nan))
    paired.add_rules(ids.tolist(), dict.fromkeys(RULES, scores))
    paired.add_model(
        ids.tolist(),
        scores,
        place_R=ids,
        time_ms_R=ids + 1,
        candidates_R=np.full(300, _SIZE),
        positives_R=np.full(300, _SIZE),
        weight_R=np.ones(300),
    )
    verdict = paired.verdict()
    assert verdict.state == "unknown" and "negative" in verdict.sentence()


def test_requests_that_only_one_side_scored_do_not_count() -> None:
    paired, ids = PairedRequests(), np.arange(300)
    add_model(paired, ids, scores_of(np.ones(300)))
    paired.add_rules([*range(100, 300)], dict.fromkeys(RULES, scores_of(np.zeros(200))))
    assert paired.verdict().requests == 100


def test_a_limit_keeps_the_newest_requests() -> None:
    paired = PairedRequests(max_requests=200)
    for start in range(0, 1000, 100):
        ids = np.arange(start, start + 100)
        add_model(paired, ids, scores_of(np.full(100, 0.9)), first=start)
        paired.add_rules(ids.tolist(), dict.fromkeys(RULES, scores_of(np.full(100, 0.5))))
    assert next(w.first_request for w in paired.verdict().windows) == 801
    assert sum(w.request_auc.requests for w in paired.verdict().windows) == 200


def test_intervals_are_compared_with_the_best_baseline_of_each() -> None:
    paired, ids = PairedRequests(), np.arange(250)
    better = np.where(ids < 100, 0.5, 0.7)
    add_model(paired, ids, scores_of(np.full(250, 0.6)))
    rules = {name: scores_of(better if name == "recent" else np.full(250, 0.55)) for name in RULES}
    paired.add_rules(ids.tolist(), rules)
    first, second = paired.between((0, 100, 300, 1000))
    assert (first.last_request, first.requests) == (100, 100)
    assert (second.last_request, second.requests) == (300, 150)
    assert first.difference[0] == pytest.approx(0.05) and second.difference[0] == pytest.approx(-0.1)
    assert second.rules["recent"] == pytest.approx(0.7)
    by_ne = paired.between((0, 100, 300), "ne")
    assert [at.requests for at in by_ne] == [100, 150]
    assert all(at.model - min(at.rules.values()) == pytest.approx(at.difference[0]) for at in by_ne)
