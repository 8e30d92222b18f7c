"""Checks of what must hold for every model (docs/bring-your-own-model.md), on random requests of a schema.

Weights are perturbed first, so that every part matters. Rows depend only on table and id, so a request gets
the same rows in any batch. The model is trained as built, and served as serving does it: built, loaded,
frozen.

Letters: B candidates, T tasks, n candidates of one request.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from roostream.errors import CheckpointError, RoostreamError
from roostream.models.build import build_model
from roostream.models.config import ModelConfig
from roostream.models.inputs import Inputs, build_inputs
from roostream.models.model import Model, Targets
from roostream.runtime import tensor_file
from roostream.schema.schema import Feature, Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.block import encode_nro, encode_ro, main_key
from roostream.wire.decode import Decoder
from roostream.wire.lookup import Lookup, build_lookup
from roostream.wire.records import Record

_COUNTS = (3, 1, 0, 11, 17, 2)  # candidates a request: groups of several sizes, one alone, none
_CLOSE = 1e-5
_TIMED, _TIMED_CANDIDATES = 50, 20


class Verdict(NamedTuple):
    """Result of one check; `wrong` is a sentence, empty if the check passes."""

    check: str
    wrong: str


class _CheckedModel:
    """The model in training and in serving, and the example requests."""

    def __init__(self, schema: Schema, config: ModelConfig) -> None:
        self.schema, self.config = schema, config
        self.decoder = Decoder(schema, {schema.fingerprint: schema}.get)
        self.trained = _perturb(build_model(schema, config, 1))
        self.served = build_model(schema, config, 99)
        self.served.load_state_dict(self.trained.state_dict(), strict=True)
        self.served.eval().requires_grad_(False)
        self.requests = [example_request(schema, n, seed) for seed, n in enumerate(_COUNTS)]

    def alone(self, model: Model, request: ExampleRequest) -> Tensor:
        """Logits as serving computes them."""
        with torch.inference_mode():
            return model(
                self.inputs(self.decoder.decode_request(request.ro, request.nro, request.item_n, TIME_MS))
            )

    def together(self, requests: Sequence[ExampleRequest]) -> list[Tensor]:
        """Logits of each request in one batch, decoded as in training."""
        batch = self.batch(requests)
        with torch.no_grad():
            logits_BT = self.trained(self.inputs(batch))
        return list(torch.split(logits_BT, [len(r.item_n) for r in requests]))

    def batch(self, requests: Sequence[ExampleRequest]) -> Batch:
        records = [example_sample(self.schema, request, at) for at, request in enumerate(requests)]
        return self.decoder.decode(records)[0]

    def inputs(self, batch: Batch, *, train: bool = False) -> Inputs:
        lookup = build_lookup(batch)
        return build_inputs(batch, lookup, example_rows(self.schema, lookup), train=train)

    def learn(self, model: Model, batch: Batch, weight: float = 1.0) -> tuple[Tensor, Inputs]:
        """The loss after `backward`, and the inputs with the rows' gradients."""
        inputs = self.inputs(batch, train=True)
        targets = Targets(torch.from_numpy(batch.label_BT), weight * torch.from_numpy(batch.weight_BT))
        model.zero_grad()
        value = model.loss(inputs, model(inputs), targets)
        if value.requires_grad:
            value.backward()  # type: ignore[no-untyped-call]
        return value.detach(), inputs


def check_model(schema: Schema, config: ModelConfig) -> list[Verdict]:
    """Run every check, in the order of the page.

    Raises:
        RoostreamError: the model cannot be built.
    """
    subject = _CheckedModel(schema, config)
    return [Verdict(name, _wrong(check, subject)) for name, check in _CHECKS.items()]


def forward_time_us(schema: Schema, config: ModelConfig) -> float:
    """µs of a forward pass over one request of 20 candidates, the median of 50, without decoding and row
    lookup."""
    subject = _CheckedModel(schema, config)
    request = example_request(schema, _TIMED_CANDIDATES, 0)
    inputs = subject.inputs(subject.decoder.decode_request(request.ro, request.nro, request.item_n, TIME_MS))
    taken = []
    with torch.inference_mode():
        for _ in range(_TIMED):
            begun = time.perf_counter()
            subject.served(inputs)
            taken.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(taken)


def _wrong(check: Callable[[_CheckedModel], Iterator[str]], subject: _CheckedModel) -> str:
    try:
        return next(check(subject), "")
    except RoostreamError as error:
        return str(error)


def _is_logits(subject: _CheckedModel) -> Iterator[str]:
    for logits_BT in subject.together(subject.requests):
        if logits_BT.dtype != torch.float32:
            yield f"expected logits of float32, got {logits_BT.dtype}; convert them at the end of forward"
        if not torch.isfinite(logits_BT).all():
            yield "expected finite logits, got others; look for divisions by 0 and logarithms of 0"


def _is_deterministic(subject: _CheckedModel) -> Iterator[str]:
    first = build_model(subject.schema, subject.config, 3).state_dict()
    torch.rand(5)
    second = build_model(subject.schema, subject.config, 3).state_dict()
    if list(first) != list(second):
        yield "expected the same parameter names from two builds, got others; use fixed names"
    for name in first:
        if first[name].shape != second[name].shape or not _same_bits(first[name], second[name]):
            yield f"expected the same bits of {name} for the same seed, got others; draw parameters only"


def _keeps_nothing(subject: _CheckedModel) -> Iterator[str]:
    model = copy.deepcopy(subject.trained)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = subject.batch(subject.requests)
    with torch.no_grad():
        first, second = (model(subject.inputs(batch)) for _ in range(2))
    if not _same_bits(first, second):
        yield "expected the same logits from the same batch, got others; look for dropout or state"
    subject.learn(model, batch)
    for name, value in model.state_dict().items():
        if not _same_bits(before[name], value):
            yield f"expected {name} not to change between calls; replace layers with state, such as BatchNorm"


def _is_the_same_in_serving(subject: _CheckedModel) -> Iterator[str]:
    for request in subject.requests:
        in_training, in_serving = subject.together([request])[0], subject.alone(subject.served, request)
        if not _same_bits(in_training, in_serving):
            yield (
                f"expected the bits of training in serving for {len(request.item_n)} candidates, got a "
                f"difference of {_difference(in_training, in_serving):.1e}; forward looks at training or "
                "eval mode, labels or gradients"
            )


def _is_the_same_in_a_batch(subject: _CheckedModel) -> Iterator[str]:
    alone = [subject.alone(subject.served, request) for request in subject.requests]
    for order in (range(len(_COUNTS)), [5, 3, 4, 0, 2, 1], [3, 3, 1]):
        for at, logits_nT in zip(order, subject.together([subject.requests[i] for i in order]), strict=True):
            if not _difference(alone[at], logits_nT) <= _CLOSE:
                yield (
                    f"expected a request's logits in a batch within {_CLOSE:g} of those alone, got a "
                    f"difference of {_difference(alone[at], logits_nT):.1e}; nothing may be taken over all "
                    "requests of a batch"
                )


def _is_independent_of_others(subject: _CheckedModel) -> Iterator[str]:
    others = [example_request(subject.schema, n, 100 + seed) for seed, n in enumerate(_COUNTS)]
    for at in (0, 3, 4):
        before = subject.together(subject.requests)[at]
        again = subject.together([*others[:at], subject.requests[at], *others[at + 1 :]])[at]
        if not _difference(before, again) <= _CLOSE:
            yield (
                "expected a request's logits to be its own, got a change of "
                f"{_difference(before, again):.1e} with other requests beside it; use request_index_B and a "
                "sequence's length_R to keep requests apart"
            )


def _learns(subject: _CheckedModel) -> Iterator[str]:
    model = copy.deepcopy(subject.trained)
    value, inputs = subject.learn(model, subject.batch(subject.requests))
    if not torch.isfinite(value):
        yield f"expected a finite loss, got {float(value)}; divide by weights only where there are any"
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if not gradients:
        yield "expected a loss with gradients, got none for any parameter; look for detach and no_grad"
    for name, gradient in (
        *gradients.items(),
        *((f"rows of {stack}", rows_UD.grad) for stack, rows_UD in inputs.rows.items()),
    ):
        if gradient is not None and not torch.isfinite(gradient).all():
            yield f"expected finite gradients, got others for {name}; a square root or norm of 0 has none"
    nothing, _ = subject.learn(model, subject.batch(subject.requests), weight=0.0)
    if float(nothing) != 0.0:
        yield f"expected a loss of 0 where all weights are 0, got {float(nothing)}; use weight_BT"


def _is_safe_to_store(subject: _CheckedModel) -> Iterator[str]:
    state = subject.trained.state_dict()
    for name, value in state.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            yield f"expected finite values to store, got others in {name}"
    try:
        stored, _ = tensor_file.decode(tensor_file.encode({k: v.numpy() for k, v in state.items()}, {}))
    except (TypeError, ValueError, RuntimeError, CheckpointError) as error:
        yield f"expected parameters and buffers in float32 or int64, which safetensors stores, got {error}"
        return
    for name, value in state.items():
        if not _same_bits(value, torch.from_numpy(stored[name])):
            yield f"expected {name} to be read back as it was stored, got others"


_CHECKS: dict[str, Callable[[_CheckedModel], Iterator[str]]] = {
    "logits are finite float32 [B, T]": _is_logits,
    "same seed, same bits, same names": _is_deterministic,
    "nothing is kept between calls": _keeps_nothing,
    "the same bits in serving (G9)": _is_the_same_in_serving,
    "alone as in a batch, to 1e-5 (G9)": _is_the_same_in_a_batch,
    "independent of other requests": _is_independent_of_others,
    "loss and gradients are finite": _learns,
    "safe to store": _is_safe_to_store,
}


def _perturb(model: Model) -> Model:
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel()) + i).view(parameter.shape))
    return model


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest difference; NaN if there is one."""
    return float((a - b).abs().max()) if a.numel() else 0.0


TIME_MS = 1_700_000_000_000
_MAX_ENTRIES, _NUM_IDS, _OLDEST_MS = 9, 40, 10**9


class ExampleRequest(NamedTuple):
    """A request with which a model is checked."""

    ro: bytes
    nro: bytes
    item_n: np.ndarray  # int64


def example_request(schema: Schema, num_candidates: int, seed: int) -> ExampleRequest:
    """A request with some missing floats and lists, and some empty lists; equal for equal seeds."""
    random, n = np.random.default_rng(seed), num_candidates
    ro = {f.name: _value(f, random) for f in schema.ro}
    nro = {f.name: [_value(f, random) for _ in range(n)] for f in schema.nro}
    return ExampleRequest(encode_ro(schema, ro), encode_nro(schema, nro, n), random.integers(0, _NUM_IDS, n))


def example_sample(schema: Schema, request: ExampleRequest, at: int) -> Record:
    """The sample of a request, as record `at`; every third candidate is engaged."""
    n, tasks = len(request.item_n), len(schema.labels)
    sample = pb.Sample(
        header=pb.Header(request_id=f"r{at}", user_id=7, time_ms=TIME_MS, schema=schema.fingerprint),
        sample_id=at + 1,
        close_ms=TIME_MS + 1000,
        ro=request.ro,
        item_ids=request.item_n.tolist(),
        parts=[pb.Part(nro=request.nro, num_rows=n)],
        labels=[float((i + at) % 3 == 0) for i in range(n) for _ in range(tasks)],
        weight=1.0,
    )
    return Record("samples", 0, at, TIME_MS + 1000, b"", wire.encode(wire.SAMPLE, sample))


def example_rows(schema: Schema, lookup: Lookup) -> dict[str, np.ndarray]:
    """Stack → float32 [U, D], a function of table and id alone."""
    out = {}
    for stack, part in lookup.stacks.items():
        dim = schema.stacks[stack][0].dim
        phase_UD = (part.id_U.astype(np.float64) * 0.7 + part.table_U % 97)[:, None] * np.arange(1, dim + 1)
        out[stack] = (0.5 * np.sin(phase_UD)).astype(np.float32)
    return out


def _value(f: Feature, random: np.random.Generator) -> object:
    missing = random.random() < 0.1
    if not f.is_list:
        return float("nan") if missing else float(np.float32(random.exponential(2.0)))
    if missing:
        return None
    length = int(random.integers(0, _MAX_ENTRIES + 1))
    ids = random.integers(0, _NUM_IDS, length).tolist()
    if f.kind == "ids":
        return ids
    if f.kind == "weighted_ids":
        return {"ids": ids, "weights": random.exponential(1.0, length).tolist()}
    ids_of = {c: random.integers(0, 3, length).tolist() for c in f.id_columns}
    times_of = {
        c: (TIME_MS - np.sort(random.integers(0, _OLDEST_MS, length))).tolist() for c in f.time_columns
    }
    return {main_key(f): ids, **ids_of, **times_of}
