"""The hidden model of simulated users: their tastes, the popularity of items, and the effect of positions.

Everything is a pure function of (seed, user, item, time), so a simulation can be resumed, and any order of
the same request can be evaluated later. The click probability is a product,

    click_probability = attraction(user, item, time) x examination(position),

so the best order is by decreasing attraction (rearrangement inequality), and a random order expects the mean
attraction times the sum of the examination probabilities.

Items live in slots. Slot s holds one item at a time, of generation g = floor((time + phase_s) / life_s) and
id (g << 20 | s) + 1. Each item has its own category, vector and quality.

Letters: n candidates, D latent dimensions, S slots.
"""

from __future__ import annotations

import dataclasses

import numpy as np

DIM = 8
NUM_CATEGORIES = 12
_SLOT_BITS = 20
_USER, _ITEM, _LIST, _SLOT = range(4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """Parameters of the hidden model; strengths are in logits."""

    seed: int = 0
    num_users: int = 500
    num_items: int = 300
    item_life_ms: int = 1_800_000
    mean_candidates: int = 20
    base: float = -2.5  # attraction of an average item to an average user
    popularity: float = 1.4  # spread of item quality
    taste: float = 2.0  # spread of personal taste
    drift: float = 0.7  # swing of an item's popularity over its life
    examination_power: float = 1.0  # position k is examined with probability (1 + k) ** -power


class World:
    """Users 1..num_users; times in ms since 1970."""

    def __init__(self, config: WorldConfig) -> None:
        self.config = config
        root = np.random.default_rng([config.seed, _SLOT])
        self.centers_CD = root.normal(size=(NUM_CATEGORIES, DIM)) / np.sqrt(DIM)
        self.life_S = (config.item_life_ms * root.uniform(0.5, 1.5, config.num_items)).astype(np.int64)
        self.phase_S = (self.life_S * root.uniform(0, 1, config.num_items)).astype(np.int64)
        self._items: dict[int, tuple[np.ndarray, float, float, int]] = {}

    def items_at(self, time_ms: int) -> np.ndarray:
        """int64 [S]: ids of the items alive at `time_ms`."""
        generation_S = (time_ms + self.phase_S) // self.life_S
        return ((generation_S << _SLOT_BITS) | np.arange(self.config.num_items)) + 1

    def category_of(self, item_id: int) -> int:
        """0..NUM_CATEGORIES - 1; the only property of an item that clients know."""
        return self._item(item_id)[3]

    def devices_of(self, user_id: int) -> tuple[int, ...]:
        """One to three device ids, the most used one first."""
        count = 1 + int(np.random.default_rng([self.config.seed, _USER, user_id, 1]).integers(0, 3))
        return tuple(user_id * 4 + k + 1 for k in range(count))

    def candidates_for(self, user_id: int, time_ms: int) -> np.ndarray:
        """int64 [n]: distinct ids alive now in random order; one in three is near the user's taste."""
        rng = np.random.default_rng([self.config.seed, _LIST, user_id, time_ms])
        mean = self.config.mean_candidates
        count = min(int(rng.integers(max(mean // 2, 2), mean + mean // 2 + 1)), self.config.num_items)
        alive = self.items_at(time_ms)
        drawn = rng.permutation(alive)[: min(3 * count, len(alive))]
        near = drawn[np.argsort(-self.taste(user_id, drawn), kind="stable")][: count // 3]
        rest = drawn[~np.isin(drawn, near)][: count - len(near)]
        return rng.permutation(np.concatenate([near, rest]))

    def attraction(self, user_id: int, items_n: np.ndarray, time_ms: int) -> np.ndarray:
        """float64 [n]: click probability of an examined item."""
        c = self.config
        logit_n = c.base + self.popularity(items_n, time_ms) + c.taste * self.taste(user_id, items_n)
        return 1 / (1 + np.exp(-logit_n))

    def examination(self, num_positions: int, first: int = 0) -> np.ndarray:
        """float64 [num_positions]: probability that each position is examined, from position `first` on."""
        return (1.0 + first + np.arange(num_positions)) ** -self.config.examination_power

    def read_seconds(self, user_id: int, item_id: int, time_ms: int, draw: float) -> float:
        """Reading time of a clicked item: log-normal around 12..60 s by taste; `draw` is standard normal."""
        liking = float(self.taste(user_id, np.array([item_id], dtype=np.int64))[0])
        return float(np.exp(np.log(25.0) + 0.5 * np.tanh(liking) + 0.6 * draw))

    def taste(self, user_id: int, items_n: np.ndarray) -> np.ndarray:
        vectors_nD = (
            np.stack([self._item(int(i))[0] for i in items_n]) if len(items_n) else np.zeros((0, DIM))
        )
        return vectors_nD @ self._user(user_id)

    def popularity(self, items_n: np.ndarray, time_ms: int) -> np.ndarray:
        c = self.config
        known = [self._item(int(i)) for i in items_n]
        quality_n = np.array([k[1] for k in known])
        phase_n = np.array([k[2] for k in known])
        turn_n = 2 * np.pi * (time_ms / (c.item_life_ms * 0.7) + phase_n)
        return c.popularity * quality_n + c.drift * np.sin(turn_n)

    def _user(self, user_id: int) -> np.ndarray:
        """Taste [D]: two favorite categories plus noise; dot products with items have a spread of about 1."""
        rng = np.random.default_rng([self.config.seed, _USER, user_id])
        first, second = rng.choice(NUM_CATEGORIES, size=2, replace=False)
        return (
            1.4 * self.centers_CD[first]
            + 0.9 * self.centers_CD[second]
            + 0.5 * rng.normal(size=DIM) / np.sqrt(DIM)
        )

    def _item(self, item_id: int) -> tuple[np.ndarray, float, float, int]:
        """(vector [D], quality, phase, category); the cache holds four times as many items as are alive."""
        item = self._items.get(item_id)
        if item is None:
            rng = np.random.default_rng([self.config.seed, _ITEM, item_id])
            category = int(rng.integers(NUM_CATEGORIES))
            vector_D = self.centers_CD[category] + 0.5 * rng.normal(size=DIM) / np.sqrt(DIM)
            item = (vector_D, float(rng.normal()), float(rng.uniform()), category)
            if len(self._items) >= 4 * self.config.num_items:
                self._items.clear()
            self._items[item_id] = item
        return item


@dataclasses.dataclass(frozen=True)
class ExpectedClicks:
    """Expected clicks on one list under three orders; `shown` is the number of candidates."""

    served: float
    random: float
    best: float
    shown: int


def expected_clicks(attraction_n: np.ndarray, examination_n: np.ndarray) -> ExpectedClicks:
    """`attraction_n` is in served order; `examination_n` belongs to the same positions."""
    return ExpectedClicks(
        served=float(attraction_n @ examination_n),
        random=float(attraction_n.mean() * examination_n.sum()) if len(attraction_n) else 0.0,
        best=float(np.sort(attraction_n)[::-1] @ np.sort(examination_n)[::-1]),
        shown=len(attraction_n),
    )
