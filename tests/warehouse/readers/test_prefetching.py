"""The rules together, in simulated time: leases, splits in flight, and how many readers there are, while
readers are slower than training. One reader leaves training waiting, as many as the rules ask for don't, once
there are so many."""

from __future__ import annotations

import pytest

from roostream.warehouse.readers.leases import Lease, Leases
from roostream.warehouse.readers.prefetch_scaler import PrefetchScaler, ReaderScaler

READ_S, TRAIN_S = 1.0, 0.44  # of a unit: one reader keeps training waiting for 56 % of the time
UNITS_A_SPLIT, MAX_UNITS, MAX_SPLITS, START_S, TICK_S = 4, 16, 2, 1.0, 0.05
WARM_S = 30.0


class SlowReader:
    """Reads a unit in READ_S, of the splits that it has leases of, the first first."""

    def __init__(self, name: str, now_s: float) -> None:
        self.name, self.ready_s = name, now_s + START_S + READ_S
        self.read: dict[int, int] = {}  # split → units
        self.held: list[Lease] = []
        self.leaves = False

    def turn(self, leases: Leases, now_s: float) -> None:
        if now_s < self.ready_s - READ_S:
            return
        self.held = leases.renew(self.name, now_s)
        while (
            not self.leaves
            and sum(self.read.get(it.split, 0) < UNITS_A_SPLIT for it in self.held) < MAX_SPLITS
        ):
            if (lease := leases.lease(self.name, now_s)) is None:
                break
            self.held.append(lease)
            self.read[lease.split] = lease.position
        unread = [it.split for it in self.held if self.read[it.split] < UNITS_A_SPLIT]
        if not unread:
            self.ready_s = now_s + READ_S
        elif now_s >= self.ready_s:
            self.read[unread[0]] += 1
            self.ready_s = now_s + READ_S


class Training:
    def __init__(self, max_readers: int, train_s: float = TRAIN_S) -> None:
        self.train_s = train_s
        self.leases, self.scaler = Leases(), PrefetchScaler(max_in_flight=8)
        self.count = ReaderScaler(min_readers=1, max_readers=max_readers)
        self.readers: list[SlowReader] = []
        self.here: dict[int, int] = {}  # split → units fetched
        self.unit, self.busy_until_s, self.stalls = 0, 0.0, list[bool]()
        self.num_begun = self.num_changes = 0

    def split(self) -> int:
        return self.unit // UNITS_A_SPLIT

    def buffered(self) -> int:
        return (
            sum(count for split, count in self.here.items() if split >= self.split())
            - self.unit % UNITS_A_SPLIT
        )

    def turn(self, now_s: float) -> None:
        in_flight = [
            n for n in range(self.split(), self.split() + 40) if self.here.get(n, 0) < UNITS_A_SPLIT
        ][: self.scaler.in_flight]
        self.leases.set_wanted(0, [(n, self.here.get(n, 0)) for n in in_flight])
        wanted = self.count.update(len(in_flight), now_s)
        self.resize(wanted, now_s)
        for reader in self.readers:
            reader.turn(self.leases, now_s)
            for lease in reader.held:
                self.fetch(lease.split, reader.read.get(lease.split, 0))
        self.train(now_s)

    def resize(self, wanted: int, now_s: float) -> None:
        """Who leaves takes no more, and ends when what it has was fetched."""
        while sum(not reader.leaves for reader in self.readers) < wanted:
            self.num_begun += 1
            self.readers.append(SlowReader(f"r{self.num_begun}", now_s))
        for reader in [reader for reader in self.readers if not reader.leaves][wanted:]:
            reader.leaves = True
        for reader in [reader for reader in self.readers if reader.leaves and not reader.held]:
            self.leases.release(reader.name)
            self.readers.remove(reader)

    def fetch(self, split: int, read: int) -> None:
        """What there is room for; and what training waits for."""
        while self.here.get(split, 0) < read and (self.buffered() < MAX_UNITS or split == self.split()):
            self.here[split] = self.here.get(split, 0) + 1

    def train(self, now_s: float) -> None:
        stalled = False
        if now_s >= self.busy_until_s:
            stalled = self.here.get(self.split(), 0) <= self.unit % UNITS_A_SPLIT
            if not stalled:
                self.unit, self.busy_until_s = self.unit + 1, now_s + self.train_s
        self.stalls.append(stalled)
        self.scaler.observe(self.buffered() / MAX_UNITS, stalled=stalled, now_s=now_s)

    def run(self, seconds: float) -> float:
        """Share of the time behind WARM_S in which training waited."""
        for tick in range(int(seconds / TICK_S)):
            before = self.scaler.in_flight
            self.turn(tick * TICK_S)
            self.num_changes += self.scaler.in_flight != before
        warm = self.stalls[int(WARM_S / TICK_S) :]
        return sum(warm) / len(warm)


def test_one_throttled_reader_stalls_training() -> None:
    assert Training(max_readers=1).run(240) == pytest.approx(1 - TRAIN_S / READ_S, abs=0.04)


def test_the_scaler_finds_a_number_of_readers_without_stalls() -> None:
    training = Training(max_readers=8)
    assert training.run(500) == 0.0
    assert len(training.readers) <= 3, "no more than it takes"
    assert training.num_changes <= 24, "seven up, and three times down and back, each time twice as late"


@pytest.mark.parametrize("train_s", [0.3, 0.55, 0.9])
def test_training_hardly_waits_whatever_a_step_takes(train_s: float) -> None:
    training = Training(max_readers=8, train_s=train_s)
    assert training.run(300) < 0.001
    assert len(training.readers) <= READ_S / train_s + 2


def test_the_scaler_uses_all_readers_when_they_are_too_few() -> None:
    training = Training(max_readers=4, train_s=0.14)
    assert training.run(120) == pytest.approx(1 - 4 * 0.14, abs=0.1)
    assert training.num_changes == 7, "up, and never down"
