"""Checks of what must hold for every model (docs/bring-your-own-model.md), on random requests of a schema.

Weights are perturbed first, so that every part matters. Rows depend only on table and id, so a request gets
the same rows in any batch. The model is trained as built, and served as serving does it: built, loaded,
frozen.

Letters: B candidates, T tasks, n candidates of one request.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from roostream.errors import CheckpointError, ConfigError, RoostreamError
from roostream.models.build import build_model
from roostream.models.config import CustomModelConfig, ModelConfig
from roostream.models.custom.loading import CustomModel, backward, loaded_code
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
_MAX_CANDIDATES, _MAX_LIST = 2000, 2000  # of the largest request that is tried
_TIMED, _TIMED_CANDIDATES = 50, 20
_MATTERS = 1e-4  # change of the loss, relative
_FIRST_STEPS, _FIRST_STEP = 3, 0.01


class Verdict(NamedTuple):
    """Result of one check; `wrong` is a sentence, empty if the check passes."""

    check: str
    wrong: str


class _CheckedModel:
    """The model in training and in serving, and the example requests."""

    def __init__(self, schema: Schema, config: ModelConfig) -> None:
        self.schema, self.config = schema, config
        self.decoder = Decoder(schema, {schema.fingerprint: schema}.get)
        self.initial = build_model(schema, config, 1)
        self.trained = _perturb(build_model(schema, config, 1))
        self.names = list(self.trained.state_dict())
        self.served = self.copy(99).eval().requires_grad_(False)
        self.requests = [example_request(schema, n, seed) for seed, n in enumerate(_COUNTS)]
        # A new user: everything is missing, or every list is empty.
        self.requests += [example_request(schema, 4, 50, known=known) for known in ("nothing", "floats")]

    def copy(self, seed: int = 1) -> Model:
        """Another model with the same weights. Raises ConfigError: calls have added some."""
        for name in self.trained.state_dict():
            if name not in self.names:
                raise ConfigError(
                    f"expected all parameters from the beginning, got {name} in forward; make it in __init__"
                )
        model = build_model(self.schema, self.config, seed)
        model.load_state_dict(self.trained.state_dict(), strict=True)
        return model

    def alone(self, model: Model, request: ExampleRequest) -> Tensor:
        """Logits as serving computes them."""
        with torch.inference_mode():
            batch = self.decoder.decode_request(request.ro, request.nro, request.item_n, TIME_MS)
            return model(self.inputs(batch)).detach()

    def together(self, requests: Sequence[ExampleRequest]) -> list[Tensor]:
        """Logits of each request in one batch, decoded and computed as in training."""
        logits_BT = self.trained(self.inputs(self.batch(requests), train=True)).detach()
        return list(torch.split(logits_BT, [len(r.item_n) for r in requests]))

    def batch(self, requests: Sequence[ExampleRequest]) -> Batch:
        records = [example_sample(self.schema, request, at) for at, request in enumerate(requests)]
        return self.decoder.decode(records)[0]

    def inputs(self, batch: Batch, *, train: bool = False) -> Inputs:
        lookup = build_lookup(batch)
        return build_inputs(batch, lookup, example_rows(self.schema, lookup), train=train)

    def learn(
        self, model: Model, batch: Batch, weight: float = 1.0, part_of: int = 1
    ) -> tuple[Tensor, Inputs]:
        """Compute the loss and its gradients. Returns the loss, and the inputs, whose rows have gradients.
        `part_of`: how many batches like this one make up a step."""
        inputs = self.inputs(batch, train=True)
        model.zero_grad()
        value = self.loss(model, batch, inputs, weight, part_of)
        backward(model, value, inputs)
        return value.detach(), inputs

    def loss(
        self, model: Model, batch: Batch, inputs: Inputs, weight: float = 1.0, part_of: int = 1
    ) -> Tensor:
        targets = Targets(torch.from_numpy(batch.label_BT), weight * torch.from_numpy(batch.weight_BT))
        if part_of > 1:
            targets = targets._replace(total_T=part_of * targets.weight_BT.sum(dim=0))
        return model.loss(inputs, model(inputs), targets)


def check_model(schema: Schema, config: ModelConfig) -> list[Verdict]:
    """Run every check, in the order of the page; only the first if the model raises an error in it.

    Raises:
        RoostreamError: the model cannot be built.
    """
    subject, verdicts = _CheckedModel(schema, config), []
    for name, check in _CHECKS.items():
        try:
            verdicts.append(Verdict(name, next(check(subject), "")))
        except RoostreamError as error:
            verdicts.append(Verdict(name, str(error)))
            if len(verdicts) == 1:
                break
    return verdicts


def digest_of_build(schema: Schema, config: ModelConfig) -> str:
    """sha256 of a build's weights and logits, hex. Another process gets the same, unless the model depends on
    the order of a set, which differs between processes."""
    subject, digest = _CheckedModel(schema, config), hashlib.sha256()
    for name, value in subject.initial.state_dict().items():
        digest.update(name.encode() + _bits(value).numpy().tobytes())
    for logits_nT in subject.together(subject.requests):
        digest.update(logits_nT.numpy().tobytes())
    return digest.hexdigest()


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


def _is_logits(subject: _CheckedModel) -> Iterator[str]:
    for logits_BT in subject.together(subject.requests):
        if logits_BT.dtype != torch.float32:
            yield f"expected logits of float32, got {logits_BT.dtype}; convert them at the end of forward"
        if not torch.isfinite(logits_BT).all():
            yield "expected finite logits, got others; look for divisions by 0 and logarithms of 0"
    inputs = subject.inputs(subject.batch(subject.requests), train=True)
    if not torch.isfinite(subject.initial(inputs)).all():
        yield "expected finite logits from initial weights, whose biases are 0, got others; look for norms"
    if _are_probabilities(subject):
        yield "expected logits, got numbers in 0..1 for any weights; leave the last sigmoid or softmax out"


def _are_probabilities(subject: _CheckedModel) -> bool:
    """Whether the model seems to return probabilities instead of logits: all results are from 0 to 1, also
    with all weights times 30, and some are strictly between."""
    model = subject.copy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30.0)
    inputs = subject.inputs(subject.batch(subject.requests), train=True)
    both = torch.cat([model(inputs).detach(), *subject.together(subject.requests)])
    return bool(((both >= 0) & (both <= 1)).all()) and bool(((both > 0) & (both < 1)).any())


def _is_deterministic(subject: _CheckedModel) -> Iterator[str]:
    models = []
    for _ in range(2):
        models.append(build_model(subject.schema, subject.config, 3))
        torch.rand(5)
    first, second = (model.state_dict() for model in models)
    if list(first) != list(second):
        yield "expected the same parameter names from two builds, got others; use fixed names"
    for name in first:
        if first[name].shape != second[name].shape or not _same_bits(first[name], second[name]):
            yield f"expected the same bits of {name} for the same seed, got others; draw parameters only"
    inputs = subject.inputs(subject.batch(subject.requests), train=True)
    with torch.no_grad():
        if not _same_bits(*(model(inputs) for model in models)):
            yield (
                "expected the same logits from two builds with the same seed, got others; remove dropout and "
                "random tensors, and keep lists of layers in nn.ModuleList"
            )
    yield from _replaced_values(subject)


def _replaced_values(subject: _CheckedModel) -> Iterator[str]:
    """Sentences on parameters that start with other values than the constructor gives them. Random values do
    not count: they differ between two builds."""
    if not isinstance(subject.config, CustomModelConfig):
        return
    code, built, states = loaded_code(dataclasses.asdict(subject.config)), [], []
    for seed in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built.append(dict(CustomModel(code, subject.schema, subject.config).named_parameters()))
            states.append(torch.get_rng_state())
    if torch.equal(*states):  # the constructor sets a seed, so its random values are equal too
        return
    first, second = built
    other = build_model(subject.schema, subject.config, 2)
    for name, parameter in subject.initial.named_parameters():
        # Those that adjust_initial_parameters sets do not depend on the seed.
        is_drawn = not torch.equal(parameter, other.get_parameter(name)) or not parameter.any()
        is_set = torch.equal(first[name], second[name]) and not torch.equal(first[name], parameter)
        if is_drawn and is_set:
            yield (
                f"expected {name} to get its initial values in adjust_initial_parameters, got them in "
                "__init__, which does not count; move them there"
            )


def _keeps_nothing(subject: _CheckedModel) -> Iterator[str]:
    model = subject.copy()
    yield from _changed_inputs(subject, model)
    before = {name: value.clone() for name, value in _stored(model).items()}
    inputs = subject.inputs(subject.batch(subject.requests), train=True)
    with torch.no_grad():
        first, second = (model(inputs) for _ in range(2))
    if not _same_bits(first, second):
        yield (
            "expected the same logits from the same batch, got others; look for dropout, state, and changes "
            "of the inputs"
        )
    had = _attributes(model)
    first, second = (subject.learn(model, subject.batch(subject.requests))[0] for _ in range(2))
    if not _same_bits(first, second):
        yield "expected the same loss from the same batch, got others; look for averages over calls"
    for name, value in _stored(model).items():
        if not _same_bits(before[name], value):
            yield f"expected {name} not to change between calls; replace layers with state, such as BatchNorm"
    for name, attribute in _attributes(model).items():
        if name not in had or not _is_alike(had[name], attribute):
            yield (
                f"expected attribute {name!r} not to change between calls; use a local variable, and compute "
                "it again in loss if that needs it"
            )


def _changed_inputs(subject: _CheckedModel, model: Model) -> Iterator[str]:
    """Yield an error for each array of the inputs or targets that a call changes. They belong to the batch,
    whose items and labels are published and counted after the call."""
    batch = subject.batch(subject.requests)
    inputs = subject.inputs(batch, train=True)
    targets = Targets(torch.from_numpy(batch.label_BT), torch.from_numpy(batch.weight_BT))
    given = {"inputs": inputs, "targets": targets}
    had = {name: (array, _content(array)) for name, array in _arrays(given)}
    model.loss(inputs, model(inputs), targets)
    for name, array in _arrays(given):
        if name not in had or not _is_alike(had[name], (array, _content(array))):
            yield f"expected forward and loss to leave {name} as it is, got other values; change a copy"


def _arrays(value: object, name: str = "") -> Iterator[tuple[str, Tensor | np.ndarray]]:
    """All tensors and arrays in `Inputs` and `Targets`, each with its name, such as `inputs.item_B`."""
    if isinstance(value, Tensor | np.ndarray):
        yield name, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _arrays(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, Targets):
        for key, each in value._asdict().items():
            yield from _arrays(each, f"{name}.{key}")
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _arrays(each, f"{name}[{key!r}]" if name else key)
    elif isinstance(value, tuple):
        for at, each in enumerate(value):
            yield from _arrays(each, f"{name}[{at}]")


def _stored(model: Model) -> dict[str, Tensor]:
    """Parameters and buffers, also those that are not in the state dict."""
    return {**dict(model.named_buffers()), **model.state_dict()}


def _attributes(model: Model) -> dict[str, tuple[object, object]]:
    """Attributes of all modules, each with what a change in place changes."""
    return {
        f"{module_name}.{name}".removeprefix("own."): (value, _content(value))
        for module_name, module in model.named_modules()
        for name, value in vars(module).items()
    }


def _content(value: object) -> object:
    """The bytes of an array or a tensor of the CPU, or the size of another collection."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Tensor):
        is_plain = value.layout == torch.strided and value.device.type == "cpu"
        return _bits(value.detach()).numpy().tobytes() if is_plain else value.shape
    return len(value) if isinstance(value, Collection) else 0


def _is_alike(before: tuple[object, object], after: tuple[object, object]) -> bool:
    """Compare (value, content) of an attribute before and after a call. True if it is still the same object
    with the same content, or an equal number or text."""
    same = before[0] is after[0] or (isinstance(after[0], int | float | str) and before[0] == after[0])
    return same and before[1] == after[1]


def _is_the_same_in_serving(subject: _CheckedModel) -> Iterator[str]:
    for request in subject.requests:
        in_training, in_serving = subject.together([request])[0], subject.alone(subject.served, request)
        if not _same_bits(in_training, in_serving):
            difference = _difference(in_training, in_serving)
            cause = (
                "forward looks at training or eval mode, labels or gradients"
                if not difference <= _CLOSE
                else "torch multiplies transposed tensors in another way without gradients, so make them "
                "contiguous"
            )
            yield (
                f"expected the bits of training in serving for {len(request.item_n)} candidates, got a "
                f"difference of {difference:.1e}; {cause}"
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


def _runs_at_the_limits(subject: _CheckedModel) -> Iterator[str]:
    limits = subject.schema.limits
    num_candidates = min(limits.max_candidates, _MAX_CANDIDATES)
    request = example_request(subject.schema, num_candidates, 0, known="all")
    try:
        logits_nT = subject.alone(subject.served, request)
    except ConfigError as error:
        largest = f"{num_candidates:,} candidates and full lists of any age"
        yield f"for {largest}: {error}; or lower max_candidates, max_len"
        return
    if not torch.isfinite(logits_nT).all():
        yield f"expected finite logits for {num_candidates:,} candidates and full lists, got others"


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
    for model in (subject.copy(), subject.initial):
        value, inputs = subject.learn(model, subject.batch(subject.requests))
        if not torch.isfinite(value):
            yield f"expected a finite loss, got {float(value)}; divide by weights only where there are any"
        gradients = {name: p.grad for name, p in model.named_parameters()}
        gradients |= {f"rows of {stack}": rows_UD.grad for stack, rows_UD in inputs.rows.items()}
        if all(gradient is None for gradient in gradients.values()):
            yield "expected a loss with gradients, got none for any parameter; look for detach and no_grad"
        for name, gradient in gradients.items():
            if gradient is not None and not torch.isfinite(gradient).all():
                yield f"expected finite gradients, got others for {name}; a square root or norm of 0 has none"
    yield from _untrained(subject)
    yield from _mixed_up_labels(subject)
    half, _ = subject.learn(model, subject.batch(subject.requests), part_of=2)
    double, _ = subject.learn(model, subject.batch([*subject.requests, *subject.requests]))
    if _same_bits(value, half) and double < 1.5 * value:  # a mean, not a sum
        yield (
            "expected half the loss where a batch is half of a step, got the same; divide by targets.total_T "
            "if it is given"
        )
    batch = subject.batch(subject.requests)
    nothing = subject.loss(model, batch, subject.inputs(batch, train=True), weight=0.0).detach()
    if float(nothing) != 0.0:
        advice = "divide by weights only where there are any" if torch.isnan(nothing) else "use weight_BT"
        yield f"expected a loss of 0 where all weights are 0, got {float(nothing)}; {advice}"


def _untrained(subject: _CheckedModel) -> Iterator[str]:
    """Yield an error for each tensor on which the loss depends and which training would never change."""
    batch, model = subject.batch(subject.requests), subject.copy()
    inputs, again = (subject.inputs(batch, train=True) for _ in range(2))
    kept = _leaves(subject.loss(model, batch, inputs)) & _leaves(subject.loss(model, batch, again))
    for tensor in kept.difference(model.parameters()):
        yield (
            "expected tensors that require gradients to be parameters, got one of shape "
            f"{tuple(tensor.shape)}; make it an nn.Parameter of a module, a list of them an nn.ParameterList"
        )
    value, inputs = subject.learn(model, batch)
    for name, tensor in {**dict(model.named_parameters()), **inputs.rows}.items():
        what = f"rows of {name}" if name in inputs.rows else name
        if _is_still(tensor) and _matters(subject, model, tensor, batch, inputs, value):
            yield (
                f"expected gradients of {what}, on which the loss depends, got none; look for detach, .data, "
                "no_grad, round and sign, or freeze a parameter with requires_grad = False"
            )
    model, still = build_model(subject.schema, subject.config, 1), None
    for _ in range(_FIRST_STEPS):
        subject.learn(model, batch)
        now = {name for name, p in model.named_parameters() if _is_still(p)}
        still = now if still is None else still & now
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(_FIRST_STEP * parameter.grad.sign())
    model = subject.copy()
    value, inputs = subject.learn(model, batch)
    for name in sorted(still or ()):
        if _matters(subject, model, model.get_parameter(name), batch, inputs, value):
            yield (
                f"expected gradients of {name} from the initial weights, got 0; vectors start at 0, so set "
                "those that multiply in adjust_initial_parameters"
            )


def _mixed_up_labels(subject: _CheckedModel) -> Iterator[str]:
    """Yield an error for each label that changes gradients only in the logits of other labels, not in its own
    column."""
    model, batch = subject.copy(), subject.batch(subject.requests)
    inputs = subject.inputs(batch, train=True)
    logits_BT = model(inputs).detach().requires_grad_()
    label_BT, weight_BT = torch.from_numpy(batch.label_BT), torch.from_numpy(batch.weight_BT)

    def gradient(label_BT: Tensor) -> Tensor:
        value = model.loss(inputs, logits_BT, Targets(label_BT, weight_BT))
        (found_BT,) = torch.autograd.grad(value, logits_BT, allow_unused=True, materialize_grads=True)
        return found_BT

    before_BT = gradient(label_BT)
    for t, name in enumerate(subject.schema.tasks):
        other_BT = label_BT.clone()
        other_BT[:, t] = 1 - other_BT[:, t]
        changed_T = (gradient(other_BT) != before_BT).any(dim=0)
        if changed_T.any() and not changed_T[t]:
            yield (
                f"expected label {name!r} to train column {t} of the logits, got column "
                f"{int(changed_T.nonzero()[0])}; columns are in the order of the schema's labels"
            )


def _leaves(loss: Tensor) -> set[Tensor]:
    """The tensors that `backward` would give a gradient."""
    found, seen, waiting = set(), set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found |= {node.variable} if hasattr(node, "variable") else set()
        waiting += [following for following, _ in node.next_functions]
    return found


def _is_still(tensor: Tensor) -> bool:
    """Whether a tensor that should be trained has no gradient, or only zeros."""
    return tensor.requires_grad and tensor.numel() > 0 and (tensor.grad is None or not tensor.grad.any())


@torch.no_grad()
def _matters(
    subject: _CheckedModel, model: Model, tensor: Tensor, batch: Batch, inputs: Inputs, value: Tensor
) -> bool:
    """Whether the loss differs from `value` once `tensor`, a parameter or rows of the inputs, is changed. The
    tensor is restored afterwards."""
    before = tensor.clone()
    tensor.add_(0.1 * torch.cos(torch.arange(tensor.numel())).view(tensor.shape))
    changed = subject.loss(model, batch, inputs)
    tensor.copy_(before)
    return bool((changed - value).abs() > _MATTERS * value.abs())


def _is_safe_to_store(subject: _CheckedModel) -> Iterator[str]:
    subject.trained.column_names()  # raises ConfigError: they do not fit the parameters
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
    "as large as the schema's limits": _runs_at_the_limits,
    "loss and gradients are finite": _learns,
    "safe to store": _is_safe_to_store,
}


def _perturb(model: Model) -> Model:
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel()) + i).view(parameter.shape))
    return model


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, of numbers above 1 relative to them; NaN if there is one."""
    return float(((a - b).abs() / torch.maximum(a.abs(), b.abs()).clamp(min=1)).max()) if a.numel() else 0.0


TIME_MS = 1_700_000_000_000
_MAX_ENTRIES, _NUM_IDS, _OLDEST_MS = 9, 40, 10**9
_MAX_AGE_MS = (1 << 63) - 1  # times are any 64-bit integers
_ID_GAP = (1 << 63) // _NUM_IDS  # ids are any 64-bit integers, as strings are hashed


class ExampleRequest(NamedTuple):
    """A request with which a model is checked."""

    ro: bytes
    nro: bytes
    item_n: np.ndarray  # int64


def example_request(
    schema: Schema,
    num_candidates: int,
    seed: int,
    known: Literal["some", "nothing", "floats", "all"] = "some",
) -> ExampleRequest:
    """A request, equal for equal arguments. `known`: some floats and lists are missing and some lists are
    empty; everything is missing; all lists are empty; or nothing is missing, and lists of the request are
    full, with entries of any age."""
    random, n = np.random.default_rng(seed), num_candidates
    ro = {f.name: _value(f, random, known, _full(schema, f)) for f in schema.ro}
    nro = {f.name: [_value(f, random, known, 1) for _ in range(n)] for f in schema.nro}
    item_n = _ID_GAP * random.integers(0, _NUM_IDS, n)
    return ExampleRequest(encode_ro(schema, ro), encode_nro(schema, nro, n), item_n)


def _full(schema: Schema, f: Feature) -> int:
    """Entries of the longest list."""
    return min(f.max_len or schema.limits.max_list, _MAX_LIST)


def example_sample(schema: Schema, request: ExampleRequest, at: int) -> Record:
    """The record of a training sample made from a request, at offset `at` of the topic. Every third candidate
    has all labels."""
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


def _value(f: Feature, random: np.random.Generator, known: str, full: int) -> object:
    missing = {"some": random.random() < 0.1, "nothing": True}.get(known, False)
    if not f.is_list:
        return float("nan") if missing else float(np.float32(random.exponential(2.0)))
    if missing:
        return None
    lengths = {"some": int(random.integers(0, _MAX_ENTRIES + 1)), "floats": 0}
    length = lengths.get(known, full)
    ids = (_ID_GAP * random.integers(0, _NUM_IDS, length)).tolist()
    if f.kind == "ids":
        return ids
    if f.kind == "weighted_ids":
        return {"ids": ids, "weights": random.exponential(1.0, length).tolist()}
    ids_of = {c: random.integers(0, 3, length).tolist() for c in f.id_columns}
    oldest_ms = _MAX_AGE_MS if known == "all" else _OLDEST_MS
    times_of = {
        c: (TIME_MS - np.sort(random.integers(0, oldest_ms, length))).tolist() for c in f.time_columns
    }
    return {main_key(f): ids, **ids_of, **times_of}
