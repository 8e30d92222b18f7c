"""What a task learns of its label, where that is more than whether something happened.

Letters: B candidates, T tasks; z a logit, p = σ(z) what is served, v a label's value, G requests of a group, K candidates of one.

    event      loss.py: was there something. p is its probability
    weighted   v / `scale` · -log p of a positive, -log(1 - p) of a negative. e^z is the sum of v / `scale` over the number of
               negatives, nearly the mean of v / `scale` where positives are rare
    amount     -y log p - (1 - y) log(1 - p) with y = log(1 + v) / log(1 + `scale`), at most 1. p is the mean of y
    pairwise   of a positive, the mean over the negatives of its request of log(1 + e^(z of the negative - z)); of a negative 0.
               Only the order within a request is learned; p alone says nothing

`weighted`: Covington, Adams, Sargin, "Deep neural networks for YouTube recommendations", RecSys 2016, §4.2. `amount`:
regression of a share of a logarithm by quasi-likelihood (Papke, Wooldridge, J. Applied Econometrics 1996), so that one long read
is not worth a hundred short ones and a score lies in 0..1 as every task's does; v is expm1(p · log1p(`scale`)). `pairwise`:
RankNet (Burges et al., ICML 2005) over a request's list.

A correction is loss(after) - loss(before). Labels that aren't there (weight 0) make no pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from roostream.models.candidate_groups import CandidateGroups
from roostream.models.model import Targets
from roostream.schema.schema import Objective, Schema


class Task(NamedTuple):
    objective: Objective
    scale: float
    weight: float


def tasks_of(schema: Schema) -> tuple[Task, ...]:
    """() where every label is an event of weight 1."""
    tasks = tuple(Task(label.objective, label.scale, label.weight) for label in schema.labels)
    return tasks if any(task.objective != "event" or task.weight != 1.0 for task in tasks) else ()


def of_tasks(
    logits_BT: Tensor,
    targets: Targets,
    event_BT: Tensor,
    tasks: Sequence[Task],
    groups: CandidateGroups | None,
) -> Tensor:
    """The loss of every candidate and task, [B, T]; `event_BT`: of all as if they were events."""
    columns = []
    for t, task in enumerate(tasks):
        if task.objective == "event":
            columns.append(event_BT[:, t])
            continue
        z_B, there_B = logits_BT[:, t], targets.weight_BT[:, t] > 0
        after_B = _of_task(z_B, targets.label_BT[:, t], there_B, task, groups)
        if targets.before_BT is not None:
            before_B = targets.before_BT[:, t]
            was_B = _of_task(z_B, torch.nan_to_num(before_B), there_B, task, groups)
            after_B = torch.where(torch.isnan(before_B), after_B, after_B - was_B)
        columns.append(after_B)
    return torch.stack(columns, dim=1)


def _of_task(
    z_B: Tensor, label_B: Tensor, there_B: Tensor, task: Task, groups: CandidateGroups | None
) -> Tensor:
    label_B = label_B.to(z_B.dtype)
    if task.objective == "pairwise":
        assert groups is not None, "pairs are of a request's list"
        return _pairwise(z_B, (label_B > 0) & there_B, (label_B <= 0) & there_B, groups)
    if task.objective == "weighted":
        return torch.where(label_B > 0, label_B / task.scale * F.softplus(-z_B), F.softplus(z_B))
    return F.binary_cross_entropy_with_logits(z_B, amount(label_B, task.scale), reduction="none")


def amount(label_B: Tensor, scale: float) -> Tensor:
    """The share of a logarithm that `amount` learns, 0..1."""
    return (torch.log1p(label_B.clamp_min(0)) / math.log1p(scale)).clamp_max(1)


def _pairwise(z_B: Tensor, positive_B: Tensor, negative_B: Tensor, groups: CandidateGroups) -> Tensor:
    facts_S3 = groups.pad(torch.stack([z_B, positive_B.to(z_B.dtype), negative_B.to(z_B.dtype)], dim=1))
    out = []
    for group in groups.groups:
        z_GK, positive_GK, negative_GK = group.of_slots(facts_S3).unbind(dim=-1)
        loss_GKK = F.softplus(z_GK[:, None, :] - z_GK[:, :, None]) * negative_GK[:, None, :]
        num_negatives_G1 = negative_GK.sum(dim=1, keepdim=True).clamp_min(1)
        out.append((positive_GK * loss_GKK.sum(dim=2) / num_negatives_G1).flatten())
    return groups.unpad(torch.cat(out)[:, None])[:, 0] if out else 0 * z_B
