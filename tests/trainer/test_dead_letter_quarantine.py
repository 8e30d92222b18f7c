"""An odd request costs itself; where all are odd, it isn't the requests."""

from __future__ import annotations

import pytest

from tests.trainer import samples
from tests.trainer.loops import Built, build
from tests.trainer.test_loop import poison
from trainer.chunks import Rejected
from trainer.dead_letter_quarantine import MAX_CONSECUTIVE, DeadLetterQuarantine, NotFiniteError

MANY = MAX_CONSECUTIVE + 8


def poisoned(built: Built, *users: int) -> Built:
    poison(built, *users)
    return built


@pytest.mark.parametrize("batch_requests", [4, MANY])
def test_many_consecutive_non_finite_requests_are_blamed_on_the_model(
    batch_requests: int,
) -> None:
    built = poisoned(
        build(samples.records(list(range(1, MANY + 1))), batch_requests=batch_requests), *range(1, MANY + 1)
    )
    with pytest.raises(NotFiniteError, match="state"):
        built.train_all()
    before = MAX_CONSECUTIVE - batch_requests if batch_requests < MAX_CONSECUTIVE else 0
    assert len(built.letters) == built.loop.counts.non_finite == before
    assert built.loop.quarantine.current is not None
    assert len(built.loop.quarantine.current.records) == batch_requests


def test_one_finite_request_shows_that_the_model_is_sound() -> None:
    odd = [n for n in range(1, MANY + 1) if n != MANY // 2]
    built = poisoned(build(samples.records(list(range(1, MANY + 1))), batch_requests=MANY), *odd).train_all()
    assert len(built.letters) == built.loop.counts.non_finite == MANY - 1 and len(built.predicted) == 1


def test_undecodable_records_are_dead_letters_and_do_not_count_against_the_model() -> None:
    built = build(samples.records([1, 2, 3, 4]))
    chunk = built.loop.source.poll(4, 0)
    assert chunk is not None
    dead: list[Rejected] = []
    burial = DeadLetterQuarantine(dead.append)
    for _ in range(2 * MAX_CONSECUTIVE):
        burial.begin(chunk)
        assert burial.settle() == 0 and burial.current is None
    assert not dead
