"""The compiled scorer returns the logits of the torch modules to 1e-5 (guarantee G9, docs/architecture.md),
for every schema and setting that it supports. Torch scores all other models."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from roostream.models.build import build_model
from roostream.models.compiled import interpreter as interpreter
from roostream.models.compiled import scorer as forward
from roostream.models.compiled.scorer import CompiledScorer, Rows, build_scorer
from roostream.models.config import CascadeConfig, HstuConfig, RankerConfig, TwoTowerConfig
from roostream.models.inputs import BUCKET_MS, build_inputs, time_buckets
from roostream.models.model import Model
from roostream.models.ranker import Ranker
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup, build_lookup
from tests.models.model_cases import CASES, LABELS, make_batch, make_rows, make_schema
from tests.models.model_checks import COUNTS, SMALL, trained_model

SETTINGS: dict[str, dict[str, Any]] = {
    "small": {},
    "full cross": {"cross_rank": 0},
    "no cross": {"cross_layers": 0},
    "no list attention": {"list_layers": 0},
    "two list attentions of one head": {"list_layers": 2, "list_heads": 1},
    "no first order": {"first_order": False},
    "no linear part": {"linear": False},
    "a linear part without knots": {"linear_knots": False},
    "no layers": {"request_layers": (), "deep_layers": (), "task_layers": ()},
    "no history attention": {"history_attention": False},
    "few time buckets": {"time_buckets": 3},
    "wide and odd": {
        "request_layers": (37, 5),
        "history_width": 21,
        "history_heads": 3,
        "width": 33,
        "list_heads": 3,
        "deep_layers": (17, 40),
        "task_layers": (19, 3),
    },
}


def scorer_arguments(batch: Batch) -> tuple[Batch, Lookup, Rows]:
    lookup = build_lookup(batch)
    return batch, lookup, make_rows(batch.schema, lookup)


def torch_forward(model: Model, batch: Batch) -> np.ndarray:
    with torch.inference_mode():
        logits_BT: np.ndarray = model(build_inputs(*scorer_arguments(batch))).numpy()
    return logits_BT


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("counts", [[1], [0], COUNTS], ids=str)
def test_g9_compiled_logits_equal_torch_for_every_schema(case: str, counts: list[int]) -> None:
    schema = make_schema(case)
    model = trained_model(schema).eval().requires_grad_(False)
    run, batch = build_scorer(model, schema), make_batch(schema, counts, seed=len(counts))
    assert isinstance(run, CompiledScorer)
    np.testing.assert_allclose(run(*scorer_arguments(batch)), torch_forward(model, batch), rtol=0, atol=1e-5)


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=list(SETTINGS))
def test_g9_compiled_logits_equal_torch_for_every_setting(changes: dict[str, Any]) -> None:
    schema = make_schema("everything", labels=1)
    model = trained_model(schema, dataclasses.replace(SMALL, **changes)).eval().requires_grad_(False)
    run, batch = build_scorer(model, schema), make_batch(schema, [7, 33, 0, 1], seed=3)
    assert isinstance(run, CompiledScorer)
    expected = torch_forward(model, batch)
    assert np.ptp(expected) > 0.01, "the weights must affect the scores"
    np.testing.assert_allclose(run(*scorer_arguments(batch)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ro", [[], [{"name": "hour"}]], ids=["candidate only", "with a request side"])
def test_g9_the_first_order_is_compiled(ro: list[dict[str, str]]) -> None:
    nro = [{"name": "price"}, {"online": "ctr_24h"}]
    rank = {"inputs": ["ctr_24h"], "op": "rank"}
    schema = schema_from_dict({"ro": ro, "nro": nro, "label": LABELS, "transform": [rank]})
    run = build_scorer(model := build_model(schema, SMALL, 0), schema)
    batch = make_batch(schema, [7, 1, 4], seed=3)
    assert isinstance(run, CompiledScorer)
    expected = torch_forward(model, batch)
    assert np.ptp(expected) > 0.5, "an untrained model must already order the candidates"
    np.testing.assert_allclose(run(*scorer_arguments(batch)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scaled", [True, False])
def test_g9_rates_are_scaled_alike(scaled: bool) -> None:
    schema = schema_from_dict(
        {"ro": [{"name": "hour"}], "nro": [{"name": "price"}, {"online": "ctr_24h"}], "label": LABELS}
    )
    model = trained_model(schema, dataclasses.replace(SMALL, scale_rates=scaled)).eval()
    run, batch = build_scorer(model, schema), make_batch(schema, [7, 1, 4], seed=3)
    assert isinstance(run, CompiledScorer)
    expected = torch_forward(model, batch)
    np.testing.assert_allclose(run(*scorer_arguments(batch)), expected, rtol=0, atol=1e-5)
    assert isinstance(model, Ranker)
    model.scale_rates = None
    assert (abs(torch_forward(model, batch) - expected).max() > 0.01) == scaled, (
        "the scale must affect the scores"
    )


def test_a_request_has_the_same_bits_in_any_batch() -> None:
    schema = make_schema("everything")
    run = build_scorer(trained_model(schema), schema)
    batch = make_batch(schema, COUNTS, seed=5)
    together, first = run(*scorer_arguments(batch)), 0
    for r, count in enumerate(COUNTS):
        alone = run(*scorer_arguments(batch.take_requests(np.array([r]))))
        assert alone.tobytes() == together[first : first + count].tobytes()
        first += count


def test_long_lists_are_attended_to_completely() -> None:
    schema = make_schema("plain history")
    model = trained_model(schema).eval().requires_grad_(False)
    batch = make_batch(schema, [150], seed=1, longest=90)
    np.testing.assert_allclose(
        build_scorer(model, schema)(*scorer_arguments(batch)), torch_forward(model, batch), rtol=0, atol=1e-5
    )


def test_times_so_far_apart_that_their_difference_overflows_have_the_bucket_of_training() -> None:
    """Clients send such times for unknown ones, for example the smallest long of Java."""
    times_L = np.array([0, 1, -1, 2**62, -(2**62), 2**63 - 1, -(2**63), -(2**63) + 1_700_000_000_000])
    table_TD = np.arange(len(BUCKET_MS) + 1, dtype=np.float32)[:, None]
    for now_ms in (1_700_000_000_000, 0, 1, -1, 2**63 - 1, -(2**63)):
        out_L1 = np.zeros((len(times_L), 1), np.float32)
        interpreter.write_time_buckets(
            table_TD, np.array([len(times_L)], np.int32), np.array([now_ms]), times_L, BUCKET_MS, out_L1, 0
        )
        assert out_L1[:, 0].tolist() == time_buckets(np.array([now_ms]) - times_L).tolist(), now_ms


def test_non_finite_weights_give_non_finite_scores() -> None:
    schema = make_schema("everything")
    for value in (float("nan"), float("inf")):
        model = trained_model(schema)
        with torch.no_grad():
            model.get_parameter("dense.layers.0.weight").fill_(value)
        assert not np.isfinite(build_scorer(model, schema)(*scorer_arguments(make_batch(schema, [4])))).all()


@pytest.mark.parametrize(
    "config",
    [
        HstuConfig(),
        RankerConfig(interaction="dhen"),
        RankerConfig(request_side="userarch"),
        RankerConfig(request_side="both"),
        RankerConfig(normalize_rows=True),
        TwoTowerConfig(stage="ranking"),
    ],
    ids=["hstu", "dhen", "userarch", "both sides", "normalized rows", "two towers"],
)
def test_other_models_are_scored_by_torch(config: Any) -> None:
    schema = make_schema("everything")
    model = build_model(schema, config, 1).eval().requires_grad_(False)
    run, batch = build_scorer(model, schema), make_batch(schema, [3, 2])
    assert not isinstance(run, CompiledScorer)
    assert run(*scorer_arguments(batch)).tobytes() == torch_forward(model, batch).tobytes()


def test_the_ranker_of_a_cascade_is_compiled() -> None:
    schema = make_schema("everything")
    model = build_model(schema, CascadeConfig(), 1).eval().requires_grad_(False)
    run, batch = build_scorer(model, schema), make_batch(schema, [3, 2])
    assert isinstance(run, CompiledScorer)
    np.testing.assert_allclose(run(*scorer_arguments(batch)), torch_forward(model, batch), rtol=0, atol=1e-5)


def test_a_subclass_of_the_ranker_is_scored_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schema = make_schema("everything")
    model = trained_model(schema)
    monkeypatch.setattr(forward, "COMPILED", False)
    assert not isinstance(build_scorer(model, schema), CompiledScorer), "without numba's compiler"
    monkeypatch.undo()
    model.__class__ = type(
        "Mine", (type(model),), {"forward": lambda self, inputs: inputs.nro_float_BG[:, :2]}
    )
    batch = make_batch(schema, [3])
    assert (
        build_scorer(model, schema)(*scorer_arguments(batch)).tobytes()
        == torch_forward(model, batch).tobytes()
    )


def test_precompile_covers_every_model() -> None:
    forward.precompile()
    input_kernels = (
        interpreter.allocate,
        interpreter.write_rows,
        interpreter.write_pooled_lists,
        interpreter.write_time_buckets,
        interpreter.write_floats,
    )
    kernels = (interpreter.run_tape, *input_kernels)
    before = [len(kernel.nopython_signatures) for kernel in kernels]
    for case in CASES:
        schema = make_schema(case)
        build_scorer(trained_model(schema), schema)(*scorer_arguments(make_batch(schema, COUNTS)))
    assert [len(kernel.nopython_signatures) for kernel in kernels] == before
