"""The order of an answer, with a small share of it drawn at random, and how likely each draw was.

Policy (ε-greedy, slot by slot, ε = `exploration`): for each slot from the top, with probability ε take one of the remaining
candidates uniformly, otherwise the best of them. With m candidates remaining, the candidate that was taken had, given the
slots above it, the probability

    p = ε / m + (1 − ε) · [it is the best remaining]

That is the propensity logged with it; the product over a request's candidates is the probability of the whole order. With
ε = 0 nothing is drawn and none are logged (absent = 1). Draws are a function of (seed, key, request id, first position): a
client that repeats a request gets the same order.
"""

from __future__ import annotations

import random

import numpy as np

from roostream.schema.ids import hash64


def best_order(scores_n: np.ndarray) -> list[int]:
    """Candidates, best first; equal scores keep the request's order."""
    return np.argsort(-scores_n, kind="stable").tolist()


def explore(best: list[int], exploration: float, draw: random.Random) -> tuple[list[int], list[float]]:
    """(candidates in the order to show, propensity of each candidate, by candidate)."""
    remaining, order, propensities = list(best), [], [1.0] * len(best)
    while remaining:
        m = len(remaining)
        at = draw.randrange(m) if draw.random() < exploration else 0
        candidate = remaining.pop(at)
        order.append(candidate)
        propensities[candidate] = exploration / m + (1.0 - exploration) * (at == 0)
    return order, propensities


def draw_of(seed: int, key: bytes, request_id: str, first_position: int) -> random.Random:
    """The random numbers of a request."""
    return random.Random(hash64(key + request_id.encode() + f"/{seed}/{first_position}".encode()))
