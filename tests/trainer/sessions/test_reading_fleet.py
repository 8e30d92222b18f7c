"""A session that is read through reader programs gives the same batches, in the same order and each once, as
a worker that reads for itself. Readers may die, be late, or continue after they have lost their leases
(guarantees G2 and G11 of docs/architecture.md)."""

from __future__ import annotations

import random

import pytest

from roostream.errors import UnavailableError
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.warehouse.sessions.session_rows import LocalSessionRows
from tests.trainer.loops import PARTITIONS
from tests.trainer.sessions.reading_fleet import Fleet, bits
from trainer.chunks import Chunk

MAX_TURNS = 40_000
NUM_CHAOS = 400


def undisturbed(fleet: Fleet, in_turns: bool = False, worker: int = 0) -> list[list[bytes]]:
    """The chunks of a worker that reads for itself."""
    source, found = fleet.batches(LocalSessionRows(fleet.session, fleet.table), worker), list[list[bytes]]()
    while (chunk := source.poll(5, 0.0, turn_of(len(found)) if in_turns else None)) is not None:
        found.append(bits(chunk.batch))
    return found


def turn_of(count: int) -> Partition:
    return PARTITIONS[count % 2]


class WorkerLog:
    """The chunks that one worker has trained, and its progress before each of them."""

    def __init__(self, progress: Progress) -> None:
        self.chunks: list[list[bytes]] = []
        self.progress = [progress]

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(bits(chunk.batch))
        self.progress.append(self.progress[-1] | chunk.after)

    def roll_back(self, draw: random.Random) -> Progress:
        """Roll the worker back to a random earlier commit, and return its progress."""
        num_kept = draw.randint(0, len(self.chunks))
        del self.chunks[num_kept:], self.progress[num_kept + 1 :]
        return self.progress[-1]


def run(
    fleet: Fleet, draw: random.Random, in_turns: bool = False, faults: bool = False
) -> list[list[list[bytes]]]:
    """Run the fleet until all is read, and return the chunks of each worker. With `faults`, random faults hit
    readers, the controller and workers in the first half of the turns."""
    logs = [WorkerLog(worker.source.positions()) for worker in fleet.workers]
    expected = [len(undisturbed(fleet, in_turns, number)) for number in range(fleet.num_workers)]
    for turn in range(MAX_TURNS):
        fleet.turn(draw)
        if faults and turn < MAX_TURNS // 2 and draw.random() < 0.03:
            inject_fault(fleet, draw, logs)
        if not fleet.readers:
            fleet.start_reader()
        for number, log in enumerate(logs):
            chunk = fleet.poll(5, turn_of(len(log.chunks)) if in_turns else None, number)
            if chunk is not None:
                log.add(chunk)
        if [len(log.chunks) for log in logs] == expected:
            return [log.chunks for log in logs]
    raise AssertionError(f"{[len(log.chunks) for log in logs]} of {expected} chunks after {MAX_TURNS} turns")


def all_undisturbed(fleet: Fleet, in_turns: bool = False) -> list[list[list[bytes]]]:
    return [undisturbed(fleet, in_turns, number) for number in range(fleet.num_workers)]


def inject_fault(fleet: Fleet, draw: random.Random, logs: list[WorkerLog]) -> None:
    """Inject one random fault, or end all link faults."""
    name = draw.choice(sorted(fleet.readers)) if fleet.readers else ""
    match draw.choice(("kill", "silence", "cut", "heal", "join", "restore", "stand still", "leave")):
        case "kill" if name:
            del fleet.readers[name]
        case "silence" if name:
            fleet.silent.append(name)  # the reader loses the controller, and continues with its leases
        case "cut" if name:
            fleet.unreachable.append(name)  # the reader gets leases and reads, but workers cannot reach it
        case "heal":
            fleet.silent.clear()
            fleet.unreachable.clear()
        case "join" if len(fleet.readers) < 4:
            fleet.start_reader()
        case "restore":
            fleet.restore(*(log.roll_back(draw) for log in logs))
        case "stand still":
            fleet.clock.advance(4.0)
        case "leave" if name and len(fleet.readers) > 1:
            fleet.readers[name].takes_more = False  # the reader only finishes the leases that it has
            fleet.start_reader()


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
    assert found == all_undisturbed(fleet) and all(found), "each worker must train one partition"


@pytest.mark.chaos
@pytest.mark.timeout(900)  # a busy machine needs far longer than a quiet one
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
        fleet.worker_requests_splits()
        fleet.reader_renews_leases(zombie)
    fleet.reader_reads(zombie)
    fleet.worker_requests_splits()
    fleet.worker_starts_fetch()
    fleet.silent.append(zombie)
    fleet.clock.advance(4.0)
    fleet.start_reader()
    other = next(name for name in fleet.readers if name != zombie)
    for _ in range(3):
        fleet.reader_renews_leases(other)
        fleet.worker_requests_splits()
    fleet.deliver_answer()
    assert fleet.rows.buffer.counts == {"refused": 1}, (
        "the reader without the lease has read it in full, and still answers"
    )
    assert fleet.rows.buffer.size == (0, 0)


def test_units_in_flight_and_buffered_are_bounded() -> None:
    fleet, draw = Fleet(num_readers=3, max_pieces=2), random.Random(5)
    fleet.poll()
    for _ in range(400):
        fleet.turn(draw)
    units, _ = fleet.rows.buffer.size
    assert units <= 2 + 1, "two buffered units, and the one that the worker waits for"
    assert all(reader.reader.report()["held_pieces"] <= 6 + 2 for reader in fleet.readers.values())
    assert fleet.master.status()["splits_wanted"] <= 3


def test_a_thread_that_fails_ends_the_session(caplog: pytest.LogCaptureFixture) -> None:
    """The worker would wait for its rows for ever."""
    fleet = Fleet(num_readers=1)
    fleet.controller = lambda name="": InMemoryTransport(lambda *call: ({}, ()))  # type: ignore[method-assign]
    rows, split = fleet.client(0), fleet.session.order.splits[0]
    rows.expect([split], {split.number: 0}, 1)
    rows.open()
    for _ in range(2):
        with pytest.raises(UnavailableError, match="reading by readers failed"):
            rows.piece(split, 0, 10.0)
    rows.close()
    assert "defect" in caplog.text
