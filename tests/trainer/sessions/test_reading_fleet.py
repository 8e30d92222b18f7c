"""A session through readers is the session: the same batches, once, in order, whoever of them dies, is late
or is a zombie."""

from __future__ import annotations

import random

import pytest

from roostream.runtime.kafka.topics import Partition, Progress
from roostream.warehouse.sessions.session_rows import LocalSessionRows
from tests.trainer.loops import PARTITIONS
from tests.trainer.sessions.reading_fleet import Fleet, bits
from trainer.chunks import Chunk

MAX_TURNS = 40_000
NUM_CHAOS = 400


def undisturbed(fleet: Fleet, in_turns: bool = False, worker: int = 0) -> list[list[bytes]]:
    """Chunks of a worker that reads for itself."""
    source, found = fleet.batches(LocalSessionRows(fleet.session, fleet.table), worker), list[list[bytes]]()
    while (chunk := source.poll(5, 0.0, turn_of(len(found)) if in_turns else None)) is not None:
        found.append(bits(chunk.batch))
    return found


def turn_of(count: int) -> Partition:
    return PARTITIONS[count % 2]


class Trained:
    """Of one worker: its chunks, and the progress before each of them."""

    def __init__(self, at: Progress) -> None:
        self.chunks: list[list[bytes]] = []
        self.at = [at]

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(bits(chunk.batch))
        self.at.append(self.at[-1] | chunk.after)

    def back(self, draw: random.Random) -> Progress:
        """To some commit."""
        kept = draw.randint(0, len(self.chunks))
        del self.chunks[kept:], self.at[kept + 1 :]
        return self.at[-1]


def run(
    fleet: Fleet, draw: random.Random, in_turns: bool = False, faults: bool = False
) -> list[list[list[bytes]]]:
    """All chunks of each worker; with `faults`, whatever may happen to readers, the controller and workers
    does, until half of the turns."""
    of = [Trained(worker.source.positions()) for worker in fleet.workers]
    wanted = [len(undisturbed(fleet, in_turns, number)) for number in range(fleet.num_workers)]
    for turn in range(MAX_TURNS):
        fleet.turn(draw)
        if faults and turn < MAX_TURNS // 2 and draw.random() < 0.03:
            hurt(fleet, draw, of)
        if not fleet.readers:
            fleet.begin_reader()
        for number, its in enumerate(of):
            chunk = fleet.poll(5, turn_of(len(its.chunks)) if in_turns else None, number)
            if chunk is not None:
                its.add(chunk)
        if [len(its.chunks) for its in of] == wanted:
            return [its.chunks for its in of]
    raise AssertionError(f"{[len(its.chunks) for its in of]} of {wanted} chunks after {MAX_TURNS} turns")


def all_undisturbed(fleet: Fleet, in_turns: bool = False) -> list[list[list[bytes]]]:
    return [undisturbed(fleet, in_turns, number) for number in range(fleet.num_workers)]


def hurt(fleet: Fleet, draw: random.Random, of: list[Trained]) -> None:
    name = draw.choice(sorted(fleet.readers)) if fleet.readers else ""
    match draw.choice(("kill", "silence", "cut", "heal", "join", "restore", "stand still", "leave")):
        case "kill" if name:
            del fleet.readers[name]
        case "silence" if name:
            fleet.silent.append(name)  # it goes on with what it has
        case "cut" if name:
            fleet.gone.append(name)  # it asks and reads, but workers don't reach it
        case "heal":
            fleet.silent.clear()
            fleet.gone.clear()
        case "join" if len(fleet.readers) < 4:
            fleet.begin_reader()
        case "restore":
            fleet.restore(*(its.back(draw) for its in of))
        case "stand still":
            fleet.clock.advance(4.0)
        case "leave" if name and len(fleet.readers) > 1:
            fleet.readers[name].takes_more = False  # it gives what it has
            fleet.begin_reader()


@pytest.mark.parametrize("in_turns", [False, True], ids=["as they lie", "in turns"])
@pytest.mark.parametrize("num_readers", [1, 3])
def test_remote_readers_give_the_same_batches_as_local_reading(num_readers: int, in_turns: bool) -> None:
    fleet = Fleet(num_readers=num_readers)
    assert run(fleet, random.Random(num_readers), in_turns) == all_undisturbed(fleet, in_turns)
    assert fleet.rows.buffer.counts["refused"] == 0


@pytest.mark.parametrize("seed", range(5))
def test_g2_g11_deaths_late_answers_and_zombies_change_no_batch(seed: int) -> None:
    fleet = Fleet(num_readers=2)
    assert run(fleet, random.Random(seed), seed % 2 == 1, faults=True) == all_undisturbed(
        fleet, seed % 2 == 1
    )


@pytest.mark.parametrize("seed", range(3))
def test_g2_g11_two_workers_share_readers_through_crashes(seed: int) -> None:
    fleet = Fleet(num_readers=2, num_workers=2)
    found = run(fleet, random.Random(seed), faults=seed > 0)
    assert found == all_undisturbed(fleet) and all(found), "each trains a partition"


@pytest.mark.chaos
@pytest.mark.timeout(900)  # far less where nothing else runs
@pytest.mark.parametrize("first", range(100, 100 + NUM_CHAOS, 50))
def test_g2_g11_many_schedules_of_readers(first: int) -> None:
    for seed in range(first, first + 50):
        test_g2_g11_deaths_late_answers_and_zombies_change_no_batch(seed)
        test_g2_g11_two_workers_share_readers_through_crashes(seed)


def test_a_unit_of_a_reassigned_lease_is_refused() -> None:
    fleet = Fleet(num_readers=1)
    (zombie,) = fleet.readers
    fleet.poll()
    for _ in range(3):
        fleet.worker_asks()
        fleet.reader_asks(zombie)
    fleet.reader_reads(zombie)
    fleet.worker_asks()
    fleet.worker_begins_to_fetch()
    fleet.silent.append(zombie)
    fleet.clock.advance(4.0)
    fleet.begin_reader()
    other = next(name for name in fleet.readers if name != zombie)
    for _ in range(3):
        fleet.reader_asks(other)
        fleet.worker_asks()
    fleet.answer_comes()
    assert fleet.rows.buffer.counts == {"refused": 1}, "it was read, in full, by a reader that still answers"
    assert fleet.rows.buffer.size == (0, 0)


def test_units_in_flight_and_buffered_are_bounded() -> None:
    fleet, draw = Fleet(num_readers=3, max_pieces=2), random.Random(5)
    fleet.poll()
    for _ in range(400):
        fleet.turn(draw)
    units, _ = fleet.rows.buffer.size
    assert units <= 2 + 1, "and the one that is waited for"
    assert all(reader.reader.report()["held_pieces"] <= 6 + 2 for reader in fleet.readers.values())
    assert fleet.master.status()["splits_wanted"] <= 3
