"""What does it save to train on requests and not on impressions?

A training step with a shard in the same process, on requests and on impressions.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from benchmarks.common import samples as data
from benchmarks.common.dataset_paths import EBNERD, MIND, absent
from benchmarks.common.flop_count import bytes_of_batch, bytes_of_inputs, bytes_of_rows, flops
from benchmarks.common.public_logs import ebnerd_batch, mind_batch
from benchmarks.common.rebatch import Rebatcher, concatenate, cut, shuffled
from benchmarks.common.shard import local_client
from benchmarks.harness.benchmark import Benchmark, Row, Subject, SubjectResult, Work
from param_server.client import Client
from roostream.models.build import build_model
from roostream.models.config import HstuConfig, ModelConfig, RankerConfig, TwoTowerConfig
from roostream.models.inputs import Inputs, build_inputs
from roostream.models.layers import init_parameters
from roostream.models.model import Targets
from roostream.models.sequence.hstu import Hstu
from roostream.models.sequence.jagged_sequences import build_jagged_sequences
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.dedup import group_impressions
from roostream.wire.lookup import Lookup, build_lookup
from trainer.dense_part.adam import DenseAdam

# Without attention over the list, because impressions would need their whole list for it.
ARCHITECTURES: dict[str, ModelConfig] = {
    "retrieval": TwoTowerConfig(stage="retrieval", history="hstu"),
    "early": TwoTowerConfig(stage="ranking", history="hstu"),
    "late": RankerConfig(request_side="both", list_layers=0),
    "late with HSTU": HstuConfig(request_side="both", list_layers=0),
}


class Arrival(NamedTuple):
    """Arriving batches, and the batches trained. Making one from the other is a part of the step."""

    arriving: Sequence[Batch]
    trained: Iterator[Batch]


def requests(pool: Sequence[Batch], size: int) -> Arrival:
    """Requests, trained as they are."""
    return Arrival(pool, itertools.cycle(pool))


def first_candidates(pool: Sequence[Batch], size: int) -> Arrival:
    """A quarter of a batch, with only the first candidate of each request; requests repeat if there are
    few."""
    whole = concatenate(pool)
    first_R = whole.num_candidates_R.cumsum() - whole.num_candidates_R
    first_only = [whole.expand().take_requests(first_R[np.arange(max(size // 4, 2)) % len(first_R)])]
    return Arrival(first_only, itertools.cycle(first_only))


def one_impression(pool: Sequence[Batch], size: int) -> Arrival:
    """A single impression."""
    single = [pool[0].expand().take_requests(pool[0].num_candidates_R[:1] - 1)]
    return Arrival(single, itertools.cycle(single))


def adapted(pool: Sequence[Batch], size: int) -> Arrival:
    """Requests, expanded to impressions and rebatched in the step (ROO paper §2.1.3)."""
    return Arrival(pool, _rebatched(itertools.cycle(pool), size))


def impressions(pool: Sequence[Batch], size: int) -> Arrival:
    """Impressions with all features of their request, in random order, trained as they are."""
    batches = cut(shuffled(concatenate(pool).expand()), size)
    return Arrival(batches, itertools.cycle(batches))


def recd(pool: Sequence[Batch], size: int) -> Arrival:
    """Impressions of a clustered log, deduplicated in the step."""
    batches = cut(concatenate(pool).expand(), size)
    return Arrival(batches, map(group_impressions, itertools.cycle(batches)))


FORMS: dict[str, Callable[[Sequence[Batch], int], Arrival]] = {
    "requests": requests,
    "adapter": adapted,
    "impressions": impressions,
    "recd": recd,
    "first of each": first_candidates,
    "one impression": one_impression,
}


def _rebatched(batches: Iterator[Batch], size: int) -> Iterator[Batch]:
    rebatcher = Rebatcher(size)
    for batch in batches:
        yield from rebatcher.add(batch)


_HISTORY = 50
_LOGS = {"EB-NeRD": ebnerd_batch, "MIND": mind_batch}


@functools.cache
def pool(of: str | int, size: int, batches: int) -> tuple[Batch, ...]:
    """`of`: a log, or the candidates of each generated request; `size`: impressions a batch."""
    batch = _generated(of, size * batches // of) if isinstance(of, int) else _log(of)
    return tuple(cut(batch, size)[:batches])


def _generated(candidates: int, requests: int) -> Batch:
    schema = load_schema(Path(__file__).parent / "common" / "site.toml")
    records = data.sample_records(schema, requests, candidates=candidates, history=_HISTORY)
    return Decoder(schema, {schema.fingerprint: schema}.get).decode(records)[0]


@functools.cache
def _log(name: str) -> Batch:
    return _LOGS[name]()


A_BATCH, A_REQUEST, FLOP = "impressions a batch", "impressions a request", "kFLOP an impression"


class Costs(NamedTuple):
    """Microseconds of a step that takes c + R a + B b, with R requests of K candidates and B = R K
    impressions."""

    request: float  # a
    candidate: float  # b
    step: float  # c

    def bound(self, num_candidates: float) -> float:
        """K (a + b) / (a + K b)."""
        return (
            num_candidates
            * (self.request + self.candidate)
            / (self.request + num_candidates * self.candidate)
        )

    def forecast(self, num_impressions: float, num_candidates: float) -> float:
        """The bound of complete steps: (c + B (a + b)) / (c + R a + B b)."""
        impressions = self.step + num_impressions * (self.request + self.candidate)
        return impressions / (self.step + num_impressions * (self.request / num_candidates + self.candidate))


def costs(whole: SubjectResult, first: SubjectResult, one: SubjectResult) -> Costs:
    """Solve for the costs with three kinds of batches of the same requests: whole requests, a quarter as many
    impressions with a request each, and a single impression. A negative candidate cost becomes 0."""
    num_impressions, num_first = whole.figures[A_BATCH], first.figures[A_BATCH]
    num_requests = num_impressions / whole.figures[A_REQUEST]
    both = (first.cost_us * num_first - one.cost_us) / (num_first - 1)
    step = one.cost_us - both
    candidate = (whole.cost_us * num_impressions - step - num_requests * both) / (
        num_impressions - num_requests
    )
    candidate = min(max(candidate, 0.0), both)
    return Costs(both - candidate, candidate, step)


def derived(results: Mapping[str, SubjectResult]) -> Mapping[str, float]:
    """FLOPs saved; and if the costs were measured, the costs, the bound and the share of it that was
    reached."""
    whole, expanded = results["requests"], results["impressions"]
    out = {"FLOPs: impressions / requests": expanded.figures[FLOP] / whole.figures[FLOP]}
    if "first of each" in results:
        c = costs(whole, results["first of each"], results["one impression"])
        bound = c.bound(whole.figures[A_REQUEST])
        out |= {
            "a, µs a request": c.request,
            "b, µs a candidate": c.candidate,
            "c, µs a step": c.step,
            "bound K(a+b)/(a+Kb)": bound,
            "the same with c": c.forecast(whole.figures[A_BATCH], whole.figures[A_REQUEST]),
            "of the bound: adapter": results["adapter"].cost_us / whole.cost_us / bound,
            "of the bound: impressions": expanded.cost_us / whole.cost_us / bound,
        }
    return out


def paper_count(history: int, targets: int, width: int) -> float:
    """m (n² d + n d²) / ((n + m)² d + (n + m) d²): what a request saves of HSTU's FLOPs (ROO paper §3.3)."""
    n, m, d = history, targets, width
    return m * (n**2 * d + n * d**2) / ((n + m) ** 2 * d + (n + m) * d**2)


def of_history(
    history: int, targets: int, width: int, results: Mapping[str, SubjectResult]
) -> Mapping[str, float]:
    counted = results["a target at a time"].figures[FLOP] / results["requests"].figures[FLOP]
    return {
        "FLOP ratio, counted": counted,
        "FLOP ratio, by the paper's formula": paper_count(history, targets, width),
    }


_HEADS = 4


@contextlib.contextmanager
def hstu_layer(shared: bool, history: int, targets: int, width: int) -> Iterator[Work]:
    """Forward and backward pass of one HSTU layer for one request, without time bias; units are its targets.

    `shared`: all targets share the history; else each has its own copy.
    """
    torch.set_num_threads(1)
    module = Hstu(width, _HEADS, 1, history, times=False)
    init_parameters(module, seed=0)
    num_sequences, each = (1, targets) if shared else (targets, 1)
    counts = np.full(num_sequences, each, dtype=np.int32)
    sequences = build_jagged_sequences(np.full(num_sequences, history), None, counts, history)
    tokens_SD = torch.randn(num_sequences * history + targets, width)[sequences.source_S].requires_grad_()

    def step() -> None:
        module(tokens_SD, sequences)[sequences.token_B].sum().backward()

    yield Work(step, targets, functools.cache(lambda: {FLOP: flops(step) / targets / 1e3}))


_LEARNING_RATE = 2e-3


class Learner:
    """A model, its dense optimizer, and its rows on a shard."""

    def __init__(
        self, config: ModelConfig, client: Client, schema: Schema, *, deduplicated: bool = False
    ) -> None:
        self.deduplicated = deduplicated
        self.model = build_model(schema, config, 0)
        self.client = client
        self.optimizer = DenseAdam(self.model.named_parameters(), learning_rate=_LEARNING_RATE)

    def train(self, batch: Batch) -> None:
        """A step of the training loop without predictions and metrics."""
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
        return build_inputs(batch, lookup, self.client.pull(lookup), train=True)


@contextlib.contextmanager
def trained(architecture: str, form: str, of: str | int, size: int, num_batches: int) -> Iterator[Work]:
    """`form`: of FORMS; `of`, `size`, `batches`: of `pool`. Units are impressions. A step trains one batch,
    or for a log all batches of its pool, because they differ."""
    torch.set_num_threads(1)
    batches = pool(of, size, num_batches)
    arrival = FORMS[form](batches, size)
    turns = len(batches) if isinstance(of, str) else 1
    with tempfile.TemporaryDirectory() as folder:
        schema = batches[0].schema
        learner = Learner(ARCHITECTURES[architecture], local_client(schema, folder), schema)
        first = [next(arrival.trained) for _ in batches]
        number = sum(batch.num_candidates for batch in first[:turns])

        def step() -> None:
            for _ in range(turns):
                learner.train(next(arrival.trained))

        yield Work(step, number, functools.cache(lambda: counts(learner, arrival.arriving, first, turns)))


def counts(
    learner: Learner, arriving: Sequence[Batch], trained: Sequence[Batch], turns: int
) -> Mapping[str, float]:
    """Sizes of the arriving and trained batches; FLOPs of the first `turns` batches."""
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
_LAYER = "benchmarks.roo_vs_expanded:hstu_layer"
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
    generated = [
        _row(architecture, k, f"{k} {'candidate' if k == 1 else 'candidates'} a request")
        for k in (1, 2, 5, 10, 20)
    ]
    return [
        *generated,
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
All forms train the same impressions, about 640 a batch, with equal logits and gradients (tested), and a
step has lookup, pull, forward, backward and push on decoded batches with one thread. "Requests" computes
the request side once; the "adapter" expands and rebatches requests in the step; "impressions" arrive
expanded in random order; "RecD" finds equal neighbors in the step. K(a+b)/(a+Kb) is the most that sharing
can give, with a for the request side, b for a candidate and c for the rest of a step; the costs come from
steps on whole requests, on single candidates of 160 requests, and on one impression. The ROO paper, on GPUs
at 4 to 7 impressions a request, gained 1.48 to 6.7 (retrieval), 2.25 to 3.66 (early stage) and 1.32 to 2.0
(late stage) against impressions. The last row counts one HSTU layer beside the paper's formula, which omits
some of a layer's products (9.82 against 9.86).""",
)
