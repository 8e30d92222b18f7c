"""Who reads which split, through readers that are lost or late and other numbers of workers."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from roostream.warehouse.readers.leases import LEASE_S, Lease, Leases
from roostream.warehouse.sessions.session import plan
from tests.warehouse.sessions.test_session import SPEC, file

FILES = [file(f"f{i}", day=1 + i // 6, partition=i % 3, rows=4 + i % 5, first=100 * i) for i in range(18)]
ORDER = plan(FILES, SPEC, 4)


def leases(*wanted: int, worker: int = 0) -> Leases:
    made = Leases()
    made.set_wanted(worker, [(number, 10 * number) for number in wanted])
    return made


def split(lease: Lease | None) -> int:
    return -1 if lease is None else lease.split


def test_splits_are_leased_in_the_order_in_which_workers_wait() -> None:
    its = leases(5, 3, 4)
    assert its.lease("a", 0) == (5, 50, 1, "a")
    assert [split(its.lease(reader, 0)) for reader in "bca"] == [3, 4, -1]
    assert [(held.split, held.reader) for held in its.holders(0, 0)] == [(5, "a"), (3, "b"), (4, "c")]


def test_the_first_split_of_each_worker_comes_before_the_second_of_any() -> None:
    its = leases(0, 1, 2)
    its.set_wanted(1, [(7, 0), (8, 0)])
    assert [split(its.lease("a", 0)) for _ in range(5)] == [0, 7, 1, 8, 2]
    assert its.num_wanted == 5
    assert [held.split for held in its.holders(1, 0)] == [7, 8]


def test_a_lease_expires_unless_its_reader_renews_it() -> None:
    its = leases(0, 1)
    its.lease("a", 0)
    its.lease("b", 0)
    assert [held.split for held in its.renew("a", LEASE_S - 0.1)] == [0]
    again = its.lease("c", LEASE_S)
    assert again is not None and (again.split, again.grant) == (1, 3), "under another grant"
    assert its.renew("b", LEASE_S) == [] and its.num_expired == 1


def test_a_voided_lease_goes_to_another_reader_and_an_outdated_void_changes_nothing() -> None:
    its = leases(0, 1)
    its.lease("a", 0)
    its.void(0, 1)
    assert split(its.lease("b", 0)) == 0
    its.void(0, 1)
    its.void(9, 9)
    assert [held.reader for held in its.holders(0, 0)] == ["b"]


@pytest.mark.parametrize("seed", range(12))
def test_each_row_is_taken_once_through_losses_restores_and_rescaling(seed: int) -> None:
    """Readers die, are slow and come back; workers begin anew at a commit, and their number changes: rows are
    taken by position and grant, each once, and all of them in the end."""
    draw = random.Random(seed)
    its, now_s, workers, at = Leases(), 0.0, 1, dict.fromkeys(ORDER.rows, 0)
    held: dict[str, list[Lease]] = {f"r{i}": [] for i in range(3)}
    taken: Counter[tuple[int, int]] = Counter()
    committed = dict(at), Counter(taken)

    def tell() -> None:
        for worker in range(workers):
            mine = {p: at[p] for p in at if p % workers == worker}
            its.set_wanted(
                worker,
                [(s.number, max(at[s.partition], s.at)) for s in ORDER.next_splits(mine, draw.randint(1, 3))],
            )

    def give(lease: Lease) -> None:
        """The worker takes it under the grant that it was told."""
        of = ORDER.splits[lease.split]
        end = of.end_position if draw.random() < 0.7 else draw.randint(of.at, of.end_position)
        if lease in its.holders(of.partition % workers, now_s) and of.at <= at[of.partition] < end:
            taken.update((of.partition, position) for position in range(at[of.partition], end))
            at[of.partition] = end

    for _ in range(20_000):
        now_s += draw.choice((0.0, 0.3, 1.0))
        reader = draw.choice(sorted(held))
        tell()
        match draw.choice(("lease", "renew", "give", "give", "give", "die", "commit", "back", "deal")):
            case "lease" if lease := its.lease(reader, now_s):
                held[reader].append(lease)
            case "renew":
                its.renew(reader, now_s)  # it keeps what it may forget: a late twin
            case "give" if held[reader]:
                give(held[reader].pop(0))
            case "die" if draw.random() < 0.3:
                held[reader].clear()
                its.release(reader) if draw.random() < 0.5 else None
            case "commit":
                committed = dict(at), Counter(taken)
            case "back" if draw.random() < 0.1:
                at, taken, its = dict(committed[0]), Counter(committed[1]), Leases()
            case "deal" if draw.random() < 0.1:
                workers, its = draw.randint(1, 3), Leases()
        if at == ORDER.rows:
            break
    assert at == ORDER.rows, "it ends"
    assert taken == Counter((p, position) for p, rows in ORDER.rows.items() for position in range(rows))
