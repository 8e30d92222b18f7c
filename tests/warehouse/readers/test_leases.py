"""Leases assign splits to readers: their order, expiry and release, and that each row is taken once although
readers die and the number of workers changes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from roostream.warehouse.readers.leases import LEASE_S, Lease, Leases
from roostream.warehouse.sessions.session import plan
from tests.warehouse.sessions.test_session import SPEC, file

FILES = [file(f"f{i}", day=1 + i // 6, partition=i % 3, rows=4 + i % 5, first=100 * i) for i in range(18)]
ORDER = plan(FILES, SPEC, 4)


def make_leases(*splits: int, worker: int = 0) -> Leases:
    """Build leases where the worker waits for these splits, each at position 10 · number."""
    leases = Leases()
    leases.set_wanted(worker, [(number, 10 * number) for number in splits])
    return leases


def split(lease: Lease | None) -> int:
    """Return the number of the leased split, or -1 without a lease."""
    return -1 if lease is None else lease.split


def test_splits_are_leased_in_the_order_in_which_workers_wait() -> None:
    leases = make_leases(5, 3, 4)
    assert leases.lease("a", 0) == (5, 50, 1, "a")
    assert [split(leases.lease(reader, 0)) for reader in "bca"] == [3, 4, -1]
    assert [(lease_held.split, lease_held.reader) for lease_held in leases.holders(0, 0)] == [
        (5, "a"),
        (3, "b"),
        (4, "c"),
    ]


def test_the_first_split_of_each_worker_comes_before_the_second_of_any() -> None:
    leases = make_leases(0, 1, 2)
    leases.set_wanted(1, [(7, 0), (8, 0)])
    assert [split(leases.lease("a", 0)) for _ in range(5)] == [0, 7, 1, 8, 2]
    assert leases.num_wanted == 5
    assert [lease_held.split for lease_held in leases.holders(1, 0)] == [7, 8]


def test_a_lease_expires_unless_its_reader_renews_it() -> None:
    leases = make_leases(0, 1)
    leases.lease("a", 0)
    leases.lease("b", 0)
    assert [lease_held.split for lease_held in leases.renew("a", LEASE_S - 0.1)] == [0]
    new_lease = leases.lease("c", LEASE_S)
    assert new_lease is not None and (new_lease.split, new_lease.grant) == (1, 3), (
        "a new lease must have a new grant number"
    )
    assert leases.renew("b", LEASE_S) == [] and leases.num_expired == 1


def test_a_voided_lease_goes_to_another_reader_and_an_outdated_void_changes_nothing() -> None:
    leases = make_leases(0, 1)
    leases.lease("a", 0)
    leases.void(0, 1)
    assert split(leases.lease("b", 0)) == 0
    leases.void(0, 1)
    leases.void(9, 9)
    assert [lease_held.reader for lease_held in leases.holders(0, 0)] == ["b"]


@pytest.mark.parametrize("seed", range(12))
def test_each_row_is_taken_once_through_losses_restores_and_rescaling(seed: int) -> None:
    """Readers die, are slow and come back. Workers restart at a commit, and their number changes. Rows are
    taken by position and grant: each row once, and all rows in the end."""
    draw = random.Random(seed)
    leases, now_s, workers, positions = Leases(), 0.0, 1, dict.fromkeys(ORDER.rows, 0)
    leases_of_reader: dict[str, list[Lease]] = {f"r{i}": [] for i in range(3)}
    taken: Counter[tuple[int, int]] = Counter()
    committed = dict(positions), Counter(taken)

    def set_wanted_splits() -> None:
        for worker in range(workers):
            own_positions = {p: positions[p] for p in positions if p % workers == worker}
            leases.set_wanted(
                worker,
                [
                    (s.number, max(positions[s.partition], s.at))
                    for s in ORDER.next_splits(own_positions, draw.randint(1, 3))
                ],
            )

    def take_piece(lease: Lease) -> None:
        """Let the worker take rows of the split if the lease is still valid."""
        table_split = ORDER.splits[lease.split]
        end = (
            table_split.end_position
            if draw.random() < 0.7
            else draw.randint(table_split.at, table_split.end_position)
        )
        if (
            lease in leases.holders(table_split.partition % workers, now_s)
            and table_split.at <= positions[table_split.partition] < end
        ):
            taken.update(
                (table_split.partition, position) for position in range(positions[table_split.partition], end)
            )
            positions[table_split.partition] = end

    for _ in range(20_000):
        now_s += draw.choice((0.0, 0.3, 1.0))
        reader = draw.choice(sorted(leases_of_reader))
        set_wanted_splits()
        match draw.choice(("lease", "renew", "take", "take", "take", "die", "commit", "restore", "rescale")):
            case "lease" if lease := leases.lease(reader, now_s):
                leases_of_reader[reader].append(lease)
            case "renew":
                # The reader ignores the answer, like an outdated process of the same name.
                leases.renew(reader, now_s)
            case "take" if leases_of_reader[reader]:
                take_piece(leases_of_reader[reader].pop(0))
            case "die" if draw.random() < 0.3:
                leases_of_reader[reader].clear()
                leases.release(reader) if draw.random() < 0.5 else None
            case "commit":
                committed = dict(positions), Counter(taken)
            case "restore" if draw.random() < 0.1:
                positions, taken, leases = dict(committed[0]), Counter(committed[1]), Leases()
            case "rescale" if draw.random() < 0.1:
                workers, leases = draw.randint(1, 3), Leases()
        if positions == ORDER.rows:
            break
    assert positions == ORDER.rows, "all rows must be taken in the end"
    assert taken == Counter((p, position) for p, rows in ORDER.rows.items() for position in range(rows))
