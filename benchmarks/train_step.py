"""Where does the time of one training step go?

One training step over samples in memory with a shard in the same process, in total and by stage.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from benchmarks.common import samples as data
from benchmarks.common.shard import local_client
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from roostream.models.build import KINDS, build_model
from roostream.models.config import ModelConfig, RankerConfig
from roostream.models.inputs import Inputs, build_inputs
from roostream.models.linear_part import LinearPart
from roostream.models.model import Targets
from roostream.runtime.clock import SystemClock
from roostream.runtime.kafka.consumer import PartitionLag
from roostream.runtime.kafka.topics import SAMPLES, Partition, Progress
from roostream.runtime.work_unit import TableInput
from roostream.schema.schema import Schema
from roostream.wire.decode import Decoder
from roostream.wire.lookup import build_lookup
from roostream.wire.records import Record
from trainer.batch_source import NewestIds
from trainer.chunks import Chunk
from trainer.config import LoopConfig
from trainer.dense_part.adam import DenseAdam
from trainer.loop import LoopDependencies, TrainLoop
from trainer.predictions import encode_predictions
from trainer.record_source import build_chunk
from trainer.rows import ShardRows

NUM_PARTITIONS = 4  # of `data.sample_records`
BATCHES = 4


class Endless:
    """A source that repeats its samples under new sample ids, so that none is skipped as a duplicate."""

    def __init__(self, records: list[Record], decoder: Decoder) -> None:
        self.all, self.decoder, self.at = records, decoder, 0
        self.assign(range(NUM_PARTITIONS))

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        out = []
        for _ in range(max_requests):
            record, (head, tail) = (
                self.records[self.at % len(self.records)],
                self.parts[self.at % len(self.parts)],
            )
            self.at += 1
            out.append(record._replace(value=head + self.at.to_bytes(8, "little") + tail, offset=self.at))
        return build_chunk(out, self.decoder, 0)

    def poll_remaining(self, max_requests: int) -> Chunk | None:
        return None

    def seek(self, at: Progress, leader_epochs: Mapping[Partition, int] = MappingProxyType({})) -> None:
        """No effect."""

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        """Drop the samples of other partitions."""
        self.numbers = sorted(numbers)
        self.records = [record for record in self.all if record.partition in self.numbers]
        self.parts = [_around_id(r.value, r.offset * NUM_PARTITIONS + r.partition + 1) for r in self.records]

    def bound(self, ends: Progress) -> None:
        """No effect: the source never ends."""

    @property
    def ended(self) -> bool:
        return False

    def newest_ids(self, trained: Progress) -> Mapping[Partition, NewestIds]:
        """Nothing is remembered."""
        return {}

    def positions(self) -> Progress:
        return {(SAMPLES, p): 0 for p in self.numbers}

    def lag(self) -> dict[Partition, PartitionLag]:
        return {}

    @property
    def num_lost(self) -> int:
        return 0

    def close(self) -> None:
        """No resources."""


class Silent:
    """`Outputs` that drop every message."""

    def prediction(self, prediction: Any) -> None: ...

    def dead_letter(self, letter: Any) -> None: ...

    def flush(self) -> None: ...


def _around_id(value: bytes, sample_id: int) -> tuple[bytes, bytes]:
    """A sample record cut at its id: field 2, fixed64."""
    at = value.index(b"\x11" + sample_id.to_bytes(8, "little")) + 1
    return value[:at], value[at + 8 :]


class Case:
    """A training loop, and one of its batches with all intermediate results. Methods are the stages."""

    def __init__(
        self,
        folder: str,
        schema: Schema,
        records: list[Record],
        model: ModelConfig | None = None,
        **settings: Any,
    ) -> None:
        """`records`: BATCHES batches of one size; `model`: None = our ranker; `settings`: of the loop."""
        model = model or RankerConfig()
        torch.set_num_threads(1)
        self.schema, self.records, requests = schema, records, len(records) // BATCHES
        self.client = local_client(self.schema, folder)
        self.decoder = Decoder(self.schema, {self.schema.fingerprint: self.schema}.get)
        self.source = Endless(self.records, self.decoder)
        self.outputs = Silent()
        config = LoopConfig(
            batch_requests=requests, first_batch_requests=requests, dedupe_horizon_ms=60_000, **settings
        )
        dependencies = LoopDependencies(
            source=self.source, rows=ShardRows(self.client), outputs=self.outputs, clock=SystemClock()
        )
        self.loop = TrainLoop(config, self.schema, model, dependencies)
        self.batch = self.decoder.decode(self.records[:requests])[0]
        self.lookup = build_lookup(self.batch)
        self.rows = self.client.pull(self.lookup)
        self.model = build_model(self.schema, model, 0)
        self.optimizer = DenseAdam(
            self.model.named_parameters(),
            learning_rate=2e-3,
            linear=[part for part in self.model.modules() if isinstance(part, LinearPart)],
        )
        self.inputs = self._inputs()
        self.gradients = {name: np.full_like(rows_UD, 1e-6) for name, rows_UD in self.rows.items()}
        self.label_BT, self.weight_BT = (
            torch.from_numpy(self.batch.label_BT),
            torch.from_numpy(self.batch.weight_BT),
        )
        self.score_BT = np.random.default_rng(3).random(self.batch.label_BT.shape, dtype=np.float32)

    @functools.cached_property
    def _matrix_products(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Input, weight and output gradient of each matrix of the model."""
        out = []
        for name, parameter in self.model.named_parameters():
            if parameter.dim() != 2 or ".times." in name:
                continue
            rows = self.batch.num_requests if name.startswith("request_tower") else self.batch.num_candidates
            if ".key_value" in name:
                rows = sum(len(sequence.index_L) for sequence in self.inputs.sequences.values())
            num_out, num_in = parameter.shape
            out.append((torch.randn(rows, num_in), parameter.detach(), torch.randn(rows, num_out)))
        return out

    def _inputs(self) -> Inputs:
        return build_inputs(self.batch, self.lookup, self.rows, "cpu", train=True)

    def whole(self) -> None:
        assert self.loop.step()

    def decode(self) -> None:
        self.decoder.decode(self.records[: self.batch.num_requests])

    def look_up(self) -> None:
        build_lookup(self.batch)

    def pull(self) -> None:
        self.client.pull(self.lookup)

    def push(self) -> None:
        self.client.push(self.lookup, self.gradients, step=1, time_ms=data.T0_MS)

    def to_tensors(self) -> None:
        self._inputs()

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        targets = Targets(self.label_BT, self.weight_BT)
        self.model.loss(self.inputs, self.model(self.inputs), targets).backward()  # type: ignore[no-untyped-call]

    def score(self) -> None:
        """The averaged weights score each batch too; here the model stands for them."""
        with torch.no_grad():
            self.model(self.inputs)

    def products(self) -> None:
        """The limit: the matrix products of the forward and backward pass."""
        for x_NI, weight_OI, gradient_NO in self._matrix_products:
            torch.mm(x_NI, weight_OI.t())
            torch.mm(gradient_NO, weight_OI)
            torch.mm(gradient_NO.t(), x_NI)

    def count(self) -> None:
        """Progressive metrics, by partition."""
        self.loop.partitions.count(self.batch, self.score_BT)

    def predict(self) -> None:
        """A prediction message a request."""
        for prediction in encode_predictions(self.batch, self.score_BT, 1):
            self.outputs.prediction(prediction)

    def adam(self) -> None:
        self.optimizer.step()


def demo_case(folder: str, requests: int, candidates: int, model: ModelConfig | None = None) -> Case:
    """A case of the demo's schema."""
    schema = data.demo_schema()
    return Case(folder, schema, data.sample_records(schema, requests * BATCHES, candidates=candidates), model)


def ebnerd_case(folder: str, requests: int) -> Case:
    """A case of EB-NeRD's schema, with lists as long as in that log."""
    schema, history = data.ebnerd_schema(), data.EBNERD_HISTORY
    records = data.sample_records(schema, requests * BATCHES, candidates=data.EBNERD_LISTS, history=history)
    return Case(folder, schema, records)


@contextlib.contextmanager
def on_device(kind: str, requests: int, history: int, settings: Mapping[str, Any]) -> Iterator[Work]:
    """A complete step of a kind of model on EB-NeRD's schema; units are requests. `settings`: of the loop."""
    schema = data.ebnerd_schema()
    records = data.sample_records(schema, requests * BATCHES, candidates=data.EBNERD_LISTS, history=history)
    with tempfile.TemporaryDirectory() as folder:
        case = Case(folder, schema, records, KINDS[kind].config(), **settings)
        yield Work(case.whole, requests)


def stage(name: str, requests: int, candidates: int) -> AbstractContextManager[Work]:
    """`name`: a method of `demo_case`."""
    return _work(name, lambda folder: demo_case(folder, requests, candidates))


def ebnerd_stage(name: str, requests: int) -> AbstractContextManager[Work]:
    """`name`: a method of `ebnerd_case`."""
    return _work(name, lambda folder: ebnerd_case(folder, requests))


@contextlib.contextmanager
def _work(name: str, build: Callable[[str], Case]) -> Iterator[Work]:
    with tempfile.TemporaryDirectory() as folder:
        case = build(folder)
        case.forward_backward()
        yield Work(getattr(case, name))


_WORKLOAD = "benchmarks.train_step"


_STAGES = (
    ("decode", "decode"),
    ("look up keys", "look_up"),
    ("pull", "pull"),
    ("tensors", "to_tensors"),
    ("forward and backward", "forward_backward"),
    ("forward with averaged weights", "score"),
    ("dense optimizer", "adam"),
    ("push", "push"),
    ("predictions", "predict"),
    ("progressive metrics", "count"),
)


def _step(name: str, function: str, *size: int) -> Row:
    """`function`: called with the name of a stage and `size`."""
    setup = f"{_WORKLOAD}:{function}"
    return Row(
        name=name,
        unit="steps",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("whole", setup, ("whole", *size)),
            *(Subject(stage, setup, (method, *size), "stage") for stage, method in _STAGES),
            Subject("products of matrices alone", setup, ("products", *size), "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="train-step",
    summary="Where does the time of one training step go?",
    rows=(
        _step("a step of 512 requests of 5 candidates", "stage", 512, 5),
        _step("a step of 64 requests as EB-NeRD's, of 11 candidates and 50 entries", "ebnerd_stage", 64),
    ),
    slice_s=0.3,
    rounds=5,
    interpretation="""\
The forward and backward pass is by far the largest part of a step; lookup, pull and push of rows are a few
percent of it. "Whole" takes samples from the source, trains, pushes and writes predictions. The stages are
parts of it, timed alone on prepared inputs. The limit is the matrix products of one forward and backward
pass. Samples are in memory, one shard runs in the same process, and there is one thread.""",
)
