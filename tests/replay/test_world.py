"""The simulated world: items, users, and how likely users click."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.replay.world import World, WorldConfig, expected_clicks

T0 = 1_800_000_000_000


def test_the_seed_determines_the_world() -> None:
    a, b, other = World(WorldConfig(seed=1)), World(WorldConfig(seed=1)), World(WorldConfig(seed=2))
    items = a.candidates_for(7, T0)
    assert np.array_equal(items, b.candidates_for(7, T0))
    assert np.array_equal(a.attraction(7, items, T0), b.attraction(7, items, T0))
    assert not np.array_equal(a.attraction(7, items, T0), other.attraction(7, items, T0))


def test_candidates_are_alive_and_distinct() -> None:
    world = World(WorldConfig())
    for user in range(1, 30):
        items = world.candidates_for(user, T0 + user)
        assert 10 <= len(items) <= 30
        assert len(set(items.tolist())) == len(items)
        assert np.isin(items, world.items_at(T0 + user)).all()


def test_items_are_replaced_gradually() -> None:
    world = World(WorldConfig(num_items=200, item_life_ms=600_000))
    before, soon, later = world.items_at(T0), world.items_at(T0 + 30_000), world.items_at(T0 + 1_200_000)
    assert 0 < (~np.isin(soon, before)).sum() < 40
    assert not np.isin(later, before).any()


def test_no_order_beats_the_best_and_random_is_the_mean_of_all() -> None:
    rng = np.random.default_rng(0)
    attraction, examination = rng.random(6), World(WorldConfig()).examination(6)
    clicks = expected_clicks(attraction, examination)
    served_clicks = [
        expected_clicks(attraction[rng.permutation(6)], examination).served for _ in range(20_000)
    ]
    assert max(served_clicks) <= clicks.best + 1e-12
    assert clicks.random == pytest.approx(np.mean(served_clicks), rel=0.01)


def test_ranking_by_popularity_or_by_taste_beats_random_by_far() -> None:
    """A perfect ranker that knows only popularity, or only taste, gets over 1.4 times the clicks of a random
    order. The demo promises 1.3 times."""
    world = World(WorldConfig())
    sums = dict.fromkeys(("random", "best", "popular", "taste"), 0.0)
    for k in range(400):
        user, now = 1 + k % 100, T0 + 700 * k
        items = world.candidates_for(user, now)
        attraction, examination = world.attraction(user, items, now), world.examination(len(items))
        clicks = expected_clicks(attraction, examination)
        sums["random"] += clicks.random
        sums["best"] += clicks.best
        sums["popular"] += float(attraction[np.argsort(-world.popularity(items, now))] @ examination)
        sums["taste"] += float(attraction[np.argsort(-world.taste(user, items))] @ examination)
    assert sums["best"] / sums["random"] > 1.7
    assert sums["popular"] / sums["random"] > 1.4
    assert sums["taste"] / sums["random"] > 1.4
