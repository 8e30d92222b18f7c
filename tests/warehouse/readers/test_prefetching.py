"""Leases, prefetch scaler and reader scaler together, in simulated time, with readers that are slower than
training. With one reader, training waits. With the number of readers that the scalers choose, it does not."""

from __future__ import annotations

import pytest

from roostream.warehouse.readers.leases import Lease, Leases
from roostream.warehouse.readers.prefetch_scaler import PrefetchScaler, ReaderScaler

READ_S, TRAIN_S = 1.0, 0.44  # to read and to train a unit: with one reader, training waits 56 % of the time
UNITS_PER_SPLIT, MAX_UNITS, MAX_SPLITS, START_S, TICK_S = 4, 16, 2, 1.0, 0.05
WARM_S = 30.0


class SlowReader:
    """A reader that takes READ_S for a unit. It reads its leased splits in order."""

    def __init__(self, name: str, now_s: float) -> None:
        self.name, self.ready_s = name, now_s + START_S + READ_S
        self.read: dict[int, int] = {}  # split → units
        self.held: list[Lease] = []
        self.is_leaving = False

    def step(self, leases: Leases, now_s: float) -> None:
        if now_s < self.ready_s - READ_S:
            return
        self.held = leases.renew(self.name, now_s)
        while (
            not self.is_leaving
            and sum(self.read.get(lease.split, 0) < UNITS_PER_SPLIT for lease in self.held) < MAX_SPLITS
        ):
            if (lease := leases.lease(self.name, now_s)) is None:
                break
            self.held.append(lease)
            self.read[lease.split] = lease.position
        unread = [lease.split for lease in self.held if self.read[lease.split] < UNITS_PER_SPLIT]
        if not unread:
            self.ready_s = now_s + READ_S
        elif now_s >= self.ready_s:
            self.read[unread[0]] += 1
            self.ready_s = now_s + READ_S


class Training:
    """The simulated worker: it fetches units into a buffer, trains one at a time, and scales the readers."""

    def __init__(self, max_readers: int, train_s: float = TRAIN_S) -> None:
        self.train_s = train_s
        self.leases, self.prefetch_scaler = Leases(), PrefetchScaler(max_in_flight=8)
        self.reader_scaler = ReaderScaler(min_readers=1, max_readers=max_readers)
        self.readers: list[SlowReader] = []
        self.fetched: dict[int, int] = {}  # split → units fetched
        self.unit, self.busy_until_s, self.stalls = 0, 0.0, list[bool]()
        self.num_started = self.num_changes = 0

    def split(self) -> int:
        return self.unit // UNITS_PER_SPLIT

    def buffered(self) -> int:
        return (
            sum(count for split, count in self.fetched.items() if split >= self.split())
            - self.unit % UNITS_PER_SPLIT
        )

    def step(self, now_s: float) -> None:
        in_flight = [
            n for n in range(self.split(), self.split() + 40) if self.fetched.get(n, 0) < UNITS_PER_SPLIT
        ][: self.prefetch_scaler.in_flight]
        self.leases.set_wanted(0, [(n, self.fetched.get(n, 0)) for n in in_flight])
        num_readers = self.reader_scaler.update(len(in_flight), now_s)
        self.resize(num_readers, now_s)
        for reader in self.readers:
            reader.step(self.leases, now_s)
            for lease in reader.held:
                self.fetch(lease.split, reader.read.get(lease.split, 0))
        self.train(now_s)

    def resize(self, num_readers: int, now_s: float) -> None:
        """Start or stop readers. A reader that leaves takes no new leases and ends when its units were
        fetched."""
        while sum(not reader.is_leaving for reader in self.readers) < num_readers:
            self.num_started += 1
            self.readers.append(SlowReader(f"r{self.num_started}", now_s))
        for reader in [reader for reader in self.readers if not reader.is_leaving][num_readers:]:
            reader.is_leaving = True
        for reader in [reader for reader in self.readers if reader.is_leaving and not reader.held]:
            self.leases.release(reader.name)
            self.readers.remove(reader)

    def fetch(self, split: int, read: int) -> None:
        """Fetch units while the buffer has room. Always fetch the unit that training waits for."""
        while self.fetched.get(split, 0) < read and (self.buffered() < MAX_UNITS or split == self.split()):
            self.fetched[split] = self.fetched.get(split, 0) + 1

    def train(self, now_s: float) -> None:
        stalled = False
        if now_s >= self.busy_until_s:
            stalled = self.fetched.get(self.split(), 0) <= self.unit % UNITS_PER_SPLIT
            if not stalled:
                self.unit, self.busy_until_s = self.unit + 1, now_s + self.train_s
        self.stalls.append(stalled)
        self.prefetch_scaler.observe(self.buffered() / MAX_UNITS, stalled=stalled, now_s=now_s)

    def run(self, seconds: float) -> float:
        """Run the simulation; return the share of the time after WARM_S in which training waited."""
        for tick in range(int(seconds / TICK_S)):
            before = self.prefetch_scaler.in_flight
            self.step(tick * TICK_S)
            self.num_changes += self.prefetch_scaler.in_flight != before
        warm = self.stalls[int(WARM_S / TICK_S) :]
        return sum(warm) / len(warm)


def test_one_throttled_reader_stalls_training() -> None:
    assert Training(max_readers=1).run(240) == pytest.approx(1 - TRAIN_S / READ_S, abs=0.04)


def test_the_scaler_finds_a_number_of_readers_without_stalls() -> None:
    training = Training(max_readers=8)
    assert training.run(500) == 0.0
    assert len(training.readers) <= 3, "no more readers than needed"
    assert training.num_changes <= 24, (
        "seven steps up, then a few trials with one piece less, with growing pauses"
    )


@pytest.mark.parametrize("train_s", [0.3, 0.55, 0.9])
def test_training_hardly_waits_for_any_duration_of_a_step(train_s: float) -> None:
    training = Training(max_readers=8, train_s=train_s)
    assert training.run(300) < 0.001
    assert len(training.readers) <= READ_S / train_s + 2


def test_the_scaler_uses_all_readers_when_they_are_too_few() -> None:
    training = Training(max_readers=4, train_s=0.14)
    assert training.run(120) == pytest.approx(1 - 4 * 0.14, abs=0.1)
    assert training.num_changes == 7, "the number grows and never shrinks"
