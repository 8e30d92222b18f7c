"""Swaps take one exchange while parts are about as large as the last time, and bring every byte in any
case."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from trainer.process_group import AllToAll, Exchange


class Wire:
    """Exchanges among threads; refuses what a process group would: sizes that two sides see differently."""

    def __init__(self, workers: int) -> None:
        self.sent: list[list[np.ndarray]] = [[]] * workers
        self.barrier = threading.Barrier(workers, timeout=20)
        self.exchanges = [0] * workers

    def of(self, index: int) -> Exchange:
        def exchange(got: np.ndarray, sent: np.ndarray, sizes_got: list[int], sizes_sent: list[int]) -> None:
            self.exchanges[index] += 1
            assert len(sent) == sum(sizes_sent) and len(got) == sum(sizes_got)
            self.sent[index] = np.split(sent, np.cumsum(sizes_sent)[:-1])
            self.barrier.wait()
            theirs = [parts[index] for parts in self.sent]
            assert [len(part) for part in theirs] == sizes_got
            got[:] = np.concatenate(theirs)
            self.barrier.wait()

        return exchange


def swapped(
    workers: int,
    turns: int,
    size_of: Callable[[int, int, int], int],
    about: Callable[[int], str] = lambda _: "",
) -> int:
    """Exchanges that it took to swap parts of `size_of(turn, from, to)` bytes, each of which was found where
    it belongs."""
    wire = Wire(workers)

    def run(index: int) -> int:
        its = AllToAll(index, workers, wire.of(index))
        for turn in range(turns):
            parts = [drawn(turn, index, to, size_of(turn, index, to)) for to in range(workers)]
            got = its.exchange(parts, about(turn))
            for sender, part in enumerate(got):
                assert part.tobytes() == drawn(turn, sender, index, size_of(turn, sender, index)).tobytes()
        return wire.exchanges[index]

    with ThreadPoolExecutor(workers) as pool:
        (num,) = set(pool.map(run, range(workers)))
    return num


def drawn(turn: int, sender: int, to: int, size: int) -> np.ndarray:
    return np.random.default_rng([turn, sender, to]).integers(0, 256, size, np.uint8)


def test_parts_of_similar_size_take_one_exchange_after_the_first() -> None:
    assert swapped(3, 12, lambda turn, sender, to: 40_000 + 37 * ((turn + sender + to) % 7)) == 13


def test_parts_of_varying_sizes_arrive_complete() -> None:
    sizes = np.random.default_rng(1).choice([0, 1, 7, 1023, 1024, 1025, 9_000, 300_000], (30, 4, 4))
    num = swapped(4, 30, lambda turn, sender, to: int(sizes[turn, sender, to]))
    assert 30 < num < 60


def test_one_large_part_makes_all_workers_exchange_again() -> None:
    assert swapped(3, 6, lambda turn, sender, to: 50_000 if (sender, to) == (0, 2) else 0) == 7


def test_exchanges_with_different_names_have_separate_capacities() -> None:
    def name(turn: int) -> str:
        return ("keys", "rows", "", "done")[turn % 4]

    assert swapped(2, 40, lambda turn, *_: (9_000, 90_000, 0, 40)[turn % 4], name) == 42


def test_one_unusually_large_exchange_does_not_make_the_next_ones_large() -> None:
    sent_bytes: list[int] = []

    def exchange(
        received: np.ndarray, sent: np.ndarray, sizes_received: list[int], sizes_sent: list[int]
    ) -> None:
        sent_bytes.append(len(sent))
        received[:] = sent

    peers = AllToAll(0, 2, exchange)
    for size in (40 << 20, 10, 10):
        peers.exchange([np.zeros(0, np.uint8), np.zeros(size, np.uint8)], "")
    assert 8 << 20 <= sent_bytes[-2] < 9 << 20 and sent_bytes[-1] < 2 << 10
