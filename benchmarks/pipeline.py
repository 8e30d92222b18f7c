"""What does it save to read, pull and push in parallel with training?

Training steps with shard processes: sequential, pipelined, and each part alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import samples as data
from benchmarks.common.shard import remote_client, shard_processes
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from benchmarks.train_step import Endless, Silent
from param_server.client import Client
from roostream.models.config import RankerConfig
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.clock import SystemClock
from roostream.schema.schema import Schema
from roostream.wire.decode import Decoder
from roostream.wire.lookup import Lookup, build_lookup
from trainer.config import LoopConfig
from trainer.feed import connect_feed
from trainer.loop import LoopDependencies, TrainLoop
from trainer.pipeline.stage_timer import StageTimer
from trainer.rows import PushTimes, Rows, ShardRows

NUM_SHARDS = 2
_BATCHES = 8


class ReadyRows:
    """`Rows` without a shard: zeros, and gradients are dropped."""

    def __init__(self, schema: Schema) -> None:
        self.width = {stack: tables[0].dim for stack, tables in schema.stacks.items()}

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        """No state."""

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        return {stack: torch.zeros(len(of.id_U), self.width[stack]) for stack, of in lookup.stacks.items()}

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        """Drop the gradients."""

    def save(self) -> None:
        """No state."""


@contextlib.contextmanager
def _client(schema: Schema) -> Iterator[Client]:
    with (
        shard_processes(str(data.DEMO), NUM_SHARDS) as shards,
        remote_client(schema, [shard.address for shard in shards]) as client,
    ):
        yield client


@contextlib.contextmanager
def steps(requests: int, candidates: int, read_ahead: int, staleness: int) -> Iterator[Work]:
    """Complete steps; `read_ahead` 0 is the serial loop."""
    schema = data.demo_schema()
    with (
        _client(schema) as client,
        training_loop(schema, ShardRows(client), (requests, candidates), read_ahead, staleness) as loop,
    ):
        yield Work(lambda: _step(loop))


@contextlib.contextmanager
def dense(requests: int, candidates: int, read_ahead: int) -> Iterator[Work]:
    """The same steps without waiting for rows."""
    schema = data.demo_schema()
    with training_loop(schema, ReadyRows(schema), (requests, candidates), read_ahead, 0) as loop:
        yield Work(lambda: _step(loop))


@contextlib.contextmanager
def sparse(requests: int, candidates: int) -> Iterator[Work]:
    """Pull and push alone."""
    schema = data.demo_schema()
    records = data.sample_records(schema, requests * _BATCHES, candidates=candidates)
    decoder = Decoder(schema, {schema.fingerprint: schema}.get)
    parts = (records[start : start + requests] for start in range(0, len(records), requests))
    lookups = itertools.cycle([build_lookup(decoder.decode(part)[0]) for part in parts])
    with _client(schema) as client:

        def step() -> None:
            lookup = next(lookups)
            gradients = {name: np.full_like(rows, 1e-6) for name, rows in client.pull(lookup).items()}
            client.push(lookup, gradients, step=1, time_ms=data.T0_MS)

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
    dependencies = LoopDependencies(source=source, rows=rows, outputs=Silent(), clock=clock)
    loop = TrainLoop(
        config, schema, RankerConfig(), dataclasses.replace(dependencies, feed=feed, stages=stages)
    )
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
The difference between a step with shards and one whose rows are ready is the time that training waits for
rows. No step can be shorter than the larger of "rows ready" and "pull and push alone". With staleness 1
rows are pulled before the push of the last step; with staleness 0 all arrays equal those of the sequential
loop. The two shards are processes on the same cores as training, so work beside training takes CPU from it;
one torch thread, samples in memory.""",
)
