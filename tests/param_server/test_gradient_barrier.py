"""Pushes of one step by several workers: one update that does not depend on the order, or none, and every
worker gets an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.client import Client
from param_server.gradient_barrier import PendingStep, sum_pushes
from param_server.rules import MAX_GRADIENT
from param_server.server import Shard, ShardRpcHandler
from param_server.table import GradientPush
from roostream.errors import CheckpointError, FencedError, UnavailableError, WireError
from roostream.runtime.deployment import MAX_WORKERS
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import Transport
from tests.param_server.shard_support import (
    ADAGRAD,
    ITEM,
    TOPIC,
    USER,
    commit,
    gradients_of,
    keys,
    lookup_of,
    pull_from,
    push_to,
    small_schema,
    started_shard,
    state_of,
    transport_to,
)
from tests.trainer.memory_store import MemoryStore


def make_push(worker: int, workers: int = 2, step: int = 1, **changes: Any) -> GradientPush:
    return GradientPush(worker, 1, 0, 0, 0, (), step, workers)._replace(**changes)


# The state machine


@pytest.mark.parametrize(
    "other", [make_push(1, step=2), make_push(1, workers=3), make_push(1, clip_row_norm=2.0)]
)
def test_workers_at_different_steps_are_refused(other: GradientPush) -> None:
    pending = PendingStep(make_push(0))
    pending.join(make_push(0))
    with pytest.raises(FencedError):
        pending.join(other)
    assert pending.missing == [1], "a refused push must change nothing"


# The sum of gradients

WORKERS = st.lists(
    st.dictionaries(st.integers(0, 5), st.integers(-1000, 1000), max_size=6), min_size=2, max_size=4
)


def part_of(shard: Shard, rows: Mapping[int, float]) -> list[Any]:
    requested = keys(ITEM, *rows)
    gradient_UD = np.outer(np.array(list(rows.values()), np.float64), [1, 0.1, -3, 7]).astype(np.float32)
    return [(shard.tables[ADAGRAD], requested, gradient_UD)]


@settings(max_examples=20)
@given(workers=WORKERS)
def test_the_sum_equals_a_sum_in_float64_by_a_dictionary(workers: list[dict[int, int]]) -> None:
    shard = started_shard()
    pushes = [make_push(w, len(workers), parts=part_of(shard, rows)) for w, rows in enumerate(workers)]
    expected: dict[int, np.ndarray] = {}
    for push in pushes:
        for _, keys_, gradient_UD in push.parts:
            for id_, gradient_D in zip(keys_.id_U.tolist(), gradient_UD, strict=True):
                expected[id_] = expected.get(id_, np.zeros(4)) + gradient_D.astype(np.float64)
    ((table, keys_, sum_UD),) = sum_pushes(pushes).parts
    assert table is shard.tables[ADAGRAD] and keys_.id_U.tolist() == list(expected), (
        "keys must be in the order of their first push"
    )
    assert sum_UD.dtype == np.float32
    assert np.array_equal(sum_UD, np.array([g.astype(np.float32) for g in expected.values()]).reshape(-1, 4))


def test_the_sum_of_a_row_is_clipped_and_not_its_parts() -> None:
    shard = started_shard()
    pushes = [
        make_push(w, parts=part_of(shard, {1: value, 2: 0.01}), clip_row_norm=2.0)
        for w, value in enumerate((5.0, -4.0))
    ]
    ((_, _, sum_UD),) = sum_pushes(pushes).parts
    one_D = np.array([1, 0.1, -3, 7], np.float32)
    np.testing.assert_allclose(sum_UD[0], 2 * one_D / np.linalg.norm(one_D), rtol=1e-6)
    np.testing.assert_allclose(sum_UD[1], 0.02 * one_D, rtol=1e-6)


def test_sums_beyond_float32_are_scaled_down() -> None:
    shard = started_shard()
    huge = [(shard.tables[ADAGRAD], keys(ITEM, 1), np.array([[3e38, 0, -1e38, 0]], np.float32))]
    ((_, _, sum_UD),) = sum_pushes([make_push(w, parts=huge) for w in range(2)]).parts
    np.testing.assert_allclose(sum_UD, np.array([[1, 0, -1 / 3, 0]]) * float(MAX_GRADIENT), rtol=1e-6)
    assert shard.stats()["limited"] == 1


def test_a_sum_has_the_latest_time_and_the_oldest_event() -> None:
    times = [(50, 0, 7), (40, 9, 3), (0, 0, 0)]
    pushes = [
        make_push(w, 3, time_ms=time_ms, oldest_engagement_ms=engagement_ms, oldest_close_ms=close_ms)
        for w, (time_ms, engagement_ms, close_ms) in enumerate(times)
    ]
    total = sum_pushes(pushes)
    assert (total.time_ms, total.oldest_engagement_ms, total.oldest_close_ms) == (50, 9, 3)


# Several workers and real shards

ROWS: list[dict[str, Sequence[int]]] = [
    {ITEM: range(4), USER: [1]},
    {ITEM: range(2, 9), TOPIC: [3, 4]},
    {TOPIC: [4, 5]},
]


class Workers:
    """`count` clients of the same shards, each with a thread."""

    def __init__(
        self, shards: Sequence[Shard], count: int, connect: Callable[[Shard], Transport] = transport_to
    ) -> None:
        self.transports = [[connect(shard) for shard in shards] for _ in range(count)]
        self.shards = shards
        self.clients = [
            Client(small_schema(), transports, worker=w, resend_for_s=1.0)
            for w, transports in enumerate(self.transports)
        ]
        self.pool = ThreadPoolExecutor(2 * count)
        for client in self.clients:
            client.set_incarnation(shards[0].incarnation, workers=count)

    def push(
        self, worker: int, step: int, rows: Mapping[str, Sequence[int]] | None = None, **header: Any
    ) -> Future[None]:
        lookup = lookup_of(ROWS[worker] if rows is None else rows)
        gradients = gradients_of(lookup, 0.3 * step - worker)
        return self.pool.submit(
            self.clients[worker].push, lookup, gradients, step=step, time_ms=100 * step + worker, **header
        )

    def step(self, step: int, order: Sequence[int], **header: Any) -> None:
        """Push as every worker in this order. The last push is sent when all others wait."""
        pushes = []
        for nth, worker in enumerate(order):
            pushes.append(self.push(worker, step, **header))
            if nth + 1 < len(order):
                wait_for(lambda n=nth + 1: all(shard.stats()["waiting"] == n for shard in self.shards))  # type: ignore[misc]
        for push in pushes:
            push.result(10)

    def close(self) -> None:
        self.pool.shutdown()
        for client, transports in zip(self.clients, self.transports, strict=True):
            client.close()
            for transport in transports:
                transport.close()


def wait_for(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    opened: list[Any] = []
    yield opened
    for resource in opened:
        resource.close()


def make_workers(closing: list[Any], count: int, num_shards: int = 2) -> Workers:
    workers = Workers([started_shard(index=i, num_shards=num_shards) for i in range(num_shards)], count)
    closing.append(workers)
    return workers


def test_rows_are_bit_equal_for_every_order_of_arrival(closing: list[Any]) -> None:
    first, other = make_workers(closing, 3), make_workers(closing, 3)
    for step, order in enumerate(((2, 1, 0), (1, 2, 0), (2, 0, 1)), 1):
        first.step(step, (0, 1, 2), clip_row_norm=0.7)
        other.step(step, order, clip_row_norm=0.7)
    for first_shard, other_shard in zip(first.shards, other.shards, strict=True):
        assert state_of(first_shard) == state_of(other_shard) and first_shard.stats()["rows"]
        assert first_shard.stats()["pushes"] == 9 and first_shard.stats()["waiting"] == 0


def test_pulls_continue_while_a_push_waits_and_a_worker_without_data_completes_the_step(
    closing: list[Any],
) -> None:
    workers = make_workers(closing, 2)
    done = workers.push(0, 1)
    wait_for(lambda: all(shard.stats()["waiting"] == 1 for shard in workers.shards))
    assert pull_from(workers.shards[0], ITEM, 1).shape == (1, 4)
    assert workers.clients[1].pull(lookup_of(ROWS[1]))[ADAGRAD].shape == (7, 4)
    workers.push(1, 1, {}).result(10)
    done.result(10)
    assert [shard.stats()["pushes"] for shard in workers.shards] == [2, 2]


def test_a_repeated_push_waits_too_and_counts_once(closing: list[Any]) -> None:
    workers, undisturbed = make_workers(closing, 2), make_workers(closing, 2)
    undisturbed.step(1, (0, 1))
    (shard, _), pool = workers.shards, workers.pool
    first = pool.submit(push_as, shard, 0)
    wait_for(lambda: shard.stats()["waiting"] == 1)
    repeated = pool.submit(push_as, shard, 0)
    wait_for(lambda: shard.barrier.open_step is not None and shard.barrier.open_step.num_sent[0] == 2)
    assert not first.done() and not repeated.done()
    assert push_as(shard, 1) is True
    assert first.result(10) is repeated.result(10) is True
    before = state_of(shard)
    assert push_as(shard, 0) is False and push_as(shard, 1) is False
    assert state_of(shard) == before and shard.stats()["repeats"] == 2 and shard.stats()["pushes"] == 2


def test_only_two_calls_of_a_worker_wait_so_that_dead_connections_hold_no_threads(
    closing: list[Any],
) -> None:
    workers = make_workers(closing, 2)
    shard, calls = workers.shards[0], []
    for sent in range(1, 4):
        calls.append(workers.pool.submit(push_as, shard, 0))
        wait_for(
            lambda n=sent: shard.barrier.open_step is not None and shard.barrier.open_step.num_sent[0] == n
        )  # type: ignore[misc]
    push_as(shard, 1)
    assert [call.result(10) for call in calls[1:]] == [True, True]


def push_as(shard: Shard, worker: int, *, sequence: int = 1, workers: int = 2, **header: Any) -> bool:
    return push_to(shard, sequence, worker=worker, workers=workers, **header)


ENDS: dict[str, Callable[[Shard], object]] = {
    "a restore": lambda shard: shard.restore(2, ""),
    "the shard's end": lambda shard: shard.leave(),
}


@pytest.mark.parametrize("event", ENDS)
def test_an_aborted_step_is_applied_nowhere_and_ends_all_waits(closing: list[Any], event: str) -> None:
    workers = make_workers(closing, 3, num_shards=1)
    (shard,) = workers.shards
    pushes = [workers.push(w, 1) for w in (0, 2)]
    wait_for(lambda: shard.stats()["waiting"] == 2)
    ENDS[event](shard)
    for push in pushes:
        with pytest.raises(UnavailableError):
            push.result(10)
    assert state_of(shard) == {} and shard.stats()["waiting"] == 0


def test_a_step_that_lacks_a_push_ends_after_the_time_limit_and_names_the_worker(closing: list[Any]) -> None:
    workers = make_workers(closing, 3, num_shards=1)
    (shard,) = workers.shards
    shard.barrier.wait_s = 0.05
    pushes = [workers.push(w, 1) for w in (0, 2)]
    for push in pushes:
        with pytest.raises(UnavailableError):
            push.result(10)
    assert state_of(shard) == {} and shard.stats()["waiting"] == 0
    with pytest.raises(UnavailableError):
        workers.push(0, 2).result(10)


def test_a_freeze_during_a_waiting_push_is_refused(closing: list[Any]) -> None:
    store = MemoryStore()
    workers = Workers([started_shard(store=store)], 2)
    closing.append(workers)
    (shard,) = workers.shards
    workers.step(1, (1, 0))
    shard.freeze(1, 0)
    shard.write(1)
    done = workers.push(0, 2)
    wait_for(lambda: shard.stats()["waiting"] == 1)
    shard.commit(1)
    assert shard.committed.seq == 1 and not done.done()
    with pytest.raises(CheckpointError):
        shard.freeze(2, 0)
    workers.push(1, 2).result(10)
    done.result(10)
    commit(shard, store, 3)


def test_a_failure_during_an_update_requires_a_restore_of_all(closing: list[Any]) -> None:
    workers = make_workers(closing, 2, num_shards=1)
    (shard,) = workers.shards
    done = workers.push(0, 1)
    wait_for(lambda: shard.stats()["waiting"] == 1)

    def fail(*_: object) -> None:
        raise MemoryError("no more")

    for table in shard.tables.values():
        table.kernel = fail  # type: ignore[assignment]
    with pytest.raises(UnavailableError):
        workers.push(1, 1).result(10)
    with pytest.raises(UnavailableError):
        done.result(10)
    assert shard.stats()["ready"] is False


@pytest.mark.parametrize(
    "header",
    [
        {"worker": 2, "workers": 2},
        {"worker": -1, "workers": 2},
        {"worker": 0, "workers": 0},
        {"worker": 0, "workers": MAX_WORKERS + 1},
        {"worker": 0, "workers": 2, "clip_row_norm": float("nan")},
        {"worker": 0, "workers": 2, "clip_row_norm": -1.0},
        {"worker": 0, "workers": 2, "clip_row_norm": "1"},
        {"worker": 0, "workers": 2, "step": "1"},
    ],
)
def test_a_push_of_an_unknown_worker_is_refused_at_once(header: dict[str, Any]) -> None:
    shard = started_shard()
    with pytest.raises(WireError):
        push_to(shard, 1, **header)
    assert shard.stats()["waiting"] == 0


def test_a_worker_that_dies_ends_only_its_step(closing: list[Any]) -> None:
    count = 3
    shards = [started_shard(index=i, num_shards=2) for i in range(2)]
    servers = {id(shard): RpcServer(ShardRpcHandler(shard).handle).start() for shard in shards}
    workers = Workers(shards, count, lambda shard: SocketTransport(servers[id(shard)].address))
    undisturbed = make_workers(closing, count)
    closing.append(workers)
    try:
        for step in (1, 2):
            workers.step(step, range(count)[::-1])
            undisturbed.step(step, range(count))
        assert [state_of(shard) for shard in shards] == [state_of(shard) for shard in undisturbed.shards]
        waiting = [workers.push(w, 3) for w in range(1, count)]
        wait_for(lambda: all(shard.stats()["waiting"] == count - 1 for shard in shards))
        for shard in shards:  # worker 0 is dead, so the controller restores all shards
            shard.restore(2, "")
        for push in waiting:
            with pytest.raises(UnavailableError):
                push.result(10)
        for client in workers.clients:
            client.set_incarnation(2, workers=count)
        workers.step(1, range(count))
        assert all(shard.stats()["waiting"] == 0 for shard in shards)
    finally:
        for server in servers.values():
            server.stop()
