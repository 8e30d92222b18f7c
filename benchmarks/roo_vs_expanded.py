"""What does it save to train on requests and not on impressions?

A training step with a shard in the same process, on requests and on impressions.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch

from benchmarks.common import samples as data
from benchmarks.common.architectures import ARCHITECTURES
from benchmarks.common.dataset_paths import EBNERD, MIND, absent
from benchmarks.common.flop_bound import A_BATCH, A_REQUEST, FLOP, derived, of_history
from benchmarks.common.flop_count import bytes_of_batch, bytes_of_inputs, bytes_of_rows, flops
from benchmarks.common.request_forms import FORMS
from benchmarks.common.request_pools import pool
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from benchmarks.train_step import shard_client
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
        """Look up, pull, score, learn, push: what the loop does with a batch, without predictions and
        metrics."""
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
    """`form`: a row of FORMS; `of`, `size`, `batches`: as `pools.pool`. Units are impressions. A step is a
    batch, of a log, whose batches differ, as many as its pool has."""
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


_TRAINED = "benchmarks.roo_vs_expanded:trained"
_LAYER = "benchmarks.common.long_history:layer"
_IMPRESSIONS, _BATCHES = 640, 4
_LONG = (1000, 10, 256)  # entries of a history, targets, width


def _row(architecture: str, of: str | int, named: str, skipped: str = "") -> Row:
    def subject(name: str, form: str, role: Literal["ours", "stage", "peer"]) -> Subject:
        return Subject(name, _TRAINED, (architecture, form, of, _IMPRESSIONS, _BATCHES), role)

    subjects = [
        subject("requests", "requests", "ours"),
        subject("adapter", "adapter", "peer"),
        subject("impressions", "impressions", "peer"),
        subject("RecD", "recd", "peer"),
    ]
    if of != 1:  # a request of one candidate has nothing to share
        subjects += [subject(name, name, "stage") for name in ("first of each", "one impression")]
    return Row(
        name=f"{architecture}, {named}",
        unit="impressions",
        clock="cpu",
        subjects=tuple(subjects),
        derives=derived,
        skipped=skipped,
    )


def _rows(architecture: str) -> list[Row]:
    made_up = [
        _row(architecture, k, f"{k} {'candidate' if k == 1 else 'candidates'} a request")
        for k in (1, 2, 5, 10, 20)
    ]
    return [
        *made_up,
        _row(architecture, "EB-NeRD", "EB-NeRD", absent(EBNERD)),
        _row(architecture, "MIND", "MIND", absent(MIND)),
    ]


BENCHMARK = Benchmark(
    name="roo-vs-expanded",
    summary="What does it save to train on requests instead of impressions?",
    rows=(
        *(row for architecture in ("retrieval", "early", "late") for row in _rows(architecture)),
        _row("late with HSTU", 5, "5 candidates a request"),
        Row(
            name="a layer of HSTU: 1000 entries, 10 targets, width 256",
            unit="impressions",
            clock="cpu",
            subjects=(
                Subject("requests", _LAYER, (True, *_LONG)),
                Subject("a target at a time", _LAYER, (False, *_LONG), "peer"),
            ),
            derives=functools.partial(of_history, *_LONG),
        ),
    ),
    slice_s=0.15,
    rounds=3,
    interpretation="""\
requests: whole requests, what they share is computed once for each. adapter: the same samples, made impressions and cut into
batches again in the step (ROO paper, 2.1.3). impressions: they arrive as impressions, in random order; that they had to be made
costs nothing. RecD: they arrive as impressions, those of a request next to each other; equal neighbours are found and made
deduplicated tensors with inverse indices in the step. All train the same impressions, about 640 a batch, with equal logits and
gradients (tests). Candidates don't see each other here: impressions could be trained so only with their whole list in each.

A step is look-up, pull, tensors, forward, loss, backward, dense step and push, on decoded batches, with a shard in the same
process and one thread; decoding, predictions and metrics are left out. Kinds of models are as by default, both towers and the
last with HSTU; "late" has the request's tower, UserArch and target attention. Made-up requests have 20 features with a history
of 50 and candidates 8; the logs are the first 2 560 impressions of each, histories cut at 50. "A request" are impressions for
each row of request-only features that is trained. Bytes and FLOPs are an impression's, and counted: bytes that arrive are those
of decoded arrays, rows those that are pulled (as many gradients go back); FLOPs are those of matrix products, both ways.

a is what a request's side costs, b a candidate's, c a step without both, from steps on the same requests whole, on 160 with their
first candidate alone, and on a single impression. K(a+b)/(a+Kb) is the most that sharing can give: it doesn't know c, which every
form pays once a batch, and which is much of a step where lists are long, since 640 impressions are few requests then. "Of the
bound" is the measured ratio over it.

RecD gets more than its paper describes (there floats, and the layers above lists, run for each impression), so that what is left
between it and requests is the search for duplicates and what arrives. The ROO paper, at 4 to 7 impressions a request, on GPUs:
retrieval 1.48 to 6.7 times as fast as impressions, early-stage 2.25 to 3.66, late-stage 1.32 to 2.0; against RecD 1.5
(early-stage) and 1.1 (late-stage, where the one trained on requests was another model).

HSTU with 1000 entries and 10 targets: the paper's formula, m (n² d + n d²) over (n + m)² d + (n + m) d², has one product of
tokens and one matrix, and gives 9.82. A layer has two products of tokens and five matrices, and the sequence of an impression
holds its target, n + 1 tokens: 9.86 is counted.""",
)
