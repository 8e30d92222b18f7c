"""What a reader of shared rows can see between any two stores of the writer: the kernels' own code, store by store.

A writer's stores are recorded, since nothing that readers do changes them. The reader's code runs on memory that, before each of
its loads, decides how many more of them have arrived: every choice is tried, or many are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from param_server.initial import splitmix64
from param_server.replica import shared_kernels as kernels

WIDTH, NUM_WORDS, PLACES, SHIFT = 2, 4, 4, np.uint64(62)  # every slot is a head and one word
TABLE = 5
LOW32 = 0xFFFFFFFF
MAX_BURSTS = 3  # between which the reader moves; the long histories have more


class Store(NamedTuple):
    what: str  # index, slab or numbers
    at: int
    value: Any
    plain: bool  # other stores beside it may be seen before it


class Memory:
    """A file's words, and the stores that are still on their way."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, int], Any] = {}
        self.pending: Sequence[Store] = ()
        self.arrived = 0
        self.choose: Callable[[int], int] = lambda left: 0

    def begin(
        self, cells: dict[tuple[str, int], Any], pending: Sequence[Store], choose: Callable[[int], int]
    ) -> None:
        self.cells, self.pending, self.arrived, self.choose = dict(cells), pending, 0, choose

    def load(self, what: str, at: int) -> Any:
        for _ in range(self.choose(len(self.pending) - self.arrived)):
            store = self.pending[self.arrived]
            self.cells[store.what, store.at] = store.value
            self.arrived += 1
        return self.cells.get((what, at), 0)


class Words:
    """One array of a memory, as the kernels index it."""

    def __init__(self, memory: Memory, what: str, kind: type, length: int) -> None:
        self.memory, self.what, self.kind, self.shape = memory, what, kind, (length,)

    def __getitem__(self, at: Any) -> Any:
        return self.kind(self.memory.load(self.what, int(at)))


class Recorder:
    """An array that remembers every store."""

    def __init__(self, cells: dict[tuple[str, int], Any], stores: list[Store], what: str) -> None:
        self.cells, self.stores, self.what = cells, stores, what

    def __getitem__(self, at: Any) -> Any:
        return np.uint64(self.cells.get((self.what, int(at)), 0))

    def __setitem__(self, at: Any, value: Any) -> None:
        self.cells[self.what, int(at)] = value
        plain = self.what == "numbers" or (self.what == "slab" and int(at) % NUM_WORDS != kernels.SEQUENCE)
        self.stores.append(Store(self.what, int(at), value, plain))


def word_of(id_: int, slot: int) -> np.uint64:
    hashed = int(splitmix64(np.uint64(id_ ^ TABLE)))
    return np.uint64((hashed & LOW32) << 32 | slot + 1)


def place_of(id_: int) -> int:
    return int(splitmix64(np.uint64(id_ ^ TABLE)) >> SHIFT)


K = 11
L = next(i for i in range(12, 99) if place_of(i) == place_of(K))
BEHIND = (place_of(K) + 1) % PLACES  # where a second key of that place goes


def value(id_: int, version: int) -> tuple[float, float]:
    return float(id_ * 1000 + version), float(-id_ * 1000 - version)


class Writer:
    """Does what `put` does, whose body of a row this is; slots are given by the test, rested or not."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, int], Any] = {}
        self.stores: list[Store] = []
        self.index, self.slab, self.numbers = (
            Recorder(self.cells, self.stores, what) for what in ("index", "slab", "numbers")
        )

    def put(self, id_: int, version: int, slot: int, place: int | None = None) -> None:
        row = np.array(value(id_, version), np.float32)
        kernels.write(self.slab, self.numbers, slot * NUM_WORDS, np.uint64(id_), np.uint64(TABLE), row)
        kernels.store(self.index, place_of(id_) if place is None else place, word_of(id_, slot))  # type: ignore[arg-type]

    def remove(self, id_: int) -> None:
        kernels.store(self.index, place_of(id_), kernels.GONE)  # type: ignore[arg-type]

    def since(self) -> tuple[dict[tuple[str, int], Any], list[Store]]:
        """(memory now, the list that later stores go to)."""
        cells = dict(self.cells)
        self.stores.clear()
        return cells, self.stores


def seen(memory: Memory, id_: int, max_loads: int = 200) -> tuple[float, float]:
    """What the reader's code gives for a key; a reader that doesn't come to an end fails the test."""
    loads, choose = 0, memory.choose

    def counted(left: int) -> int:
        nonlocal loads
        loads += 1
        assert loads < max_loads, "the reader goes round and round"
        return choose(left)

    memory.choose = counted
    out = np.zeros((1, WIDTH), np.float32)
    kernels.gather.py_func(
        Words(memory, "index", np.uint64, PLACES),
        SHIFT,
        Words(memory, "slab", np.uint64, 16),
        Words(memory, "numbers", np.float32, 32),
        NUM_WORDS,
        np.array([TABLE], np.uint32),
        np.array([id_], np.int64),
        np.uint64(0),
        np.array([TABLE], np.uint32),
        np.array([0.0], np.float32),  # initial values are 0
        out,
    )
    return float(out[0, 0]), float(out[0, 1])


def every_way(
    cells: dict[tuple[str, int], Any], stores: Sequence[Store], id_: int
) -> Iterable[tuple[float, float]]:
    """What is seen in every interleaving of the reader's loads with these stores, arriving in at most MAX_BURSTS bursts."""
    memory, path = Memory(), list[list[int]]()  # path: [choice, choices] of each load
    while True:
        at = bursts = 0

        def choose(left: int) -> int:
            nonlocal at, bursts
            if at == len(path):
                path.append([0, left + 1 if bursts < MAX_BURSTS else 1])
            at += 1
            bursts += path[at - 1][0] > 0
            return path[at - 1][0]

        memory.begin(cells, stores, choose)
        yield seen(memory, id_)
        del path[at:]
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return
        path[-1][0] += 1


def updated_and_recycled() -> tuple[dict[tuple[str, int], Any], list[Store]]:
    """K's row is replaced, and its old slot given to L without any rest."""
    writer = Writer()
    writer.put(K, 1, slot=0)
    cells, stores = writer.since()
    writer.put(K, 2, slot=1)
    writer.put(L, 1, slot=0, place=BEHIND)
    return cells, stores


def test_in_every_interleaving_a_reader_gets_a_whole_row_of_its_key() -> None:
    cells, stores = updated_and_recycled()
    got = {*every_way(cells, stores, K)}
    assert got == {value(K, 1), value(K, 2)}


def test_in_every_interleaving_a_key_that_comes_and_goes_is_there_or_not() -> None:
    writer = Writer()
    writer.put(K, 1, slot=0)
    cells, stores = writer.since()
    writer.remove(K)
    writer.put(L, 1, slot=0, place=BEHIND)
    assert {*every_way(cells, stores, K)} == {value(K, 1), (0.0, 0.0)}
    assert {*every_way(cells, stores, L)} >= {value(L, 1), (0.0, 0.0)}


def test_without_sequences_rows_would_be_torn() -> None:
    """The interleavings are such that the reader's care is needed."""
    cells, stores = updated_and_recycled()
    stores = [s for s in stores if not (s.what == "slab" and s.at % NUM_WORDS == kernels.SEQUENCE)]
    got = {*every_way(cells, stores, K)}
    assert not got <= {value(K, 1), value(K, 2)}


def shuffled(stores: Sequence[Store], generator: random.Random) -> list[Store]:
    """An order that the fences allow: plain stores between two others may be seen in any."""
    out: list[Store] = []
    run: list[Store] = []
    for store in [*stores, Store("index", 99, 0, False)]:
        if store.plain:
            run.append(store)
        else:
            generator.shuffle(run)
            out += [*run, store]
            run = []
    return out[:-1]


def test_in_long_histories_with_stores_out_of_order_a_reader_gets_whole_rows_that_never_go_back() -> None:
    generator = random.Random(7)
    for _ in range(300):
        writer = Writer()
        writer.put(K, 1, slot=0)
        cells, stores = writer.since()
        slots = {K: 0}
        for version in range(2, 14):
            id_ = generator.choice((K, K, L))
            free = [slot for slot in range(3) if slot not in slots.values()]
            place = place_of(K) if id_ == K else BEHIND
            slots[id_] = generator.choice(free)
            writer.put(id_, version, slots[id_], place)
        memory, newest = Memory(), 0.0
        memory.begin(
            cells, shuffled(stores, generator), lambda left: min(generator.choice((0, 0, 1, 1, 2, 9)), left)
        )
        step = memory.choose
        while memory.arrived < len(memory.pending):
            memory.choose = step
            first, second = seen(memory, K, 2000)
            assert second == -first and first // 1000 == K and first >= newest
            newest = first


def test_a_writer_that_ends_between_any_two_stores_leaves_a_row_that_can_be_read() -> None:
    cells, stores = updated_and_recycled()
    for end in range(len(stores) + 1):
        memory = Memory()
        memory.begin({**cells, **{(s.what, s.at): s.value for s in stores[:end]}}, (), lambda left: 0)
        assert seen(memory, K) in (value(K, 1), value(K, 2))
