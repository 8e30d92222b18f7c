"""The ranker as a whole: guarantees G9 and G10, independence of requests, any schema, gradients."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from models.build import build_model
from models.config import RankerConfig
from models.inputs import build_inputs
from models.model import Model, Targets
from roo import roo_pb2 as pb
from roo import wire
from roo.batch import Batch
from roo.block import encode_nro, encode_ro
from roo.decode import Decoder
from roo.errors import SchemaError
from roo.lookup import build_lookup
from roo.schema import Schema
from roo.schema_file import schema_from_dict
from roo.wire import Record
from tests.models.expansion import expand_with_context
from tests.models.model_cases import CASES, LABELS, NOW_MS, make_batch, make_rows, make_schema

COUNTS = [3, 1, 0, 11, 17, 2, 40, 1]  # three groups of candidate_groups.py, and requests with one candidate and none
SMALL = RankerConfig(
    request_layers=(8,), history_width=4, width=8, list_heads=2, cross_rank=3, deep_layers=(8,), task_layers=(4,)
)


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained_model(schema: Schema, config: RankerConfig = SMALL) -> Model:
    """Weights moved off their initial values, so that every part has a say."""
    model = build_model(schema, config, seed=1)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel()) + i).view(parameter.shape))
    return model


def score(model: Model, batch: Batch) -> torch.Tensor:
    lookup = build_lookup(batch)
    with torch.inference_mode():
        return model(build_inputs(batch, lookup, make_rows(batch.schema, lookup)))


def learn(model: Model, batch: Batch) -> tuple[float, dict[str, torch.Tensor], dict[tuple[int, int], np.ndarray]]:
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
        torch.testing.assert_close(dense2[name], dense[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    for key, gradient_D in rows.items():  # rows of requests without candidates have no impression, and no gradient
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


@pytest.mark.parametrize("n", [1, 2, 13, 60])
def test_g9_a_request_alone_scores_the_same_bits_in_training_and_serving(n: int) -> None:
    schema = make_schema("everything")
    trained = trained_model(schema)
    ro, nro, item_n = as_served(schema, n, seed=n)

    batch, _ = Decoder(schema, lambda _: schema).decode([as_sample(schema, ro, nro, item_n)])
    lookup = build_lookup(batch)
    in_training = trained(build_inputs(batch, lookup, make_rows(schema, lookup), train=True))
    assert in_training.requires_grad

    served = build_model(schema, SMALL, seed=99)  # as serving does: build, load, freeze
    served.load_state_dict(trained.state_dict(), strict=True)
    served.eval().requires_grad_(False)
    request = Decoder(schema, lambda _: schema).decode_request(ro, nro, item_n, NOW_MS)
    lookup = build_lookup(request)
    with torch.inference_mode():
        in_serving = served(build_inputs(request, lookup, make_rows(schema, lookup)))
    assert in_serving.numpy().tobytes() == in_training.detach().numpy().tobytes()


def test_g9_bits_do_not_depend_on_where_rows_lie_in_memory() -> None:
    schema = make_schema("everything")
    model, batch = trained_model(schema), make_batch(schema, [19], seed=4, longest=30)
    lookup = build_lookup(batch)
    rows = make_rows(schema, lookup)
    shifted = {}
    for stack, rows_UD in rows.items():
        room = np.empty(rows_UD.size + 16, dtype=np.float32)
        shifted[stack] = room[1 : 1 + rows_UD.size].reshape(rows_UD.shape)
        shifted[stack][:] = rows_UD
    with torch.inference_mode():
        aligned, unaligned = (model(build_inputs(batch, lookup, r)) for r in (rows, shifted))
    assert aligned.numpy().tobytes() == unaligned.numpy().tobytes()


def test_g9_in_any_batch_and_order_logits_agree_to_1e5() -> None:
    schema = make_schema("everything")
    model = trained_model(schema)
    requests = [as_served(schema, n, seed=n) for n in (1, 5, 0, 40, 17, 3)]
    decoder = Decoder(schema, lambda _: schema)
    alone = [score(model, decoder.decode_request(*r, NOW_MS)) for r in requests]
    for order in (range(6), [5, 3, 4, 0, 2, 1], [3, 3, 1]):
        records = [as_sample(schema, *requests[i], at) for at, i in enumerate(order)]
        together = score(model, decoder.decode(records)[0])
        torch.testing.assert_close(together, torch.cat([alone[i] for i in order]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [c for c in CASES if "transform" not in CASES[c]])
def test_g10_training_on_requests_equals_training_on_impressions(case: str) -> None:
    schema = make_schema(case)
    batch = make_batch(schema, COUNTS, seed=2)
    assert_same_learning(trained_model(schema, dataclasses.replace(SMALL, list_layers=0)), batch, batch.expand())


@pytest.mark.parametrize("case", CASES)
def test_g10_with_list_context_it_equals_impressions_that_carry_their_list(case: str) -> None:
    schema = make_schema(case)
    batch = make_batch(schema, [3, 1, 0, 6, 17], seed=3)
    assert_same_learning(trained_model(schema), batch, expand_with_context(batch))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("counts", [[], [0], [1], [4], COUNTS], ids=str)
def test_every_schema_and_batch_shape_scores_and_learns(case: str, counts: list[int]) -> None:
    schema = make_schema(case)
    model, batch = trained_model(schema), make_batch(schema, counts, seed=5)
    assert score(model, batch).shape == (sum(counts), 2)
    value, _, rows = learn(model, batch)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in rows.values())
    if not counts or not sum(counts):
        assert value == 0.0


@pytest.mark.parametrize("config", [RankerConfig(), SMALL, dataclasses.replace(SMALL, list_layers=0, cross_layers=0)])
def test_another_request_changes_nothing(config: RankerConfig) -> None:
    schema = make_schema("everything")
    model, batch, other = trained_model(schema, config), make_batch(schema, COUNTS, 6), make_batch(schema, COUNTS, 7)
    mine = np.array([0, 3, 6])
    with_mine = score(model, batch.take_requests(mine))
    again = score(model, batch)[np.isin(batch.request_index_B, mine)]
    torch.testing.assert_close(with_mine, again, rtol=0, atol=1e-5)
    assert not torch.allclose(score(model, other), score(model, batch), atol=1e-3)


def test_candidates_see_each_other_only_with_list_context() -> None:
    schema = make_schema("candidate only")
    batch = make_batch(schema, [5], seed=8)
    changed_BF = batch.nro_float_BF.copy()
    changed_BF[0] += 1
    changed = dataclasses.replace(batch, nro_float_BF=changed_BF)
    apart = trained_model(schema, dataclasses.replace(SMALL, list_layers=0))
    together = trained_model(schema)
    torch.testing.assert_close(score(apart, batch)[1:], score(apart, changed)[1:], rtol=0, atol=0)
    assert (score(together, batch)[1:] - score(together, changed)[1:]).abs().max() > 1e-4


def test_the_order_shown_does_not_matter() -> None:
    schema = make_schema("everything")
    model, batch = trained_model(schema), make_batch(schema, [6], seed=9)
    order = np.array([4, 0, 5, 2, 1, 3])
    expanded = batch.expand().take_requests(order)
    shuffled = dataclasses.replace(
        batch,
        **{f: getattr(expanded, f) for f in ("nro_float_BF", "nro_present_BF", "nro_lists", "item_B", "label_BT", "weight_BT")},
    )
    torch.testing.assert_close(score(model, shuffled), score(model, batch)[order], rtol=0, atol=1e-5)


def test_the_request_tower_runs_on_requests_not_on_candidates() -> None:
    schema = make_schema("everything")
    model, batch = trained_model(schema), make_batch(schema, COUNTS, seed=1)
    rows = []
    model.request_tower.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[0]))
    score(model, batch)
    assert rows == [len(COUNTS)]


def test_gradients_of_the_whole_model_are_right_in_float64() -> None:
    schema = make_schema("everything", labels=1)
    model, batch = trained_model(schema).double(), make_batch(schema, [2, 0, 3], seed=11, longest=3)
    lookup = build_lookup(batch)
    single = build_inputs(batch, lookup, make_rows(schema, lookup))
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


def test_an_untrained_model_predicts_the_prior() -> None:
    schema = make_schema("everything")
    batch = make_batch(schema, COUNTS)
    probability = torch.sigmoid(score(build_model(schema, RankerConfig(prior=0.03), 0), batch))
    torch.testing.assert_close(probability, torch.full_like(probability, 0.03))


def test_a_label_may_have_a_prior_of_its_own_which_changes_no_bytes() -> None:
    schema = make_schema("everything")
    first, *rest = schema.labels
    own = dataclasses.replace(schema, labels=(dataclasses.replace(first, prior=0.004), *rest))
    probability_BT = torch.sigmoid(score(build_model(own, RankerConfig(prior=0.03), 0), make_batch(own, COUNTS)))
    expected_T = torch.tensor([0.004] + [0.03] * len(rest))
    torch.testing.assert_close(probability_BT, expected_T.expand_as(probability_BT))
    assert own.fingerprint == schema.fingerprint


def test_a_schema_without_features_is_refused() -> None:
    with pytest.raises(SchemaError, match="at least one"):
        build_model(schema_from_dict({"label": LABELS}), RankerConfig(), 0)


def test_a_thousand_candidates_among_many_small_requests() -> None:
    schema = make_schema("everything")
    batch = make_batch(schema, [1000, *([2] * 63)], seed=12)
    model = trained_model(schema)
    torch.testing.assert_close(score(model, batch)[1000:], score(model, batch.take_requests(np.arange(1, 64))), rtol=0, atol=1e-5)
