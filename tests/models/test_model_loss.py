"""The multi-task loss, and the losses for labels that arrive late."""

from __future__ import annotations

import math

import pytest
import torch

from roostream.models.loss import loss, loss_per_candidate
from roostream.models.model import Targets


def test_the_loss_is_the_sum_over_tasks_of_weighted_means() -> None:
    logits = torch.tensor([[0.5, -1.0], [2.0, 0.0], [-0.3, 1.0]])
    label = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    weight = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.5, 3.0]])
    expected = 0.0
    for t in range(2):
        p = torch.sigmoid(logits[:, t])
        each = -(label[:, t] * p.log() + (1 - label[:, t]) * (1 - p).log())
        expected += float((each * weight[:, t]).sum() / weight[:, t].sum())
    assert float(loss(logits, Targets(label, weight))) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("label", [1.0, 0.5, 30.0])
def test_any_label_above_zero_is_a_positive(label: float) -> None:
    ones = torch.ones(1, 1)
    assert float(loss(ones, Targets(label * ones, ones))) == float(loss(ones, Targets(ones, ones)))


def test_weight_zero_excludes_a_label_and_without_weights_the_loss_is_zero() -> None:
    logits = torch.tensor([[3.0], [1.0]], requires_grad=True)
    label = torch.tensor([[0.0], [1.0]])
    alone = loss(logits[1:], Targets(label[1:], torch.ones(1, 1)))
    torch.testing.assert_close(loss(logits, Targets(label, torch.tensor([[0.0], [1.0]]))), alone)
    nothing = loss(logits, Targets(label, torch.zeros(2, 1)))
    nothing.backward()
    assert nothing.item() == 0 and logits.grad is not None and (logits.grad == 0).all()
    assert float(loss(torch.zeros(0, 2), Targets(torch.zeros(0, 2), torch.zeros(0, 2)))) == 0


# Late labels. The stream has a sample for each request. A label that was unknown then arrives as a
# correction.

TRUTHS = (0.03, 0.2, 0.7)
KNOWN = {"log": 0.3, "fnw": 0.0, "fnc": 0.0, "dfm": 0.3, "es_dfm": 0.3}


def loss_of_one_candidate(
    name: str, logit: torch.Tensor, after: float, before: float | None = None, known: float | None = None
) -> torch.Tensor:
    """Compute the loss of one candidate in float64: of a sample, or of a correction if `before` is given."""

    def entry(value: float | None) -> torch.Tensor | None:
        return None if value is None else torch.full((1, 1), value, dtype=torch.float64)

    label, one = torch.full((1, 1), after, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    return loss(logit.view(1, 1), Targets(label, one, entry(before), entry(known), name))  # type: ignore[arg-type]


def slope(
    name: str, logit: float, after: float, before: float | None = None, known: float | None = None
) -> float:
    z = torch.tensor(logit, dtype=torch.float64, requires_grad=True)
    loss_of_one_candidate(name, z, after, before, known).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    return float(z.grad)


def expected_slope(name: str, logit: float, truth: float, known: float) -> float:
    """Compute the expected slope for a candidate that is positive with probability `truth`. A positive label
    arrives with the sample (probability `known`) or later as a correction."""
    at_once, later = truth * known, truth * (1 - known)
    return (
        at_once * slope(name, logit, 1.0, None, known)
        + (1 - at_once) * slope(name, logit, 0.0, None, known)
        + later * slope(name, logit, 1.0, 0.0, known)
    )


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("name", KNOWN)
def test_the_minimum_over_the_whole_stream_is_the_true_probability(name: str, truth: float) -> None:
    """The minimum is where the slope changes its sign; bisection finds it."""
    low, high = -10.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_slope(name, middle, truth, KNOWN[name]) < 0 else (low, middle)
    assert 1 / (1 + math.exp(-low)) == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (2.0, 3.0)])
@pytest.mark.parametrize("logit", [-3.0, 0.2, 5.0])
def test_log_loss_of_a_sample_and_its_correction_equals_the_corrected_sample(
    logit: float, before: float, after: float
) -> None:
    both = slope("log", logit, before) + slope("log", logit, after, before)
    assert both == pytest.approx(slope("log", logit, after), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("logit", [-3.0, 0.2, 5.0])
def test_a_correction_to_negative_cancels_the_positive(name: str, logit: float) -> None:
    known = KNOWN[name]
    both = slope(name, logit, 1.0, None, known) + slope(name, logit, 0.0, 1.0, known)
    assert both == pytest.approx(slope(name, logit, 0.0, None, known), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", ["fnw", "fnc", "es_dfm"])
def test_a_correction_to_positive_adds_a_positive_except_in_dfm(name: str) -> None:
    assert slope(name, 0.4, 1.0, 0.0, 0.3) == slope(name, 0.4, 1.0, None, 0.3)
    assert slope("dfm", 0.4, 1.0, 0.0, 0.3) == 0.0


@pytest.mark.parametrize("name", KNOWN)
def test_a_correction_that_changes_nothing_has_no_slope(name: str) -> None:
    assert slope(name, 0.4, 1.0, 1.0, 0.3) == slope(name, 0.4, 0.0, 0.0, 0.3) == 0.0


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("logit", [-4.0, 0.3, 6.0])
def test_weights_equal_those_of_the_papers(logit: float, label: float) -> None:
    p, known = 1 / (1 + math.exp(-logit)), 0.3
    plain = slope("log", logit, label)
    later, real = p * (1 - known), (1 - p) / (1 - p * known)
    assert slope("fnw", logit, label) == pytest.approx(plain * (1 + p if label else (1 - p) * (1 + p)))
    assert slope("es_dfm", logit, label, None, known) == pytest.approx(
        plain * ((1 + later) if label else (1 + later) * real)
    )
    assert slope("es_dfm", logit, label, None, 0.0) == pytest.approx(slope("fnw", logit, label))


@pytest.mark.parametrize("logit", [-4.0, 0.3, 6.0])
def test_values_equal_those_of_the_papers(logit: float) -> None:
    z, p, known = torch.tensor(logit, dtype=torch.float64), 1 / (1 + math.exp(-logit)), 0.3
    b = p / (1 + p)
    assert float(loss_of_one_candidate("fnc", z, 1.0)) == pytest.approx(-math.log(b))
    assert float(loss_of_one_candidate("fnc", z, 0.0)) == pytest.approx(-math.log(1 - b))
    assert float(loss_of_one_candidate("dfm", z, 1.0, None, known)) == pytest.approx(-math.log(p))
    assert float(loss_of_one_candidate("dfm", z, 0.0, None, known)) == pytest.approx(-math.log(1 - p * known))


@pytest.mark.parametrize("name", ["dfm", "es_dfm"])
@pytest.mark.parametrize(("logit", "label"), [(-50.0, 0.0), (0.3, 0.0), (0.3, 1.0), (50.0, 0.0), (50.0, 1.0)])
def test_with_all_labels_known_every_loss_is_the_log_loss(name: str, logit: float, label: float) -> None:
    assert slope(name, logit, label, None, 1.0) == pytest.approx(slope("log", logit, label), rel=1e-12)


def test_a_batch_may_mix_samples_and_corrections() -> None:
    logits = torch.tensor([[0.3], [0.3]], dtype=torch.float64)
    label, before = torch.tensor([[1.0], [1.0]]), torch.tensor([[math.nan], [0.0]])
    sample, correction = (
        loss_per_candidate(logits, Targets(label, torch.ones(2, 1), before)).flatten().tolist()
    )
    assert sample == pytest.approx(
        float(loss_of_one_candidate("log", logits[0], 1.0))
    ) and correction == pytest.approx(-0.3)
