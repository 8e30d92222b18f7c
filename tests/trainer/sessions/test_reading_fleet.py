"""A session through readers is the session: the same batches, once, in order, whoever of them dies, is late or is a zombie."""

from __future__ import annotations

import random

import pytest

from runtime.kafka.topics import Partition
from tests.trainer.loops import PARTITIONS
from tests.trainer.sessions.reading_fleet import Fleet, bits
from trainer.batches import Chunk
from warehouse.readers.reading import LocalRows

MOST_TURNS = 40_000
NUM_CHAOS = 400


def undisturbed(fleet: Fleet, in_turns: bool = False, size: int = 5) -> list[list[bytes]]:
    """Chunks of a worker that reads for itself."""
    source, found = fleet.batches(LocalRows(fleet.session, fleet.table)), list[list[bytes]]()
    while (chunk := source.poll(size, 0.0, turn_of(len(found)) if in_turns else None)) is not None:
        found.append(bits(chunk.batch))
    return found


def turn_of(count: int) -> Partition:
    return PARTITIONS[count % 2]


def run(fleet: Fleet, draw: random.Random, in_turns: bool = False, faults: bool = False) -> list[list[bytes]]:
    """All chunks; with `faults`, whatever may happen to readers, the controller and the worker does, until half of the turns."""
    found, at = list[list[bytes]](), [fleet.source.positions()]
    wanted = len(undisturbed(fleet, in_turns))
    for turn in range(MOST_TURNS):
        fleet.turn(draw)
        if faults and turn < MOST_TURNS // 2 and draw.random() < 0.03:
            found, at = hurt(fleet, draw, found, at)
        if not fleet.readers:
            fleet.begin_reader()
        chunk: Chunk | None = fleet.poll(5, turn_of(len(found)) if in_turns else None)
        if chunk is not None:
            found.append(bits(chunk.batch))
            at.append(at[-1] | chunk.after)
        if len(found) == wanted:
            return found
    raise AssertionError(f"{len(found)} of {wanted} chunks after {MOST_TURNS} turns")


def hurt(fleet: Fleet, draw: random.Random, found: list[list[bytes]], at: list[dict]) -> tuple[list[list[bytes]], list[dict]]:  # type: ignore[type-arg]
    name = draw.choice(sorted(fleet.readers)) if fleet.readers else ""
    match draw.choice(("kill", "silence", "cut", "heal", "join", "restore", "stand still")):
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
            back = draw.randint(0, len(found))
            fleet.restore(at[back])
            return found[:back], at[: back + 1]
        case "stand still":
            fleet.clock.advance(4.0)
    return found, at


@pytest.mark.parametrize("in_turns", [False, True], ids=["as they lie", "in turns"])
@pytest.mark.parametrize("num_readers", [1, 3])
def test_batches_are_those_of_a_worker_that_reads_for_itself(num_readers: int, in_turns: bool) -> None:
    fleet = Fleet(num_readers=num_readers)
    assert run(fleet, random.Random(num_readers), in_turns) == undisturbed(fleet, in_turns)
    assert fleet.rows.ahead.counts["refused"] == 0


@pytest.mark.parametrize("seed", range(10))
def test_g2_g11_deaths_late_answers_and_zombies_change_no_batch(seed: int) -> None:
    fleet = Fleet(num_readers=2)
    assert run(fleet, random.Random(seed), seed % 2 == 1, faults=True) == undisturbed(fleet, seed % 2 == 1)


@pytest.mark.chaos
@pytest.mark.timeout(900)  # far less where nothing else runs
@pytest.mark.parametrize("first", range(100, 100 + NUM_CHAOS, 50))
def test_g2_g11_many_schedules_of_readers(first: int) -> None:
    for seed in range(first, first + 50):
        test_g2_g11_deaths_late_answers_and_zombies_change_no_batch(seed)


def test_a_unit_that_comes_under_a_lease_that_is_another_reader_s_by_now_is_refused() -> None:
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
    assert fleet.rows.ahead.counts == {"refused": 1}, "it was read, in full, by a reader that still answers"
    assert fleet.rows.ahead.held == (0, 0)


def test_what_is_in_flight_and_in_the_buffer_is_bounded() -> None:
    fleet, draw = Fleet(num_readers=3, most_units=2), random.Random(5)
    fleet.poll()
    for _ in range(400):
        fleet.turn(draw)
    units, _ = fleet.rows.ahead.held
    assert units <= 2 + 1, "and the one that is waited for"
    assert all(reader.reader.shown()["held_units"] <= 6 + 2 for reader in fleet.readers.values())
    assert fleet.master.status()["splits_wanted"] <= 3
