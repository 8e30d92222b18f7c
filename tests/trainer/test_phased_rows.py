"""The rows of a running stack over both phases: in TorchRec's collections while history is trained, and then
at the shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from param_server.client import Client
from param_server.server import Shard, ShardRpcHandler
from roostream.runtime.clock import FakeClock
from roostream.runtime.health import Health
from roostream.runtime.rpc.transport import Handler, InMemoryTransport
from tests.param_server.shard_support import MemoryStore, link_manifest, started_shard, state_of
from tests.trainer.torchrec_row_workers import batch, schema
from trainer.process_group import DualRendezvous, GroupSpec, TorchRendezvous
from trainer.row_home import StackShards
from trainer.rows import PhasedRows, PushTimes, Rows, ShardRows

pytest.importorskip("torchrec")

from trainer.torchrec_rows import TorchRecRows

SHARDS = 2
State = dict[tuple[str, int, int], bytes]


class StackHarness:
    """Shards, a store, and the rows of one worker in both phases."""

    def __init__(
        self, rendezvous: TorchRendezvous, on_call: Callable[[str], None] = lambda method: None, **more: Any
    ) -> None:
        """`on_call(method)` is called before each call of a shard. `more`: arguments of `TorchRecRows`."""
        self.store, self.initial = MemoryStore(), True
        self.shards: list[Shard] = [
            started_shard(index=n, num_shards=SHARDS, schema=schema(), store=self.store)
            for n in range(SHARDS)
        ]
        handlers = [observed(ShardRpcHandler(shard).handle, on_call) for shard in self.shards]
        self.client = Client(schema(), list(map(InMemoryTransport, handlers)), worker=0, num_buckets=64)
        self.torchrec_rows = TorchRecRows(schema(), StackShards(self.client, 0), **more)
        self.rows = PhasedRows(self.torchrec_rows, ShardRows(self.client), lambda: self.initial)
        self.rendezvous = DualRendezvous(rendezvous, self.torchrec_rows)
        self.incarnation, self.committed = 1, ""

    def begin(self, incarnation: int, *, initial: bool) -> None:
        """Start an incarnation from the newest commit, as RESTORE and START do."""
        if incarnation > 1:
            for shard in self.shards:
                shard.restore(incarnation, self.committed)
        self.incarnation, self.initial = incarnation, initial
        self.group = self.rendezvous.join(GroupSpec(incarnation, 0, 1, ""))
        self.rows.set_incarnation(incarnation, 1)

    def train(self, steps: range) -> None:
        train(self.rows, steps)

    def commit(self, seq: int) -> None:
        """Commit as the controller does: CUT at the worker, then FREEZE to COMMIT at the shards."""
        self.rows.save()
        for shard in self.shards:
            shard.freeze(seq, 0)
        self.committed = link_manifest(
            self.store,
            seq,
            self.incarnation,
            [shard.write(seq) for shard in self.shards],
            schema=f"{schema().fingerprint:016x}",
        )
        for shard in self.shards:
            shard.commit(seq)

    def state(self) -> State:
        return {key: bits for shard in self.shards for key, bits in state_of(shard).items()}


def observed(handler: Handler, on_call: Callable[[str], None]) -> Handler:
    def handle(method: str, header: Any, arrays: Any) -> Any:
        on_call(method)
        return handler(method, header, arrays)

    return handle


def train(rows: Rows, steps: range) -> None:
    for step in steps:
        lookup, gradients = batch(0, step)
        rows.pull(lookup)
        tensors = {name: torch.from_numpy(gradient) for name, gradient in gradients.items()}
        rows.push(lookup, tensors, PushTimes(step=step + 1, time_ms=100 * step))


@contextlib.contextmanager
def opened_stack(*arguments: Any, **more: Any) -> Iterator[StackHarness]:
    rendezvous = TorchRendezvous("127.0.0.1:0", device="cpu", timeout_s=60)
    harness = StackHarness(rendezvous, *arguments, **more)
    yield harness
    harness.group.leave()
    harness.client.close()
    rendezvous.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def stack() -> Iterator[StackHarness]:
    with opened_stack() as harness:
        yield harness


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commit_of_history_has_rows_and_states_and_the_stream_continues_with_them(
    stack: StackHarness,
) -> None:
    stack.begin(1, initial=True)
    stack.train(range(3))
    assert not stack.state(), "the worker must hold the rows until a commit"
    stack.commit(1)
    history = stack.state()
    stack.begin(2, initial=False)
    assert stack.state() == history, "the restored rows, states and times must equal the committed ones"
    stack.train(range(4, 6))

    shards = [started_shard(index=n, num_shards=SHARDS, schema=schema()) for n in range(SHARDS)]
    client = Client(
        schema(),
        [InMemoryTransport(ShardRpcHandler(shard).handle) for shard in shards],
        worker=0,
        num_buckets=64,
    )
    client.set_incarnation(1)
    train(ShardRows(client), range(3))
    train(ShardRows(client), range(4, 6))
    client.close()
    expected = {key: bits for shard in shards for key, bits in state_of(shard).items()}
    found = stack.state()
    assert found.keys() == expected.keys() and len(found) > 100
    for key, bits in expected.items():
        mine, other = (np.frombuffer(each[:-8], np.float32) for each in (found[key], bits))
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
        assert found[key][-8:] == bits[-8:]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_restore_within_history_loses_nothing_that_was_committed(stack: StackHarness) -> None:
    stack.begin(1, initial=True)
    stack.train(range(3))
    stack.commit(1)
    stack.train(range(4, 7))
    stack.rows.save()
    undisturbed = stack.state()
    stack.begin(2, initial=True)  # as after a kill: the shards are restored to the commit
    assert stack.state() != undisturbed
    stack.train(range(4, 7))
    stack.rows.save()
    assert stack.state() == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_loads_and_saves_many_rows_stays_alive() -> None:
    """`/livez` fails after 120 s without a sign of life, and the worker would be killed and start over. Each
    call of a shard takes 50 s here."""
    clock = FakeClock()
    health = Health(120.0, clock)
    reasons: dict[str, list[str]] = {"overwrite": [], "contains": [], "records": []}

    def on_call(method: str) -> None:
        if method in reasons:
            clock.advance(50)
            reasons[method].append(health.dead())

    health.turned()
    with opened_stack(on_call, on_progress=health.turned, slice_bytes=1 << 14) as stack:
        stack.begin(1, initial=True)
        stack.train(range(4))
        stack.commit(1)
        stack.train(range(4, 5))  # asks which rows have expired
        stack.rows.save()
        undisturbed = stack.state()
        stack.begin(2, initial=True)
        stack.train(range(4, 5))  # loads the committed rows
        stack.rows.save()
        assert stack.state() == undisturbed and len(undisturbed) > 1000
    assert {method: len(found) > 5 for method, found in reasons.items()} == dict.fromkeys(reasons, True)
    assert {method: set(found) for method, found in reasons.items()} == {key: {""} for key in reasons}
