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
def test_nothing_but_odd_requests_is_the_model_s_own_state_and_none_of_the_last_is_dead(
    batch_requests: int,
) -> None:
    built = poisoned(
        build(samples.records(list(range(1, MANY + 1))), batch_requests=batch_requests), *range(1, MANY + 1)
    )
    with pytest.raises(NotFiniteError, match="state"):
        built.train_all()
    before = MAX_CONSECUTIVE - batch_requests if batch_requests < MAX_CONSECUTIVE else 0
    assert len(built.letters) == built.loop.counts.non_finite == before
    assert (
        built.loop.quarantine.current is not None
        and len(built.loop.quarantine.current.records) == batch_requests
    )


def test_one_request_that_is_finite_among_many_that_are_not_shows_that_the_model_is_in_order() -> None:
    odd = [n for n in range(1, MANY + 1) if n != MANY // 2]
    built = poisoned(build(samples.records(list(range(1, MANY + 1))), batch_requests=MANY), *odd).train_all()
    assert len(built.letters) == built.loop.counts.non_finite == MANY - 1 and len(built.predicted) == 1


def test_a_restore_begins_the_count_anew() -> None:
    built = poisoned(build(samples.records(list(range(1, MANY + 1)))), *range(1, MANY + 1))
    for _ in range(3):
        built.loop.step()
    built.loop.reset()
    for _ in range(3):
        built.loop.step()
    assert built.loop.counts.non_finite == 24


def test_what_can_t_be_decoded_is_dead_at_once_and_is_no_sign() -> None:
    built = build(samples.records([1, 2, 3, 4]))
    chunk = built.loop.source.poll(4, 0)
    assert chunk is not None
    dead: list[Rejected] = []
    burial = DeadLetterQuarantine(dead.append)
    for _ in range(2 * MAX_CONSECUTIVE):
        burial.begin(chunk)
        assert burial.settle() == 0 and burial.current is None
    assert not dead
