"""Two-tower retrieval: the loss and its gradients, what an item's vector depends on, and how often each tower
runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from roostream.errors import SchemaError
from roostream.models.build import build_model
from roostream.models.config import TwoTowerConfig
from roostream.models.model import Targets
from roostream.models.two_tower.models import Retrieval
from roostream.models.two_tower.sampled_softmax import log_expected
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.batch import Batch
from tests.models.model_cases import CASES, LABELS, inputs_of, make_batch, make_schema
from tests.models.model_checks import COUNTS, score, trained_model

CONFIG = TwoTowerConfig(user_layers=(6,), item_layers=(5,), width=4)
SCHEMA = make_schema("everything")


def retrieval(config: TwoTowerConfig = CONFIG) -> Retrieval:
    model = trained_model(SCHEMA, config)
    assert isinstance(model, Retrieval)
    return model


def targets_of(batch: Batch, before_BT: np.ndarray | None = None) -> Targets:
    before = None if before_BT is None else torch.from_numpy(before_BT)
    return Targets(torch.from_numpy(batch.label_BT), torch.from_numpy(batch.weight_BT), before)


def test_an_untrained_model_predicts_about_its_prior() -> None:
    model = build_model(SCHEMA, dataclasses.replace(CONFIG, prior=0.03), 0)
    logit = score(model, make_batch(SCHEMA, COUNTS))
    prior = torch.logit(torch.tensor(0.03))
    assert (logit - prior).abs().max() <= 1.0 and (logit - prior).abs().max() > 0


def test_item_vectors_do_not_depend_on_the_request() -> None:
    model, batch = retrieval(), make_batch(SCHEMA, [3, 2], seed=2)
    other = dataclasses.replace(batch, ro_float_RF=batch.ro_float_RF + 1)
    with torch.inference_mode():
        before, after = model.vectors(inputs_of(batch)), model.vectors(inputs_of(other))
    assert torch.equal(before[1], after[1]) and not torch.equal(before[0], after[0])
    torch.testing.assert_close(model.item_vectors(inputs_of(batch)).detach(), before[1])
    torch.testing.assert_close(before[1].norm(dim=1), torch.ones(5), rtol=1e-3, atol=0)


def test_the_request_tower_runs_once_per_request() -> None:
    model, rows = retrieval(dataclasses.replace(CONFIG, history="hstu", hstu_width=4)), []
    model.user.register_forward_hook(lambda _, args, out: rows.append(out.shape[0]))
    score(model, make_batch(SCHEMA, COUNTS))
    assert rows == [len(COUNTS)]


def test_calibration_trains_scale_and_bias_only() -> None:
    model, batch = retrieval(), make_batch(SCHEMA, [4, 5], seed=1)
    inputs = inputs_of(dataclasses.replace(batch, label_BT=np.zeros_like(batch.label_BT)), train=True)
    model.loss(
        inputs, model(inputs), targets_of(dataclasses.replace(batch, label_BT=np.zeros_like(batch.label_BT)))
    ).backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert moved == {"scale", "bias"}, "without a positive label only the calibration learns"


@pytest.mark.parametrize("uniform", [0.0, 2.0])
def test_the_loss_equals_its_formula(uniform: float) -> None:
    config = dataclasses.replace(CONFIG, uniform_negatives=uniform, temperature=0.3)
    model, batch = retrieval(config), make_batch(SCHEMA, [4, 0, 5], seed=1)
    inputs, targets = inputs_of(batch), targets_of(batch)
    with torch.inference_mode():
        u_RTD, v_BD = model.vectors(inputs)
        got = float(model.loss(inputs, model(inputs), targets))
        silent = targets._replace(label_BT=torch.zeros_like(targets.label_BT))
        logits = model(inputs)
        plain = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, (targets.label_BT > 0).float(), reduction="none"
        )
        expected = float(((plain * targets.weight_BT).sum(dim=0) / targets.weight_BT.sum(dim=0)).sum())
        assert float(model.loss(inputs, logits, silent)) != got
    weight, q = log_expected(inputs.item_B, None, uniform)
    for t in range(2):
        for b in range(9):
            if targets.label_BT[b, t] > 0:
                s_C = v_BD @ u_RTD[inputs.request_index_B[b], t] / 0.3
                one = torch.logsumexp(s_C + weight - q, dim=0) - s_C[b]
                expected += float(one * targets.weight_BT[b, t] / targets.weight_BT[:, t].sum())
    assert got == pytest.approx(expected, rel=1e-5)


def test_a_sample_and_its_correction_equal_the_corrected_sample() -> None:
    model, batch = retrieval(), make_batch(SCHEMA, [4, 0, 5], seed=1)
    before_BT = np.roll(batch.label_BT, 1, axis=0)
    inputs = inputs_of(batch)
    with torch.inference_mode():
        logits = model(inputs)
        sample = model.loss(inputs, logits, targets_of(dataclasses.replace(batch, label_BT=before_BT)))
        correction = model.loss(inputs, logits, targets_of(batch, before_BT))
        torch.testing.assert_close(sample + correction, model.loss(inputs, logits, targets_of(batch)))


def test_gradients_of_the_loss_are_right_in_float64() -> None:
    model, batch = retrieval().double(), make_batch(SCHEMA, [3, 0, 3], seed=4, longest=3)
    with torch.no_grad():
        # Calibration gives the towers no gradient, so the loss here must not depend on it.
        model.scale.zero_()
    single, targets = inputs_of(batch), targets_of(batch)
    leaves = {stack: rows_UD.double().requires_grad_() for stack, rows_UD in single.rows.items()}
    logits = torch.zeros(6, 2, dtype=torch.float64)

    def value(*rows: torch.Tensor) -> torch.Tensor:
        wide = {name: getattr(single, name).double() for name in ("ro_float_RG", "nro_float_BG")}
        inputs = dataclasses.replace(single, rows=dict(zip(leaves, rows, strict=True)), **wide)
        return model.loss(inputs, logits, targets._replace(weight_BT=targets.weight_BT.double()))

    assert (batch.label_BT > 0).any() and torch.autograd.gradcheck(value, tuple(leaves.values()))


def test_popularity_is_the_same_as_count_and_as_logarithm() -> None:
    losses = []
    for popularity in ("", "age_s", "age_log"):
        transforms = [{"input": "age_s", "output": "age_log", "op": "log1p"}]
        schema = schema_from_dict({**CASES["everything"], "label": LABELS, "transform": transforms})
        batch = make_batch(schema, [3, 4])
        model = build_model(schema, dataclasses.replace(CONFIG, popularity=popularity), 0)
        with torch.inference_mode():
            losses.append(float(model.loss(inputs_of(batch), model(inputs_of(batch)), targets_of(batch))))
    assert losses[1] == pytest.approx(losses[2], rel=1e-5) and losses[0] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("candidate only", {}, r"at least one \[\[ro\]\] feature"),
        ("request only", {}, r"at least one \[\[nro\]\] id list"),
        ("everything", {"item_floats": ("crt",)}, r"got 'crt'; did you mean 'ctr'\?"),
        ("everything", {"popularity": "views"}, "expected popularity to name .*, got 'views'"),
        ("everything", {"popularity": "ctr_rank"}, "expected popularity to name a count"),
    ],
)
def test_a_schema_without_the_needed_features_is_rejected(
    case: str, change: dict[str, object], message: str
) -> None:
    config = dataclasses.replace(CONFIG, **change)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match=message):
        build_model(make_schema(case), config, 0)
