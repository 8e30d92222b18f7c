from __future__ import annotations

import pytest

from infra.restart import RestartPolicy, Restarts

POLICY = RestartPolicy(first_s=0.5, max_s=4.0, stable_s=60.0, max_restarts=6)


@pytest.mark.parametrize(
    ("deaths", "delay_s", "why"),
    [
        (1, 0.0, "a first death is repaired at once"),
        (2, 0.5, "then it waits"),
        (3, 1.0, "twice as long each time"),
        (5, 4.0, "up to a limit"),
        (6, 4.0, "which holds"),
        (7, None, "and then it is given up"),
    ],
)
def test_the_delay_grows_until_a_child_is_given_up(deaths: int, delay_s: float | None, why: str) -> None:
    assert POLICY.delay_s(deaths) == delay_s, why


def test_a_child_that_lived_long_starts_with_a_clean_sheet() -> None:
    restarts = Restarts(policy=POLICY)
    assert [restarts.died(1.0) for _ in range(3)] == [0.0, 0.5, 1.0]
    assert restarts.died(61.0) == 0.0
    assert restarts.total == 4


def test_a_kill_every_minute_is_repaired_at_once_however_often_it_comes() -> None:
    restarts = Restarts(policy=RestartPolicy())
    assert {restarts.died(60.0 - 8.0 - 10.0) for _ in range(60)} == {0.0}, (
        "less what starting and being killed take"
    )


def test_a_child_given_up_and_asked_for_again_gets_all_its_tries_again() -> None:
    restarts = Restarts(policy=POLICY)
    while restarts.died(0.0) is not None:
        pass
    assert restarts.total == POLICY.max_restarts
    restarts.forgive()
    assert restarts.died(0.0) == 0.0
