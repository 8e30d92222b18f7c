"""Decoders accept valid bytes and reject all others with declared errors; `make fuzz` tries a million inputs
each."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.decoders import targets
from tests.fuzz.mutation import mutated

TARGETS = targets()
NEVER_REJECT = {"samples", "log-segment"}  # they report unreadable parts in their result


@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_accepts_its_seeds_and_rejects_random_changes(name: str) -> None:
    target, rng, taken = TARGETS[name], random.Random(7), 0
    assert all(target.try_one(seed) for seed in target.seeds)
    for _ in range(200):
        taken += target.try_one(mutated(mutated(rng.choice(target.seeds), rng), rng))
    assert taken < 200 or name in NEVER_REJECT
