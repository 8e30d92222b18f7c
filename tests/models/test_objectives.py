"""Objectives other than "event": their minima, pairs within a request, weights of tasks, corrections and
gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from roostream.errors import SchemaError
from roostream.models.candidate_groups import build_groups
from roostream.models.loss import Task, loss, task_objectives
from roostream.models.model import Targets
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from tests.models.model_cases import CASES, make_batch
from tests.models.model_checks import SMALL, loss_and_gradients, trained_model

COUNTS = np.array([4, 0, 20, 1], dtype=np.int32)
GROUPS = build_groups(COUNTS)
EVENT = Task("event", 1.0, 1.0)


def random_candidates(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw logits, label values and weights of 25 candidates for one task, in float64."""
    random = np.random.default_rng(seed)
    label = np.where(random.random((25, 1)) < 0.4, random.exponential(20.0, (25, 1)), 0.0)
    weight = random.choice([0.0, 1.0, 2.0], (25, 1), p=[0.2, 0.6, 0.2])
    return torch.from_numpy(random.normal(size=(25, 1))), torch.from_numpy(label), torch.from_numpy(weight)


def optimal_logit(task: Task, label: Tensor) -> float:
    """Find the logit, equal for all candidates, with the smallest loss, by bisection on the sign of the
    slope."""
    low, high, ones = -20.0, 20.0, torch.ones_like(label)
    for _ in range(60):
        z = torch.tensor((low + high) / 2, dtype=torch.float64, requires_grad=True)
        loss(z.expand_as(label), Targets(label, ones), [task], GROUPS).backward()  # type: ignore[no-untyped-call]
        assert z.grad is not None
        low, high = (float(z.detach()), high) if z.grad < 0 else (low, float(z.detach()))
    return low


def test_amount_learns_the_mean_log_share() -> None:
    _, label, _ = random_candidates()
    p = 1 / (1 + math.exp(-optimal_logit(Task("amount", 30.0, 1.0), label)))
    assert p == pytest.approx(float((torch.log1p(label) / math.log(31)).clamp_max(1).mean()), rel=1e-9)
    assert (label > 30).any(), "some labels must exceed the scale, to test that they are clamped"


def test_weighted_learns_the_sum_of_values_per_negative() -> None:
    _, label, _ = random_candidates()
    odds = math.exp(optimal_logit(Task("weighted", 10.0, 1.0), label))
    assert odds == pytest.approx(float(label.sum()) / 10 / int((label == 0).sum()), rel=1e-9)


def test_pairwise_is_the_loss_of_all_pairs_of_a_request() -> None:
    z, label, weight = random_candidates()
    got = loss(z, Targets(label, weight), [Task("pairwise", 1.0, 1.0)], GROUPS)
    expected, first = 0.0, 0
    for count in COUNTS:
        candidates = range(first, first + count)
        negatives = [j for j in candidates if label[j] == 0 and weight[j] > 0]
        for i in candidates:
            if label[i] > 0 and weight[i] > 0 and negatives:
                expected += float(weight[i]) * np.mean(
                    [math.log1p(math.exp(float(z[j] - z[i]))) for j in negatives]
                )
        first += count
    assert float(got) == pytest.approx(expected / float(weight.sum()), rel=1e-12) and expected > 0


def test_tasks_add_up_by_their_weights() -> None:
    candidates = [random_candidates(seed) for seed in range(4)]
    z, label, weight = (torch.cat(parts, dim=1) for parts in zip(*candidates, strict=True))
    tasks = [EVENT, Task("weighted", 3.0, 0.5), Task("amount", 60.0, 0.0), Task("pairwise", 1.0, 2.0)]
    alone = [
        loss(candidates[t][0], Targets(*candidates[t][1:]), [task._replace(weight=1.0)], GROUPS)
        for t, task in enumerate(tasks)
    ]
    expected = alone[0] + 0.5 * alone[1] + 2 * alone[3]
    torch.testing.assert_close(loss(z, Targets(label, weight), tasks, GROUPS), expected)
    torch.testing.assert_close(alone[0], loss(candidates[0][0], Targets(*candidates[0][1:])))


@pytest.mark.parametrize("objective", ["weighted", "amount", "pairwise"])
def test_a_sample_and_its_correction_equal_the_corrected_sample(objective: str) -> None:
    z, before, weight = random_candidates()
    after, tasks = random_candidates(1)[1], [Task(objective, 9.0, 1.0)]  # type: ignore[arg-type]
    whole = loss(z, Targets(after, weight), tasks, GROUPS)
    both = loss(z, Targets(before, weight), tasks, GROUPS) + loss(
        z, Targets(after, weight, before), tasks, GROUPS
    )
    torch.testing.assert_close(both, whole)


@pytest.mark.parametrize("objective", ["event", "weighted", "amount", "pairwise"])
def test_gradients_are_right_and_parts_of_a_batch_add_up(objective: str) -> None:
    z, label, weight = random_candidates()
    task = Task(objective, 9.0, 0.7)  # type: ignore[arg-type]
    assert torch.autograd.gradcheck(
        lambda x: loss(x, Targets(label, weight), [task], GROUPS), (z.requires_grad_(),)
    )
    total, parts = weight.sum(dim=0), ((slice(0, 4), COUNTS[:2]), (slice(4, 25), COUNTS[2:]))
    sum_of_parts = sum(
        loss(z[part], Targets(label[part], weight[part], total_T=total), [task], build_groups(counts))
        for part, counts in parts
    )
    torch.testing.assert_close(sum_of_parts, loss(z, Targets(label, weight), [task], GROUPS))


def schema_of(**label: object) -> Schema:
    labels = [
        {"name": "click", "action": "click"},
        {"name": "read_s", "action": "read", "fold": "sum", **label},
    ]
    return schema_from_dict({**CASES["everything"], "label": labels})


def test_objectives_do_not_change_the_fingerprint() -> None:
    plain, own = schema_of(), schema_of(objective="amount", scale=600.0, weight=0.25)
    assert task_objectives(plain) == () and task_objectives(own) == (EVENT, Task("amount", 600.0, 0.25))
    assert plain.fingerprint == own.fingerprint
    batch = make_batch(own, [3, 0, 5], seed=1)
    values = [
        loss_and_gradients(trained_model(schema, SMALL), batch)[0]
        for schema in (plain, own, schema_of(weight=0.0))
    ]
    assert len(set(values)) == 3, "the loss must differ for the same parameters"


def test_a_label_of_weight_0_has_no_gradient() -> None:
    schema = schema_of(weight=0.0)
    _, dense, _ = loss_and_gradients(trained_model(schema, SMALL), make_batch(schema, [3, 0, 5], seed=1))
    assert dense["heads.logits.0.weight"].any() and not dense["heads.logits.1.weight"].any()


def test_amount_needs_a_numeric_fold() -> None:
    with pytest.raises(
        SchemaError, match="expected count, sum, max or last for objective 'amount', got 'any'"
    ):
        schema_of(objective="amount", fold="any")
