"""Every decoder accepts its valid inputs and rejects mutated ones only with the errors it declares. `make
fuzz` tries a million inputs per decoder; this test tries 200."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.decoders import targets
from tests.fuzz.mutation import mutate_input

TARGETS = targets()
NEVER_REJECT = {"samples", "log-segment"}  # these decoders report unreadable parts in their result


@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_accepts_its_seeds_and_rejects_random_changes(name: str) -> None:
    target, rng, num_accepted = TARGETS[name], random.Random(7), 0
    assert all(target.accepts(seed) for seed in target.seeds)
    for _ in range(200):
        num_accepted += target.accepts(mutate_input(mutate_input(rng.choice(target.seeds), rng), rng))
    assert num_accepted < 200 or name in NEVER_REJECT
