"""Rows at the workers' own processes come to what rows at shards come to, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from param_server.client import Client
from param_server.key_value_store import MemoryKeyValueStore
from param_server.row_exchange import RowExchange
from param_server.server import Shard
from roostream.cli.checkpoint.move_buckets import move
from roostream.errors import ConfigError, FencedError, RoostreamError, UnavailableError, WireError
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.clock import FakeClock
from roostream.schema.registry import register
from roostream.wire.lookup import Lookup
from tests.cli.checkpoint.test_move_buckets import Fleet
from tests.param_server.shard_support import (
    ITEM,
    TOPIC,
    USER,
    begun,
    gradients_of,
    link_manifest,
    lookup_of,
    make_shard,
    small_schema,
    state_of,
    transport_to,
)
from tests.trainer.memory_store import MemoryStore
from trainer.process_group import GroupSpec, SingleWorkerGroup, TorchRendezvous


class Table:
    """Where workers in threads of one process swap."""

    def __init__(self, workers: int) -> None:
        self.parts: list[Sequence[np.ndarray]] = [()] * workers
        self.barrier = threading.Barrier(workers, timeout=20)

    def seat(self, index: int) -> Seat:
        return Seat(self, index)


class Seat:
    def __init__(self, table: Table, index: int) -> None:
        self.table, self.index, self.workers = table, index, len(table.parts)

    def all_to_all(self, parts: Sequence[np.ndarray], about: str) -> list[np.ndarray]:
        try:
            self.table.parts[self.index] = parts
            self.table.barrier.wait()
            got = [self.table.parts[peer][self.index] for peer in range(self.workers)]
            self.table.barrier.wait()
        except threading.BrokenBarrierError:
            raise UnavailableError("a worker is gone") from None
        return got


class Holders:
    """`W` workers that hold rows, each in its thread."""

    def __init__(self, shards: Sequence[Shard], peers: Sequence[Any]) -> None:
        self.shards, self.rows = shards, [RowExchange(s, p) for s, p in zip(shards, peers, strict=True)]
        self.pool = ThreadPoolExecutor(len(shards))
        for rows in self.rows:
            rows.set_incarnation(shards[0].incarnation, len(shards), shards[0].owners)

    def together(self, do: Callable[[int, RowExchange], Any]) -> list[Any]:
        done = [self.pool.submit(do, worker, rows) for worker, rows in enumerate(self.rows)]
        return [each.exception(30) or each.result() for each in done]

    def push(self, step: int, **more: Any) -> list[Any]:
        def one(worker: int, rows: RowExchange) -> None:
            lookup, gradients = batch(worker, step)
            rows.push(lookup, gradients, step=step, time_ms=100 * step + worker, **more)

        return self.together(one)

    def state(self) -> dict[Any, bytes]:
        return {key: bits for shard in self.shards for key, bits in state_of(shard).items()}


def batch(worker: int, step: int) -> tuple[Lookup, dict[str, np.ndarray]]:
    """Of one worker: shared keys, own ones, and at some steps nothing."""
    random = np.random.default_rng([worker, step])
    of = {ITEM: range(worker * 20, worker * 20 + 50), USER: [1, 2, 3 + worker], TOPIC: range(12)}
    lookup = lookup_of({} if (worker, step) == (1, 2) else of)
    normal = {
        name: random.normal(size=g.shape).astype(np.float32) for name, g in gradients_of(lookup, 1.0).items()
    }
    return lookup, normal


@pytest.fixture
def holders() -> Iterator[Callable[[int], Holders]]:
    made: list[Holders] = []

    def make(workers: int) -> Holders:
        table = Table(workers)
        shards = [begun(index=i, num_shards=workers) for i in range(workers)]
        made.append(
            Holders(
                shards, [SingleWorkerGroup()] if workers == 1 else [table.seat(i) for i in range(workers)]
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.pool.shutdown()


def at_shards(workers: int, steps: int, num_shards: int = 2, **more: Any) -> dict[Any, bytes]:
    """The same steps by clients of shards."""
    shards = [begun(index=i, num_shards=num_shards) for i in range(num_shards)]
    clients = [
        Client(small_schema(), [transport_to(s) for s in shards], worker=w, clock=FakeClock())
        for w in range(workers)
    ]
    with ThreadPoolExecutor(workers) as pool:
        for client in clients:
            client.set_incarnation(1, workers)
        for step in range(steps):
            done = []
            for worker, client in enumerate(clients):
                lookup, gradients = batch(worker, step)
                done.append(
                    pool.submit(
                        client.push, lookup, gradients, step=step, time_ms=100 * step + worker, **more
                    )
                )
            for each in done:
                each.result(30)
    for client in clients:
        client.close()
    return {key: bits for shard in shards for key, bits in state_of(shard).items()}


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_exchanged_rows_equal_those_of_shards_bit_for_bit(
    holders: Callable[[int], Holders], workers: int
) -> None:
    held = holders(workers)
    for step in range(4):
        assert held.push(step, clip_row_norm=0.7) == [None] * workers
    assert held.state() == at_shards(workers, 4, clip_row_norm=0.7 if workers > 1 else 0.0)
    assert all(np.isfinite(np.frombuffer(bits[:-8], np.float32)).all() for bits in held.state().values())


def test_pulls_return_what_was_pushed(
    holders: Callable[[int], Holders],
) -> None:
    held = holders(2)
    for step in range(3):
        held.push(step)
    shards = [transport_to(shard) for shard in held.shards]
    client = Client(small_schema(), shards, worker=9)
    client.set_incarnation(1)
    lookups = [lookup_of({ITEM: range(90), USER: range(6)}), lookup_of({})]
    first, second = held.together(lambda worker, rows: rows.pull(lookups[worker]))
    assert {name: rows_UD.tobytes() for name, rows_UD in first.items()} == {
        name: rows_UD.tobytes() for name, rows_UD in client.pull(lookups[0]).items()
    }
    assert [len(rows_UD) for rows_UD in second.values()] == [0, 0]
    client.close()


def test_no_key_is_sent_twice(holders: Callable[[int], Holders]) -> None:
    alone, two = holders(1), holders(2)
    for held in (alone, two):
        held.push(0)
    assert alone.rows[0].sent_bytes == 0
    before = two.rows[0].sent_bytes
    two.together(lambda worker, rows: rows.pull(lookup_of({ITEM: range(400)} if worker == 0 else {})))
    sent_bytes = two.rows[0].sent_bytes - before
    assert 200 * 12 * 0.7 < sent_bytes < 200 * 12 * 1.3 + 400, "about half of the keys: the other's buckets"


@pytest.mark.parametrize("broken", [0, 1])
def test_a_refusal_of_one_owner_fails_the_push_for_all(
    holders: Callable[[int], Holders], broken: int
) -> None:
    held = holders(2)
    held.push(0)
    held.shards[broken].restore(5, "")
    errors = held.push(1)
    assert all(isinstance(error, FencedError) for error in errors)
    again = held.push(2)
    assert all(isinstance(error, UnavailableError) and "was lost" in str(error) for error in again)
    pulls = held.together(lambda worker, rows: rows.pull(lookup_of({ITEM: range(40)})))
    assert all(isinstance(error, FencedError) for error in pulls)


def test_a_gradient_that_is_not_finite_is_refused_before_anything_is_applied(
    holders: Callable[[int], Holders],
) -> None:
    held = holders(2)
    held.push(0)
    before = held.state()

    def bad(worker: int, rows: RowExchange) -> None:
        lookup = lookup_of({ITEM: [1, 2, 3, 4, 5, 6]})
        gradients = gradients_of(lookup, np.nan if worker else 1.0)
        rows.push(lookup, gradients, step=1, time_ms=0)

    assert any(isinstance(error, WireError) for error in held.together(bad))
    assert held.state() == before


def test_owners_that_are_not_the_workers_are_refused(holders: Callable[[int], Holders]) -> None:
    rows = holders(2).rows[0]
    with pytest.raises(ConfigError, match="64"):
        rows.set_incarnation(2, 2, BucketMap.modulo(64, 3))
    with pytest.raises(ConfigError):
        rows.set_incarnation(2, 1)
    with pytest.raises(WireError, match="float32"):
        rows.push(
            lookup_of({ITEM: [1]}),
            {name: np.zeros((9, 9), np.float32) for name in rows.shard.tables},
            step=0,
            time_ms=0,
        )


# From workers to shards


def test_rows_move_from_workers_to_shards_without_a_difference() -> None:
    store, blobs, table = MemoryStore(), {i: MemoryKeyValueStore() for i in range(3)}, Table(2)
    register(store, small_schema())
    shards = [make_shard(blobs[i], store, index=i, num_shards=2) for i in range(2)]
    for shard in shards:
        shard.restore(1, "")
    held = Holders(shards, [table.seat(i) for i in range(2)])
    for step in range(3):
        held.push(step)
    for shard in shards:
        shard.freeze(1, 0)
    about = {"schema": f"{small_schema().fingerprint:016x}"}
    link_manifest(store, 1, 1, [shard.write(1) for shard in shards], **about)
    for shard in shards:
        shard.commit(1)
    at_workers = held.state()
    assert at_workers == at_shards(2, 3, num_shards=3)
    move(store, BucketMap.modulo(64, 3), blobs, 0)
    fleet = Fleet(store, blobs)
    assert fleet.rows() == at_workers and len(fleet.shards) == 3
    fleet.push(2.5)
    fleet.commit()
    expected = fleet.rows()
    move(store, BucketMap.modulo(64, 2), blobs, 0)
    back = Fleet(store, blobs)
    assert back.rows() == expected and expected != at_workers
    held.pool.shutdown()


# Over torch's process groups


@pytest.mark.parametrize("workers", [3])
def test_workers_meet_and_swap_over_gloo(workers: int) -> None:
    places = [TorchRendezvous("127.0.0.1:0", device="cpu", timeout_s=20) for _ in range(workers)]
    meetings = [GroupSpec(1, w, workers, places[0].address, " rows") for w in range(workers)]
    peers = [place.join(meeting) for place, meeting in zip(places, meetings, strict=True)]
    held = Holders([begun(index=i, num_shards=workers) for i in range(workers)], peers)
    try:
        for step in range(3):
            assert held.push(step) == [None] * workers
        assert held.state() == at_shards(workers, 3)
        for peer in peers[1:]:
            peer.leave()
            peer.interrupt()
        gone = held.push(3)
        assert all(isinstance(error, RoostreamError) for error in gone)
    finally:
        for peer in peers:
            peer.interrupt()
            peer.leave()
        for place in places:
            place.close()
        held.pool.shutdown()
