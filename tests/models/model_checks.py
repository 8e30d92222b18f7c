"""Checks that every kind of model must pass: equal gradients on requests and on impressions (guarantee G10),
and equal scores in training and in serving (guarantee G9, see docs/architecture.md)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from roostream.models.build import build_model
from roostream.models.config import ModelConfig, RankerConfig
from roostream.models.inputs import build_inputs
from roostream.models.linear_part import LinearPart
from roostream.models.model import Model, Targets
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.decode import Decoder
from roostream.wire.lookup import build_lookup
from roostream.wire.records import Record
from tests.models.model_cases import NOW_MS, make_rows
from trainer.dense_part.adam import DenseAdam

# Candidates of each request. They fall into three padding groups of candidate_groups.py; some requests have
# one candidate or none.
COUNTS = [3, 1, 0, 11, 17, 2, 40, 1]
SMALL = RankerConfig(
    request_layers=(8,),
    history_width=4,
    width=8,
    list_heads=2,
    cross_rank=3,
    deep_layers=(8,),
    task_layers=(4,),
)


def trained_model(schema: Schema, config: ModelConfig = SMALL) -> Model:
    """Build a model and move its weights off their initial values, so that every part affects the output."""
    model = build_model(schema, config, seed=1)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel()) + i).view(parameter.shape))
    return model


def make_optimizer(model: Model) -> DenseAdam:
    linear = [part for part in model.modules() if isinstance(part, LinearPart)]
    return DenseAdam(model.named_parameters(), learning_rate=0.1, linear=linear)


def score(model: Model, batch: Batch) -> torch.Tensor:
    lookup = build_lookup(batch)
    with torch.inference_mode():
        return model(build_inputs(batch, lookup, make_rows(batch.schema, lookup)))


def loss_and_gradients(
    model: Model, batch: Batch
) -> tuple[float, dict[str, torch.Tensor], dict[tuple[int, int], np.ndarray]]:
    """Compute the loss, the gradients of dense parameters by name, and the gradients of rows by (table,
    id)."""
    lookup = build_lookup(batch)
    inputs = build_inputs(batch, lookup, make_rows(batch.schema, lookup), train=True)
    model.zero_grad()
    targets = Targets(torch.from_numpy(batch.label_BT), torch.from_numpy(batch.weight_BT))
    value = model.loss(inputs, model(inputs), targets)
    value.backward()
    dense = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    rows = {}
    for stack, part in lookup.stacks.items():
        gradient_UD = inputs.rows[stack].grad
        if gradient_UD is not None:  # None: no part of this model reads the stack
            keys = zip(part.table_U.tolist(), part.id_U.tolist(), strict=True)
            rows |= {key: gradient_UD[i].numpy() for i, key in enumerate(keys)}
    return float(value.detach()), dense, rows


def assert_same_gradients(model: Model, batch: Batch, expanded: Batch) -> None:
    (value, dense, rows), (value2, dense2, rows2) = (
        loss_and_gradients(model, batch),
        loss_and_gradients(model, expanded),
    )
    assert value2 == pytest.approx(value, rel=1e-5)
    assert dense.keys() == dense2.keys() and rows.keys() >= rows2.keys()
    for name in dense:
        torch.testing.assert_close(
            dense2[name], dense[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
    for key, gradient_D in rows.items():
        # Rows of requests without candidates occur in no impression; their gradient is zero.
        np.testing.assert_allclose(rows2.get(key, 0 * gradient_D), gradient_D, rtol=1e-4, atol=1e-6)


def make_request_blocks(schema: Schema, n: int, seed: int) -> tuple[bytes, bytes, np.ndarray]:
    """Encode a random request of the schema "everything": its RO block, its NRO block and its items."""
    rng = np.random.default_rng(seed)
    h = int(rng.integers(0, 9))
    ro = encode_ro(
        schema,
        {
            "user": [int(rng.integers(1, 99))],
            "history": {
                "item": rng.integers(0, 40, h).tolist(),
                "action": rng.integers(0, 3, h).tolist(),
                "time": (NOW_MS - rng.integers(0, 10**9, h)).tolist(),
            },
            "topics": {"ids": [1, 2], "weights": [0.5, 2.0]},
            "hour": float(rng.integers(0, 24)),
        },
    )
    item_n = rng.integers(0, 40, n)
    nro = encode_nro(schema, {"item": item_n, "ctr": rng.random(n), "age_s": rng.exponential(1e5, n)}, n)
    return ro, nro, item_n


def make_sample_record(schema: Schema, ro: bytes, nro: bytes, item_n: np.ndarray, at: int = 0) -> Record:
    n = len(item_n)
    sample = pb.Sample(
        header=pb.Header(request_id=f"r{at}", user_id=7, time_ms=NOW_MS, schema=schema.fingerprint),
        sample_id=at + 1,
        close_ms=NOW_MS + 1000,
        ro=ro,
        item_ids=item_n.tolist(),
        parts=[pb.Part(nro=nro, num_rows=n)],
        labels=[float(i % 2) for i in range(2 * n)],
    )
    return Record("samples", 0, at, NOW_MS + 1000, b"", wire.encode(wire.SAMPLE, sample))


def assert_row_gradients(model: Model, batch: Batch) -> None:
    """Check the gradients of all embedding rows against finite differences, with the model in float64."""
    model = model.double()
    lookup = build_lookup(batch)
    single = build_inputs(batch, lookup, make_rows(batch.schema, lookup))
    leaves = {stack: rows_UD.double().requires_grad_() for stack, rows_UD in single.rows.items()}

    def forward(*rows: torch.Tensor) -> torch.Tensor:
        inputs = dataclasses.replace(
            single,
            ro_float_RG=single.ro_float_RG.double(),
            nro_float_BG=single.nro_float_BG.double(),
            rows=dict(zip(leaves, rows, strict=True)),
        )
        return model(inputs)

    assert torch.autograd.gradcheck(forward, tuple(leaves.values()))


def assert_same_bits_as_served(schema: Schema, config: ModelConfig, n: int) -> None:
    """Check that a request of n candidates gets the same logits in training and, from a second model with the
    same weights, in serving, bit for bit."""
    trained = trained_model(schema, config)
    ro, nro, item_n = make_request_blocks(schema, n, seed=n)
    batch, _ = Decoder(schema, lambda _: schema).decode([make_sample_record(schema, ro, nro, item_n)])
    lookup = build_lookup(batch)
    in_training = trained(build_inputs(batch, lookup, make_rows(schema, lookup), train=True))
    assert in_training.requires_grad

    served = build_model(schema, config, seed=99)  # as serving does: build, load, freeze
    served.load_state_dict(trained.state_dict(), strict=True)
    served.eval().requires_grad_(False)
    request = Decoder(schema, lambda _: schema).decode_request(ro, nro, item_n, NOW_MS)
    lookup = build_lookup(request)
    with torch.inference_mode():
        in_serving = served(build_inputs(request, lookup, make_rows(schema, lookup)))
    assert in_serving.numpy().tobytes() == in_training.detach().numpy().tobytes()


def assert_same_in_any_batch(schema: Schema, model: Model) -> None:
    """Check that a request scores the same to 1e-5, alone or in a batch of other requests in any order."""
    requests = [make_request_blocks(schema, n, seed=n) for n in (1, 5, 0, 40, 17, 3)]
    decoder = Decoder(schema, lambda _: schema)
    alone = [score(model, decoder.decode_request(*r, NOW_MS)) for r in requests]
    for order in (range(6), [5, 3, 4, 0, 2, 1], [3, 3, 1]):
        records = [make_sample_record(schema, *requests[i], at) for at, i in enumerate(order)]
        together = score(model, decoder.decode(records)[0])
        torch.testing.assert_close(together, torch.cat([alone[i] for i in order]), rtol=0, atol=1e-5)
