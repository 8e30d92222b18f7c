"""Who reads which split, through readers that are lost, restores and other numbers of workers."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.warehouse.readers.test_splits import SPEC, file
from warehouse.readers.leases import LEASE_S, Leases
from warehouse.readers.splits import ReadOrder, TableSplit, plan

FILES = [file(f"f{i}", day=1 + i // 6, partition=i % 3, rows=4 + i % 5, first=100 * i) for i in range(18)]
ORDER = plan(FILES, SPEC, 4)


def leases(workers: int = 1, in_flight: int = 2, order: ReadOrder = ORDER) -> Leases:
    made = Leases(order)
    made.deal(workers, in_flight)
    return made


def test_splits_are_leased_in_order_within_what_workers_wait_for() -> None:
    its = leases(in_flight=2)
    assert [its.lease("a", 0), its.lease("b", 0)] == list(ORDER.splits[:2])
    assert its.lease("c", 0) is None
    its.done(ORDER.splits[0])
    assert its.lease("c", 0) == ORDER.splits[2]
    assert its.holders(0, 0) == {1: "b", 2: "c"}


def test_a_lease_ends_unless_its_reader_beats() -> None:
    its = leases(in_flight=2)
    its.lease("a", 0)
    its.lease("b", 0)
    assert its.renew("a", LEASE_S - 0.1) == [ORDER.splits[0]]
    assert its.lease("c", LEASE_S) == ORDER.splits[1]
    assert its.renew("b", LEASE_S) == [], "it may forget what it holds"


def test_a_reader_that_ends_gives_its_splits_back_at_once() -> None:
    its = leases(in_flight=1)
    its.lease("a", 0)
    its.lost("a")
    assert its.lease("b", 0) == ORDER.splits[0]


def test_each_worker_has_the_splits_of_its_partitions_and_its_own_bound() -> None:
    its = leases(workers=2, in_flight=1)
    first_of = [next(s for s in ORDER.splits if s.partition % 2 == w) for w in (0, 1)]
    assert its.num_wanted == 2
    got = [its.lease("a", 0), its.lease("a", 0)]
    assert sorted(s.number for s in got if s) == sorted(s.number for s in first_of)
    assert its.lease("a", 0) is None
    its.tell(0, [0], 3)
    assert its.num_wanted == 4, "more in flight for the one"
    assert its.holders(1, 0) == {first_of[1].number: "a"}


def test_what_was_taken_is_never_given_again_and_late_words_change_nothing() -> None:
    its = leases(in_flight=1)
    split = its.lease("a", 0)
    assert split is not None
    its.done(split)
    its.took(split.partition, 0)
    its.took(99, 5)
    assert its.cursor()[split.partition] == split.behind
    assert its.lease("a", 0) != split


def test_a_restore_goes_back_and_voids_every_lease() -> None:
    its = leases(in_flight=3)
    for _ in range(3):
        split = its.lease("a", 0)
        assert split is not None
        its.done(split)
    its.restore({0: 2})
    assert its.cursor() == {0: 2, 1: 0, 2: 0}
    assert its.lease("a", 0) is None, "no worker has told of itself yet"
    its.deal(1, 1)
    assert its.lease("b", 0) == ORDER.splits[0]


@pytest.mark.parametrize("seed", range(40))
def test_each_row_is_taken_once_whatever_is_lost_restored_or_dealt_anew(seed: int) -> None:
    """Readers die, are slow and come back; commits are kept and gone back to; the number of workers changes."""
    draw = random.Random(seed)
    its, now_s, workers = leases(1, 2), 0.0, 1
    held: dict[str, list[TableSplit]] = {f"r{i}": [] for i in range(3)}
    taken: Counter[tuple[int, int]] = Counter()  # (partition, position), as of now
    committed: tuple[dict[int, int], Counter[tuple[int, int]]] = ({}, Counter())
    for _ in range(4000):
        now_s += draw.choice((0.0, 0.3, 1.0))
        reader = draw.choice(sorted(held))
        match draw.choice(("lease", "renew", "give", "give", "give", "die", "commit", "back", "deal")):
            case "lease":
                if split := its.lease(reader, now_s):
                    assert all(split not in others for r, others in held.items() if r != reader) or now_s > 0
                    held[reader].append(split)
            case "renew":
                its.renew(reader, now_s)  # it keeps what it may forget: a late twin
            case "give" if held[reader]:  # the worker accepts what it waits for, in order, and a part of it at times
                split = held[reader].pop(0)
                at, whole = its.cursor()[split.partition], draw.random() < 0.8
                end = split.behind if whole else draw.randint(split.at, split.behind)
                if split.at <= at < end:
                    taken.update((split.partition, position) for position in range(at, end))
                    its.took(split.partition, end)
                elif not whole:
                    its.took(split.partition, min(end, at))
            case "die" if draw.random() < 0.3:
                held[reader].clear()
                its.lost(reader) if draw.random() < 0.5 else None
            case "commit":
                committed = its.cursor(), Counter(taken)
            case "back" if draw.random() < 0.1:
                its.restore(committed[0])
                taken = Counter(committed[1])
                its.deal(workers, draw.randint(1, 4))
            case "deal" if draw.random() < 0.1:
                workers = draw.randint(1, 3)
                its.deal(workers, draw.randint(1, 4))
        if its.is_over:
            break
    while (split := its.lease("last", now_s := now_s + 1)) is not None or not its.is_over:
        if split is not None:
            at = its.cursor()[split.partition]
            if split.at <= at:
                taken.update((split.partition, position) for position in range(at, split.behind))
                its.done(split)
    assert taken == Counter((p, position) for p, rows in ORDER.rows.items() for position in range(rows))
