"""The client of the shards: one call per shard, rows returned in the order of the lookup, and every push
applied exactly once."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from param_server.client import Client
from roostream.errors import ConfigError, FencedError, TransportError, UnavailableError, WireError
from roostream.runtime.clock import FakeClock
from roostream.runtime.rpc.transport import Header, InMemoryTransport
from tests.param_server.shard_support import (
    ADAGRAD,
    ITEM,
    ROWWISE,
    TOPIC,
    USER,
    RecordingTransport,
    gradients_of,
    lookup_of,
    small_schema,
    started_shard,
    state_of,
    transport_to,
)

LOOKUP = {ITEM: range(60), USER: range(5), TOPIC: range(40)}


def make_client(num_shards: int, **kwargs: Any) -> tuple[Client, list[InMemoryTransport], list[Any]]:
    shards = [started_shard(index=i, num_shards=num_shards) for i in range(num_shards)]
    transports = [transport_to(s) for s in shards]
    client = Client(small_schema(), transports, worker=3, clock=FakeClock(), **kwargs)
    client.set_incarnation(1)
    return client, transports, shards


@pytest.mark.parametrize("num_shards", [2, 3])
def test_several_shards_give_the_rows_of_one(num_shards: int) -> None:
    (single, _, _), (sharded, _, shards) = make_client(1), make_client(num_shards)
    lookup = lookup_of(LOOKUP)
    for step in range(3):
        for client in (single, sharded):
            client.push(lookup, gradients_of(lookup, step + 0.25), step=step, time_ms=step)
        expected, found = single.pull(lookup), sharded.pull(lookup)
        assert {s: r.tobytes() for s, r in found.items()} == {s: r.tobytes() for s, r in expected.items()}
    assert [s.stats()["rows"] for s in shards] and sum(sum(s.stats()["rows"].values()) for s in shards) == 105
    sharded.close()
    single.close()


def test_a_batch_is_one_pull_and_one_push_a_shard_with_all_stacks() -> None:
    client, _, shards = make_client(2)
    recording = [RecordingTransport(transport_to(s)) for s in shards]
    client.transports = recording
    lookup = lookup_of(LOOKUP)
    client.pull(lookup)
    client.push(
        lookup, gradients_of(lookup, 1.0), step=7, time_ms=8, oldest_engagement_ms=9, oldest_close_ms=10
    )
    for transport in recording:
        assert [m for m, _ in transport.calls] == ["pull", "push"]
        header = transport.calls[1][1]
        assert header == {
            "incarnation": 1,
            "worker": 3,
            "sequence": 1,
            "step": 7,
            "time_ms": 8,
            "oldest_engagement_ms": 9,
            "oldest_close_ms": 10,
            "stacks": [ADAGRAD, ROWWISE],
        }
    client.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_push_whose_call_fails_is_sent_again_and_applied_once(when: str) -> None:
    (client, transports, shards), (undisturbed, _, reference) = make_client(2), make_client(2)
    lookup = lookup_of(LOOKUP)
    transports[1].fail_next("push", when)
    for c in (client, undisturbed):
        c.push(lookup, gradients_of(lookup, 1.0), step=0, time_ms=0)
        c.push(lookup, gradients_of(lookup, 2.0), step=1, time_ms=0)
    assert [state_of(s) for s in shards] == [state_of(s) for s in reference]
    assert shards[1].stats()["repeats"] == (when == "after")
    client.close()
    undisturbed.close()


def test_an_unavailable_shard_is_reported_after_a_bounded_time() -> None:
    client, transports, _ = make_client(1, resend_for_s=5.0)
    transports[0].down = True
    with pytest.raises(UnavailableError):
        client.pull(lookup_of(LOOKUP))
    assert isinstance(client.clock, FakeClock) and 5.0 <= client.clock.monotonic_s() < 7.0


def test_stop_ends_the_waiting() -> None:
    stop = threading.Event()
    client, transports, _ = make_client(1, resend_for_s=None, stop=stop)
    transports[0].down = True
    stop.set()
    with pytest.raises(UnavailableError):
        client.pull(lookup_of(LOOKUP))


def test_after_a_lost_push_nothing_is_pushed_until_the_shards_are_restored() -> None:
    client, transports, shards = make_client(2)
    lookup = lookup_of(LOOKUP)
    transports[0].down = True
    with pytest.raises(UnavailableError):
        client.push(lookup, gradients_of(lookup, 1.0), step=0, time_ms=0)
    assert state_of(shards[0]) == {} and state_of(shards[1])
    transports[0].down = False
    with pytest.raises(UnavailableError):
        client.push(lookup, gradients_of(lookup, 1.0), step=1, time_ms=0)
    for shard in shards:
        shard.restore(2, "")
    client.set_incarnation(2)
    client.push(lookup, gradients_of(lookup, 1.0), step=0, time_ms=0)
    assert all(state_of(s) for s in shards)
    client.close()


@pytest.mark.parametrize("call", ["pull", "push"])
def test_another_incarnation_is_reported_at_once(call: str) -> None:
    client, _, shards = make_client(1)
    shards[0].restore(2, "")
    lookup = lookup_of(LOOKUP)
    with pytest.raises(FencedError):
        if call == "pull":
            client.pull(lookup)
        else:
            client.push(lookup, gradients_of(lookup, 1.0), step=0, time_ms=0)
    assert isinstance(client.clock, FakeClock) and client.clock.monotonic_s() == 0


def test_a_push_that_fails_inside_the_shard_is_not_sent_again() -> None:
    calls: list[str] = []

    def handler(
        method: str, header: Header, arrays: Sequence[np.ndarray]
    ) -> tuple[Header, Sequence[np.ndarray]]:
        calls.append(method)
        raise MemoryError("in the second stack")

    client = Client(small_schema(), [InMemoryTransport(handler)], worker=0, clock=FakeClock())
    lookup = lookup_of(LOOKUP)
    with pytest.raises(UnavailableError) as caught:
        client.push(lookup, gradients_of(lookup, 1.0), step=0, time_ms=0)
    assert calls == ["push"] and not isinstance(caught.value, TransportError)
    with pytest.raises(UnavailableError):
        client.push(lookup, gradients_of(lookup, 1.0), step=1, time_ms=0)
    assert calls == ["push"]


def test_a_client_keeps_no_batch_alive() -> None:
    client, _, _ = make_client(2)
    lookup = lookup_of(LOOKUP)
    client.pull(lookup)
    batch = weakref.ref(lookup)
    del lookup
    gc.collect()
    assert batch() is None
    client.close()


@pytest.mark.parametrize(
    ("stack", "gradient"),
    [(ADAGRAD, np.zeros((65, 3), np.float32)), (ADAGRAD, np.zeros((65, 4), np.float64))],
)
def test_a_gradient_of_another_shape_reaches_no_shard(stack: str, gradient: np.ndarray) -> None:
    client, _, shards = make_client(1)
    lookup = lookup_of(LOOKUP)
    gradients = {**gradients_of(lookup, 1.0), stack: gradient}
    with pytest.raises(WireError, match=f"{stack}"):
        client.push(lookup, gradients, step=0, time_ms=0)
    assert state_of(shards[0]) == {}


def test_a_stack_without_a_gradient_keeps_its_rows() -> None:
    client, _, shards = make_client(1)
    lookup = lookup_of(LOOKUP)
    gradients = gradients_of(lookup, 1.0)
    client.push(lookup, {ROWWISE: gradients[ROWWISE]}, step=0, time_ms=0)
    assert {stack for stack, _, _ in state_of(shards[0])} == {ROWWISE}


def test_pulls_and_pushes_may_run_at_the_same_time() -> None:
    client, _, _ = make_client(2)
    lookup = lookup_of(LOOKUP)
    errors: list[BaseException] = []

    def pull_often() -> None:
        try:
            for _ in range(30):
                client.pull(lookup)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=pull_often)
    thread.start()
    for step in range(30):
        client.push(lookup, gradients_of(lookup, 0.1), step=step, time_ms=0)
    thread.join(20)
    assert errors == [] and not thread.is_alive()
    client.close()


def test_shards_in_a_wrong_order_are_named() -> None:
    shards = [started_shard(num_shards=2, index=index) for index in (1, 0)]
    client = Client(small_schema(), [transport_to(shard) for shard in shards], worker=0)
    with pytest.raises(ConfigError, match="expected the address of shard 0 at place 0, got that of shard 1"):
        client.check_order()
    Client(small_schema(), [transport_to(shard) for shard in reversed(shards)], worker=0).check_order()
