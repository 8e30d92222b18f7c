"""The rules together, in simulated time: leases, splits in flight, and how many readers there are, while readers are slower than
training. What one reader leaves training waiting for, as many as the rules ask for don't."""

from __future__ import annotations

import pytest

from warehouse.readers.leases import Lease, Leases
from warehouse.readers.scale import Appetite, ReaderCount

READ_S, TRAIN_S = 1.0, 0.44  # of a unit: one reader keeps training waiting for 56 % of the time
UNITS_A_SPLIT, MOST_UNITS, MOST_SPLITS, START_S, TICK_S = 4, 16, 2, 1.0, 0.02


class SlowReader:
    """Reads a unit in READ_S, of the splits that it has leases of, the first first."""

    def __init__(self, name: str, now_s: float) -> None:
        self.name, self.ready_s = name, now_s + START_S + READ_S
        self.read: dict[int, int] = {}  # split → units
        self.held: list[Lease] = []

    def turn(self, leases: Leases, now_s: float) -> None:
        if now_s < self.ready_s - READ_S:
            return
        self.held = leases.renew(self.name, now_s)
        while sum(self.read.get(it.split, 0) < UNITS_A_SPLIT for it in self.held) < MOST_SPLITS:
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
    def __init__(self, most_readers: int) -> None:
        self.leases, self.appetite = Leases(), Appetite(most=8)
        self.count = ReaderCount(least=1, most=most_readers)
        self.readers: list[SlowReader] = []
        self.here: dict[int, int] = {}  # split → units fetched
        self.unit, self.busy_until_s, self.stalls = 0, 0.0, list[bool]()
        self.num_begun = 0

    def split(self) -> int:
        return self.unit // UNITS_A_SPLIT

    def buffered(self) -> int:
        return sum(count for split, count in self.here.items() if split >= self.split()) - self.unit % UNITS_A_SPLIT

    def turn(self, now_s: float) -> None:
        in_flight = [n for n in range(self.split(), self.split() + 40) if self.here.get(n, 0) < UNITS_A_SPLIT][
            : self.appetite.in_flight
        ]
        self.leases.tell(0, [(n, self.here.get(n, 0)) for n in in_flight])
        wanted = self.count.of(len(in_flight), now_s)
        while len(self.readers) < wanted:
            self.num_begun += 1
            self.readers.append(SlowReader(f"r{self.num_begun}", now_s))
        for reader in self.readers[wanted:]:
            self.leases.lost(reader.name)
        del self.readers[wanted:]
        for reader in self.readers:
            reader.turn(self.leases, now_s)
            for lease in reader.held:
                self.fetch(lease.split, reader.read.get(lease.split, 0))
        self.train(now_s)

    def fetch(self, split: int, read: int) -> None:
        """What there is room for; and what training waits for."""
        while self.here.get(split, 0) < read and (self.buffered() < MOST_UNITS or split == self.split()):
            self.here[split] = self.here.get(split, 0) + 1

    def train(self, now_s: float) -> None:
        stalled = False
        if now_s >= self.busy_until_s:
            stalled = self.here.get(self.split(), 0) <= self.unit % UNITS_A_SPLIT
            if not stalled:
                self.unit, self.busy_until_s = self.unit + 1, now_s + TRAIN_S
        self.stalls.append(stalled)
        self.appetite.observe(self.buffered() / MOST_UNITS, stalled=stalled, now_s=now_s)

    def run(self, seconds: float) -> float:
        """Share of the second half in which training waited."""
        for tick in range(int(seconds / TICK_S)):
            self.turn(tick * TICK_S)
        half = self.stalls[len(self.stalls) // 2 :]
        return sum(half) / len(half)


def test_one_throttled_reader_keeps_training_waiting() -> None:
    assert Training(most_readers=1).run(240) == pytest.approx(1 - TRAIN_S / READ_S, abs=0.04)


def test_as_many_readers_as_the_rule_asks_for_do_not() -> None:
    training = Training(most_readers=8)
    assert training.run(240) < 0.01, "it tries again and again whether one less does"
    assert len(training.readers) <= 3, "no more than it takes"
