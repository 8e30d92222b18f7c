"""What does the same DLRM train a second over the shards' rows, and over TorchRec's own?

Training steps of the same DLRM from the same rows: through our loop, from our batches, and with TorchRec's
own collection.

Letters: B candidates, K keys.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torchrec import KeyedJaggedTensor
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from benchmarks.common import dlrm_model
from benchmarks.common import samples as data
from benchmarks.common.dlrm_model import configs_of, dlrm_over, floats_of
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from benchmarks.train_step import Case, demo_case
from param_server.initial_rows import initial_rows
from roostream.models.build import build_model, load_model_config_or_code
from roostream.models.custom.torchrec_bags import as_kjt
from roostream.models.inputs import build_inputs
from roostream.models.loss import loss
from roostream.models.model import Targets
from roostream.schema.update_rules import Adagrad
from roostream.wire.batch import Batch
from roostream.wire.lookup import build_lookup
from trainer.rows import PushTimes, ShardRows

NUM_BATCHES = 4
_DENSE_RATE = 2e-3
_SEED = 0


def dlrm_case(folder: str, requests: int, candidates: int) -> Case:
    return demo_case(folder, requests, candidates, load_model_config_or_code(str(Path(dlrm_model.__file__))))


def batches_of(case: Case) -> list[Batch]:
    """The batches that the loop trains."""
    size = case.batch.num_requests
    return [case.decoder.decode(case.records[size * n : size * (n + 1)])[0] for n in range(NUM_BATCHES)]


class OurBatches:
    """A step from decoded batches with rows on a shard: lookup, pull, forward, backward, dense Adam, push."""

    def __init__(self, case: Case) -> None:
        self.model, self.optimizer, self.rows = case.model, case.optimizer, ShardRows(case.client)
        self.batches, self.num_steps = itertools.cycle(batches_of(case)), 0

    def step(self) -> float:
        batch = next(self.batches)
        lookup = build_lookup(batch)
        inputs = build_inputs(batch, lookup, self.rows.pull(lookup), train=True)
        targets = Targets(torch.from_numpy(batch.label_BT), torch.from_numpy(batch.weight_BT))
        self.optimizer.zero_grad()
        value = self.model.loss(inputs, self.model(inputs), targets)
        value.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.num_steps += 1
        gradients = {
            stack: rows_UD.grad for stack, rows_UD in inputs.rows.items() if rows_UD.grad is not None
        }
        self.rows.push(lookup, gradients, PushTimes(step=self.num_steps, time_ms=data.T0_MS))
        return float(value.detach())


class _Impressions(NamedTuple):
    """A batch as TorchRec's loaders give it: a row an impression."""

    float_BG: torch.Tensor
    ids: KeyedJaggedTensor
    targets: Targets


class TorchRecBatches:
    """A step of DLRM over FusedEmbeddingBagCollection: FBGEMM's exact Adagrad for rows, torch's fused Adam
    for the rest. Tensors are prepared: no lookup, no transfer."""

    def __init__(self, case: Case) -> None:
        schema, stack = case.schema, next(iter(case.schema.stacks))
        self.tables = schema.table_by_name
        rule = self.tables["item"].rule
        assert isinstance(rule, Adagrad)
        rates = {"lr": rule.learning_rate, "eps": rule.epsilon}
        self.bags = FusedEmbeddingBagCollection(
            configs_of(schema, data.NUM_IDS + 1), torch.optim.Adagrad, rates
        )
        self._copy_our_rows(rule)
        self.model = dlrm_over(self.bags, schema)
        weights = {
            n.removeprefix("own.dlrm."): v
            for n, v in build_model(schema, case.loop.model_config, _SEED).state_dict().items()
        }
        missing = self.model.load_state_dict(weights, strict=False)
        assert not missing.unexpected_keys and all("embedding_bags" in name for name in missing.missing_keys)
        dense = [p for name, p in self.model.named_parameters() if "embedding_bags" not in name]
        self.optimizer = torch.optim.Adam(dense, lr=_DENSE_RATE, fused=True)
        self.batches = itertools.cycle([_impressions(batch, stack) for batch in batches_of(case)])

    def _copy_our_rows(self, rule: Adagrad) -> None:
        with torch.no_grad():
            for name, bag in self.bags.embedding_bags.items():
                table, id_N = self.tables[name], np.arange(data.NUM_IDS + 1, dtype=np.int64)
                number_N = np.full(len(id_N), table.id, np.uint32)
                bag.weight.copy_(
                    torch.from_numpy(initial_rows(_SEED, number_N, id_N, table.dim, table.init_scale))
                )
            for state in self.bags.fused_optimizer().state_dict()["state"].values():
                for accumulator in state.values():
                    accumulator.fill_(rule.initial_accumulator)

    def step(self) -> float:
        batch = next(self.batches)
        self.optimizer.zero_grad()
        value = loss(self.model(batch.float_BG, batch.ids), batch.targets)
        value.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return float(value.detach())


def _impressions(batch: Batch, stack: str) -> _Impressions:
    """A row per candidate: request-only lists are repeated, values are ids."""
    lookup, dim = build_lookup(batch), batch.schema.stacks[stack][0].dim
    id_U = torch.from_numpy(lookup.stacks[stack].id_U)
    inputs = build_inputs(batch, lookup, {stack: np.zeros((len(id_U), dim), np.float32)})
    kjt = as_kjt(inputs, expand=True)
    ids = KeyedJaggedTensor(
        keys=kjt.keys(), values=id_U[kjt.values()], lengths=kjt.lengths(), stride=kjt.stride()
    )
    targets = Targets(torch.from_numpy(batch.label_BT), torch.from_numpy(batch.weight_BT))
    return _Impressions(floats_of(inputs), ids, targets)


def _work(step: Callable[[], object], impressions: int) -> Work:
    figures = {"CPU ms a step": 0.0}

    def timed() -> None:
        began_s = time.process_time()
        step()
        figures["CPU ms a step"] = 1000 * (time.process_time() - began_s)

    return Work(timed, impressions, figures=lambda: dict(figures))


@contextlib.contextmanager
def our_loop(requests: int, candidates: int) -> Iterator[Work]:
    """The worker's complete step, from encoded samples."""
    with tempfile.TemporaryDirectory() as folder:
        yield _work(dlrm_case(folder, requests, candidates).whole, requests * candidates)


@contextlib.contextmanager
def our_batches(requests: int, candidates: int) -> Iterator[Work]:
    with tempfile.TemporaryDirectory() as folder:
        yield _work(OurBatches(dlrm_case(folder, requests, candidates)).step, requests * candidates)


@contextlib.contextmanager
def torchrec_batches(requests: int, candidates: int) -> Iterator[Work]:
    with tempfile.TemporaryDirectory() as folder:
        yield _work(TorchRecBatches(dlrm_case(folder, requests, candidates)).step, requests * candidates)


_STEPS = "benchmarks.train_vs_torchrec"


def _row(requests: int, candidates: int) -> Row:
    size = (requests, candidates)
    return Row(
        name=f"batches of {requests * candidates} impressions, {candidates} of each request",
        unit="impressions",
        subjects=(
            Subject("our loop", f"{_STEPS}:our_loop", size),
            Subject("our step from decoded batches", f"{_STEPS}:our_batches", size, "stage"),
            Subject("TorchRec, from tensors", f"{_STEPS}:torchrec_batches", size, "peer"),
        ),
    )


BENCHMARK = Benchmark(
    name="train-vs-torchrec",
    summary="What does the same DLRM train a second over the shards' rows, and over TorchRec's own?",
    rows=(_row(2560, 1), _row(512, 5), _row(128, 20)),
    slice_s=0.5,
    rounds=5,
    interpretation="""\
Both sides train TorchRec's `DLRM` (dense 64-16, over 128-64-2) from the same rows, weights, batches and
Adagrad; a test compares their losses and rows to 1e-5. TorchRec gets prepared tensors with a row per
impression; its step has forward, backward with FBGEMM's fused Adagrad, and torch's fused Adam. "Our step
from decoded batches" adds lookup, pull, tensors and push with a shard in the same process; "our loop" also
decodes samples, skips repeated ids, scores, counts metrics, clips and writes predictions. We pool shared
features once per request, so our share grows with the candidates; with one candidate nothing is shared. One
thread, rows in the training process on both sides: nothing is said about shards behind a network or
TorchRec on several devices.""",
)
