"""Decoders accept valid bytes and reject all others with declared errors; `make fuzz` tries a million inputs
each."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.decoders import Target, targets
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


def test_an_undeclared_error_is_reported() -> None:
    target = Target(read=lambda data: data[9], seeds=(bytes(10),))
    assert target.try_one(bytes(10))
    with pytest.raises(IndexError):
        target.try_one(b"")


def test_mutations_are_bounded_and_reproducible() -> None:
    data = b'{"a": [1, {"b": null}]}'
    found = {mutated(data, random.Random(n)) for n in range(200)}
    assert len(found) > 100 and all(len(one) <= 4096 for one in found)
    assert mutated(data, random.Random(3)) == mutated(data, random.Random(3))
    assert len(mutated(bytes(5000), random.Random(1))) <= 4096
