"""What every kind of model is held against: the same learning on requests and on impressions, and requests as
they are served."""

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

COUNTS = [
    3,
    1,
    0,
    11,
    17,
    2,
    40,
    1,
]  # three groups of candidate_groups.py, and requests with one candidate and none
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
    """Weights moved off their initial values, so that every part has a say."""
    model = build_model(schema, config, seed=1)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel()) + i).view(parameter.shape))
    return model


def optimizer_of(model: Model) -> DenseAdam:
    linear = [part for part in model.modules() if isinstance(part, LinearPart)]
    return DenseAdam(model.named_parameters(), learning_rate=0.1, linear=linear)


def score(model: Model, batch: Batch) -> torch.Tensor:
    lookup = build_lookup(batch)
    with torch.inference_mode():
        return model(build_inputs(batch, lookup, make_rows(batch.schema, lookup)))


def learn(
    model: Model, batch: Batch
) -> tuple[float, dict[str, torch.Tensor], dict[tuple[int, int], np.ndarray]]:
    """Loss, gradients of dense parameters, and of rows by (table, id)."""
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
        if gradient_UD is not None:  # None: no part of this model looks at the stack
            keys = zip(part.table_U.tolist(), part.id_U.tolist(), strict=True)
            rows |= {key: gradient_UD[i].numpy() for i, key in enumerate(keys)}
    return float(value.detach()), dense, rows


def assert_same_learning(model: Model, batch: Batch, twin: Batch) -> None:
    (value, dense, rows), (value2, dense2, rows2) = learn(model, batch), learn(model, twin)
    assert value2 == pytest.approx(value, rel=1e-5)
    assert dense.keys() == dense2.keys() and rows.keys() >= rows2.keys()
    for name in dense:
        torch.testing.assert_close(
            dense2[name], dense[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
    for (
        key,
        gradient_D,
    ) in rows.items():  # rows of requests without candidates have no impression, and no gradient
        np.testing.assert_allclose(rows2.get(key, 0 * gradient_D), gradient_D, rtol=1e-4, atol=1e-6)


def as_served(schema: Schema, n: int, seed: int) -> tuple[bytes, bytes, np.ndarray]:
    """RO block, NRO block and items of a request of the schema "everything"."""
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


def as_sample(schema: Schema, ro: bytes, nro: bytes, item_n: np.ndarray, at: int = 0) -> Record:
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
    """Of the model in float64, for every row."""
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
    """Of a request with n candidates, trained and, of another model with the same weights, served."""
    trained = trained_model(schema, config)
    ro, nro, item_n = as_served(schema, n, seed=n)
    batch, _ = Decoder(schema, lambda _: schema).decode([as_sample(schema, ro, nro, item_n)])
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
    """To 1e-5, in any order."""
    requests = [as_served(schema, n, seed=n) for n in (1, 5, 0, 40, 17, 3)]
    decoder = Decoder(schema, lambda _: schema)
    alone = [score(model, decoder.decode_request(*r, NOW_MS)) for r in requests]
    for order in (range(6), [5, 3, 4, 0, 2, 1], [3, 3, 1]):
        records = [as_sample(schema, *requests[i], at) for at, i in enumerate(order)]
        together = score(model, decoder.decode(records)[0])
        torch.testing.assert_close(together, torch.cat([alone[i] for i in order]), rtol=0, atol=1e-5)
