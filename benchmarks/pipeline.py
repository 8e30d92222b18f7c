"""What does it save to read, pull and push in parallel with training?

Training steps with shard processes: sequential, pipelined, and each part alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import samples as data
from benchmarks.common.peer_process import Peer, start_peer
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from benchmarks.train_step import Endless, Silent
from param_server.client import Client
from roostream.models.config import RankerConfig
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.clock import SystemClock
from roostream.runtime.rpc.client import SocketTransport
from roostream.schema.schema import Schema
from roostream.wire.decode import Decoder
from roostream.wire.lookup import Lookup, build_lookup
from trainer.config import LoopConfig
from trainer.loop import LoopDependencies, TrainLoop
from trainer.pipeline.pipelined_feed import connect_feed
from trainer.pipeline.stage_timer import StageTimer
from trainer.rows import PushTimes, Rows, ShardRows

NUM_SHARDS = 2
_BATCHES = 8


class ReadyRows:
    """`Rows` that are there at once and take gradients at once."""

    def __init__(self, schema: Schema) -> None:
        self.width = {stack: tables[0].dim for stack, tables in schema.stacks.items()}

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        """Nothing is kept."""

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        return {stack: torch.zeros(len(of.id_U), self.width[stack]) for stack, of in lookup.stacks.items()}

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        """They are dropped."""


@contextlib.contextmanager
def shard_processes() -> Iterator[list[Peer]]:
    """Shards of the demo schema, in incarnation 1."""
    with contextlib.ExitStack() as opened:
        shards = [
            ("benchmarks.common.train_shard", str(index), str(NUM_SHARDS)) for index in range(NUM_SHARDS)
        ]
        yield [opened.enter_context(start_peer(*shard)) for shard in shards]


@contextlib.contextmanager
def client_of(
    schema: Schema, addresses: Sequence[str], *, worker: int = 0, workers: int = 1
) -> Iterator[Client]:
    """A worker's way to the shards, in incarnation 1."""
    with contextlib.ExitStack() as opened:
        transports = [SocketTransport(address) for address in addresses]
        for transport in transports:
            opened.callback(transport.close)
        client = Client(schema, transports, worker=worker)
        opened.callback(client.close)
        client.set_incarnation(1, workers)
        yield client


@contextlib.contextmanager
def client_of_shards(schema: Schema) -> Iterator[Client]:
    """A client of shards over loopback, in incarnation 1."""
    with shard_processes() as shards, client_of(schema, [shard.address for shard in shards]) as client:
        yield client


@contextlib.contextmanager
def steps(requests: int, candidates: int, read_ahead: int, staleness: int) -> Iterator[Work]:
    """Whole steps; `read_ahead` 0 is the serial loop."""
    schema = data.demo_schema()
    with (
        client_of_shards(schema) as client,
        training_loop(schema, ShardRows(client), (requests, candidates), read_ahead, staleness) as loop,
    ):
        yield Work(lambda: _step(loop))


@contextlib.contextmanager
def dense(requests: int, candidates: int, read_ahead: int) -> Iterator[Work]:
    """The same steps where no row is waited for: with `read_ahead`, what the loop's thread has to do in any
    case."""
    schema = data.demo_schema()
    with training_loop(schema, ReadyRows(schema), (requests, candidates), read_ahead, 0) as loop:
        yield Work(lambda: _step(loop))


@contextlib.contextmanager
def sparse(requests: int, candidates: int) -> Iterator[Work]:
    """Pull and push alone."""
    schema = data.demo_schema()
    records = data.sample_records(schema, requests * _BATCHES, candidates=candidates)
    decoder = Decoder(schema, {schema.fingerprint: schema}.get)
    lookups = [
        build_lookup(decoder.decode(records[at : at + requests])[0])
        for at in range(0, len(records), requests)
    ]
    with client_of_shards(schema) as client:
        at = [0]

        def step() -> None:
            at[0] = (at[0] + 1) % len(lookups)
            rows = client.pull(lookups[at[0]])
            client.push(
                lookups[at[0]],
                {n: np.full_like(r, 1e-6) for n, r in rows.items()},
                step=1,
                time_ms=data.T0_MS,
            )

        yield Work(step)


def _step(loop: TrainLoop) -> None:
    assert loop.step()


@contextlib.contextmanager
def training_loop(
    schema: Schema, rows: Rows, size: tuple[int, int], read_ahead: int, staleness: int
) -> Iterator[TrainLoop]:
    """`size`: requests a batch, candidates of each."""
    torch.set_num_threads(1)
    requests, candidates = size
    records = data.sample_records(schema, requests * _BATCHES, candidates=candidates)
    config = LoopConfig(batch_requests=requests, first_batch_requests=requests, dedupe_horizon_ms=60_000)
    clock = SystemClock()
    stages = StageTimer(clock)
    source, rows, feed = connect_feed(
        lambda: Endless(records, Decoder(schema, {schema.fingerprint: schema}.get)),
        rows,
        stages,
        staleness=staleness,
        read_ahead=read_ahead,
    )
    wiring = LoopDependencies(source=source, rows=rows, outputs=Silent(), clock=clock)
    loop = TrainLoop(config, schema, RankerConfig(), dataclasses.replace(wiring, feed=feed, stages=stages))
    try:
        yield loop
    finally:
        loop.feed.close()
        source.close()


_HERE = "benchmarks.pipeline"


def _row(requests: int, candidates: int) -> Row:
    size = (requests, candidates)
    return Row(
        name=f"a step of {requests} requests of {candidates} candidates, two shards over loopback",
        unit="steps",
        shows="cost",
        subjects=(
            Subject("read ahead, staleness 1", f"{_HERE}:steps", (*size, 2, 1)),
            Subject("read ahead, staleness 0", f"{_HERE}:steps", (*size, 2, 0), "stage"),
            Subject("one after the other", f"{_HERE}:steps", (*size, 0, 0), "stage"),
            Subject("read ahead, rows that are there at once", f"{_HERE}:dense", (*size, 2), "limit"),
            Subject(
                "one after the other, rows that are there at once", f"{_HERE}:dense", (*size, 0), "limit"
            ),
            Subject("pull and push alone", f"{_HERE}:sparse", size, "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="pipeline",
    summary="What does it save to read, pull and push beside training?",
    rows=(_row(64, 11), _row(512, 5)),
    slice_s=0.5,
    rounds=5,
    interpretation="""\
By how much a step with real shards is slower than one whose rows are there at once is the share of it that waits for rows. The
larger of "rows that are there at once" and "pull and push alone" is what a step can't be shorter than.

The demo schema, samples in memory, two shards in processes of their own, all on the same cores as training: what is done beside
it takes its core from somebody. One torch thread. With staleness 1 rows are pulled while one push before their training is still
to come; with 0 every array is that of "one after the other".""",
)
