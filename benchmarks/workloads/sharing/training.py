"""A training step with its shard in the same process, on requests in whatever form they arrive."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import torch

from benchmarks.question import Work
from benchmarks.workloads import data
from benchmarks.workloads.sharing.architectures import ARCHITECTURES
from benchmarks.workloads.sharing.bound import A_BATCH, A_REQUEST, FLOP
from benchmarks.workloads.sharing.counting import bytes_of_batch, bytes_of_inputs, bytes_of_rows, flops
from benchmarks.workloads.sharing.forms import FORMS
from benchmarks.workloads.sharing.pools import pool
from benchmarks.workloads.training_step import shard_client
from param_server.client import Client
from roostream.models.build import build_model
from roostream.models.config import ModelConfig
from roostream.models.inputs import Inputs, build_inputs
from roostream.models.model import Targets
from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup, build_lookup
from trainer.dense_part.adam import DenseAdam

_LEARNING_RATE = 2e-3


class Learner:
    """A model and the rows that it learns."""

    def __init__(
        self, config: ModelConfig, client: Client, schema: Schema, *, deduplicated: bool = False
    ) -> None:
        self.deduplicated = deduplicated
        self.model = build_model(schema, config, 0)
        self.client = client
        self.optimizer = DenseAdam(self.model.named_parameters(), learning_rate=_LEARNING_RATE)

    def train(self, batch: Batch) -> None:
        """Look up, pull, score, learn, push: what the loop does with a batch, without predictions and metrics."""
        lookup = build_lookup(batch, deduplicated=self.deduplicated)
        inputs = self.inputs(batch, lookup)
        self.learn(batch, inputs)
        self.optimizer.step()
        gradients = {
            stack: rows_UD.grad.numpy() for stack, rows_UD in inputs.rows.items() if rows_UD.grad is not None
        }
        self.client.push(lookup, gradients, step=1, time_ms=data.T0_MS)

    def learn(self, batch: Batch, inputs: Inputs) -> None:
        """Forward, loss, backward."""
        self.optimizer.zero_grad()
        targets = Targets(torch.from_numpy(batch.label_BT), torch.from_numpy(batch.weight_BT))
        self.model.loss(inputs, self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]

    def inputs(self, batch: Batch, lookup: Lookup) -> Inputs:
        """With the rows as they are now."""
        return build_inputs(batch, lookup, self.client.pull(lookup), train=True)


@contextlib.contextmanager
def trained(architecture: str, form: str, of: str | int, size: int, batches: int) -> Iterator[Work]:
    """`form`: a row of FORMS; `of`, `size`, `batches`: as `pools.pool`. Units are impressions. A step is a batch, of a log, whose
    batches differ, as many as its pool has."""
    torch.set_num_threads(1)
    its = pool(of, size, batches)
    arrival = FORMS[form](its, size)
    turns = len(its) if isinstance(of, str) else 1
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(ARCHITECTURES[architecture], shard_client(its[0].schema, folder), its[0].schema)
        first = [next(arrival.trained) for _ in its]
        number = sum(batch.num_candidates for batch in first[:turns])

        def step() -> None:
            for _ in range(turns):
                learner.train(next(arrival.trained))

        yield Work(step, number, functools.cache(lambda: counts(learner, arrival.arriving, first, turns)))


def counts(
    learner: Learner, arriving: Sequence[Batch], trained: Sequence[Batch], turns: int
) -> Mapping[str, float]:
    """Of what arrives and of what is trained; FLOPs of the first `turns` batches."""
    number = sum(batch.num_candidates for batch in trained)
    inputs = [learner.inputs(batch, build_lookup(batch)) for batch in trained]
    counted = list(zip(trained, inputs, strict=True))[:turns]
    total = sum(flops(functools.partial(learner.learn, batch, x)) for batch, x in counted)
    return {
        A_BATCH: number / len(trained),
        A_REQUEST: number / sum(b.num_requests for b in trained),
        FLOP: total / sum(b.num_candidates for b, _ in counted) / 1e3,
        "bytes that arrive": sum(map(bytes_of_batch, arriving)) / sum(b.num_candidates for b in arriving),
        "bytes into the model": sum(map(bytes_of_inputs, inputs)) / number,
        "bytes of rows pulled": sum(map(bytes_of_rows, inputs)) / number,
    }
