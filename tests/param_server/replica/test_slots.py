"""A slot that was freed rests before it is written again; none has two owners."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.replica.slots import RowSlots


def test_new_slots_are_given_in_order_until_there_are_none() -> None:
    slots = RowSlots(5, used=1, grace_s=1.0)
    assert slots.take(2, 0.0).tolist() == [1, 2]
    assert slots.take(3, 0.0).tolist() == [3, 4] and slots.available(0.0) == 0
    assert slots.take(3, 0.0).tolist() == []


def test_a_freed_slot_is_given_again_after_the_grace_and_not_before() -> None:
    slots = RowSlots(2, used=2, grace_s=1.0)
    slots.free(np.array([1]), 10.0)
    assert slots.take(1, 10.99).tolist() == [] and slots.available(10.99) == 0
    assert slots.take(1, 11.0).tolist() == [1]


def test_what_was_taken_and_not_used_needs_no_rest() -> None:
    slots = RowSlots(3, grace_s=1.0)
    slots.give_back(slots.take(3, 0.0)[1:])
    assert slots.take(2, 0.0).tolist() == [1, 2]
    slots.give_back(np.zeros(0, np.int64))
    assert slots.available(0.0) == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "free", "back", "wait"]), st.integers(1, 5)), max_size=60))
def test_no_slot_has_two_owners_and_none_is_taken_before_it_has_rested(steps: list[tuple[str, int]]) -> None:
    slots, now_s, taken, freed_s = RowSlots(12, grace_s=3.0), 0.0, list[int](), dict[int, float]()
    for what, amount in steps:
        some, rest = np.array(taken[:amount], np.int64), taken[amount:]
        match what:
            case "take":
                can = slots.available(now_s)
                got = slots.take(amount, now_s)
                assert len(got) == min(amount, can)
                for slot in got.tolist():
                    assert slot not in taken and 0 <= slot < 12 and now_s - freed_s.pop(slot, -99.0) >= 3.0
                    taken.append(slot)
            case "free":
                slots.free(some, now_s)
                taken, freed_s = rest, freed_s | dict.fromkeys(some.tolist(), now_s)
            case "back":
                slots.give_back(some)
                taken = rest
            case "wait":
                now_s += amount
    assert slots.available(now_s + 3.0) == 12 - len(taken)
