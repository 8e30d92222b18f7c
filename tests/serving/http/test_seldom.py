"""One line a minute of each kind."""

from __future__ import annotations

import logging

from serving.http.seldom import MAX_KINDS, Seldom, SeldomFilter, kind_of


class Hand:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_each_kind_is_due_once_a_minute_and_tells_how_many_were_left_out() -> None:
    hand = Hand()
    seldom = Seldom(hand)
    assert [seldom.due("a") for _ in range(4)] == [0, None, None, None] and seldom.due("b") == 0
    hand.now_s = 59.9
    assert seldom.due("a") is None
    hand.now_s = 60.0
    assert seldom.due("a") == 4 and seldom.due("b") == 0


def test_kinds_are_bounded() -> None:
    seldom = Seldom(Hand())
    for i in range(10 * MAX_KINDS):
        seldom.due(i)
    assert len(seldom._last) == MAX_KINDS


def test_a_librarys_lines_are_of_one_kind_before_values_are_put_in() -> None:
    seldom = SeldomFilter(Seldom(Hand()))
    lines = [logging.LogRecord("x", 30, "", 0, "bad request of %s", (i,), None) for i in range(5)]
    assert [seldom.filter(line) for line in lines] == [True, False, False, False, False]


def test_errors_of_one_place_are_one_kind() -> None:
    kinds = set()
    for value in ("x", "y"):
        try:
            int(value)
        except ValueError as error:
            kinds.add(kind_of(error))
    try:
        int("z")
    except ValueError as error:
        kinds.add(kind_of(error))
    assert len(kinds) == 2 and kind_of(ValueError()) not in kinds
