"""The multi-task loss: objectives of labels, and labels that arrive late.

A task is a binary event, whatever its label's fold, unless the label has another `objective`. A folded label
is positive when it is above 0; `threshold` sets the value from which an engagement counts.

Objectives; z a logit, p = σ(z) the prediction, v a label's value:

    event      log loss of "did it happen"; p is its probability
    weighted   v / `scale` · -log p of a positive, -log(1 - p) of a negative. e^z is the sum of v / `scale`
               over the number of negatives, nearly the mean of v / `scale` if positives are rare
    amount     -y log p - (1 - y) log(1 - p) with y = log(1 + v) / log(1 + `scale`) <= 1. p is the mean of y
    pairwise   of a positive, the mean of log(1 + e^(z of the negative - z)) over the negatives of its
               request; of a negative 0. Only the order within a request is learned; p alone has no meaning

`weighted`: Covington, Adams, Sargin, "Deep neural networks for YouTube recommendations", RecSys 2016, §4.2.
`amount`: quasi-likelihood regression of a log share (Papke, Wooldridge, J. Applied Econometrics 1996); one
long read does not outweigh a hundred short ones, and scores lie in 0..1; v is expm1(p · log1p(`scale`)).
`pairwise`: RankNet (Burges et al., ICML 2005) over a request's list. With these objectives a correction is
loss(after) - loss(before). Labels of weight 0 form no pair.

Late labels: a sample that is made early has candidates labeled negative that become positive later; a
correction then says so. d is the share of positives known when a sample is made. Over the whole stream, each
of these losses has its minimum at the true probability, `fnw` and `fnc` only if d = 0:

| loss | a sample | a correction from negative to positive |
|---|---|---|
| `log` | log loss | log loss after - before: the sample's is taken back |
| `fnw` | log loss, weighted: positives 1 + p, negatives (1 - p)(1 + p) | the same positive |
| `fnc` | log loss of b = p / (1 + p), the share of positives if each comes twice | the same positive |
| `es_dfm` | log loss, positives · w = 1 + p(1 - d), negatives · w(1 - p) / (1 - p d) | the same positive |
| `dfm` | -log p of a positive, -log(1 - p d) of a negative, which may be an unknown positive | nothing |

A correction from positive to negative is loss(after) - loss(before) in all of them. p in a weight has no
gradient.

`fnw`, `fnc`: Ktena et al., "Addressing delayed feedback for continuous training with neural networks in CTR
prediction", RecSys 2019 (fake negative weighted, fake negative calibration; they learn b and serve p = b / (1
- b), here the logit is that of p). `dfm`: Chapelle, "Modeling delayed feedback in display advertising", KDD
2014, with a given distribution of delays. `es_dfm`: Yang et al., "Capturing delayed feedback in conversion
rate prediction via elapsed-time sampling", AAAI 2021; its two classifiers follow here from p and d: p(1 - d)
and (1 - p) / (1 - p d).

Letters: B candidates, T tasks, G requests of a group, K candidates of a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from roostream.models.candidate_groups import CandidateGroups
from roostream.models.config import LossName
from roostream.models.model import Targets
from roostream.schema.schema import Objective, Schema


def loss(
    logits_BT: Tensor, targets: Targets, tasks: Sequence[Task] = (), groups: CandidateGroups | None = None
) -> Tensor:
    """The weighted mean over candidates of each task, summed over tasks by their weights → scalar.

    `tasks`: empty = all are events of weight 1; `groups`: the requests' lists, for pairwise objectives.

    Weight 0 excludes a candidate's label; a task whose weights are all 0 (or B = 0) contributes 0. Weighted
    means are equal for a batch and its expansion to impressions (guarantee G10). Candidates of a correction
    count in the mean as those of its sample did, so both have the same scale. With `targets.total_T`, losses
    and gradients of the parts of a batch add up to those of the whole.
    """
    weight_BT = targets.weight_BT
    each_BT = (
        objective_losses(logits_BT, targets, loss_per_candidate(logits_BT, targets), tasks, groups)
        if tasks
        else loss_per_candidate(logits_BT, targets)
    )
    total_T = weight_BT.sum(dim=0) if targets.total_T is None else targets.total_T
    mean_T = (each_BT * weight_BT).sum(dim=0) / torch.where(total_T > 0, total_T, 1.0)
    if tasks:
        mean_T = mean_T * mean_T.new_tensor([task.weight for task in tasks])
    return mean_T.sum()


def loss_per_candidate(logits_BT: Tensor, targets: Targets) -> Tensor:
    """The event loss of every candidate and task, [B, T], unweighted."""
    treatment = _TREATMENTS[targets.loss]
    positive_BT = (targets.label_BT > 0).to(logits_BT.dtype)
    late_BT = None  # log of the share that isn't known
    if targets.known_BT is not None:
        late_BT = torch.log1p(-targets.known_BT.to(logits_BT.dtype))
    each_BT = treatment.of(logits_BT, positive_BT, late_BT)
    if targets.before_BT is None:
        return each_BT
    was_BT = (targets.before_BT > 0).to(logits_BT.dtype)
    change_BT = each_BT - treatment.of(logits_BT, was_BT, late_BT)
    if not treatment.takes_back:
        up_BT = (positive_BT > was_BT).to(logits_BT.dtype)
        change_BT = torch.where(up_BT > 0, each_BT * treatment.again, change_BT)
    return torch.where(torch.isnan(targets.before_BT), each_BT, change_BT)


def _log(z_BT: Tensor, positive_BT: Tensor, late_BT: Tensor | None) -> Tensor:
    return F.binary_cross_entropy_with_logits(z_BT, positive_BT, reduction="none")


def _weighted(z_BT: Tensor, positive_BT: Tensor, late_BT: Tensor | None) -> Tensor:
    """(1 - p) / (1 - p d) = σ(-(z + log(1 - d)))."""
    with torch.no_grad():
        scale_BT = 1 + torch.sigmoid(z_BT) * (1.0 if late_BT is None else late_BT.exp())
        real_BT = torch.sigmoid(-z_BT if late_BT is None else -z_BT - late_BT)
        weight_BT = scale_BT * (positive_BT + (1 - positive_BT) * real_BT)
    return weight_BT * _log(z_BT, positive_BT, None)


def _calibrated(z_BT: Tensor, positive_BT: Tensor, late_BT: Tensor | None) -> Tensor:
    """The logit of b = p / (1 + p) is log p."""
    return _log(F.logsigmoid(z_BT), positive_BT, None)


def _delayed(z_BT: Tensor, positive_BT: Tensor, late_BT: Tensor | None) -> Tensor:
    """log(1 - p d) = softplus(z + log(1 - d)) - softplus(z)."""
    assert late_BT is not None, "dfm needs what is known"
    negative_BT = F.softplus(z_BT) - F.softplus(z_BT + late_BT)
    return torch.where(positive_BT > 0, F.softplus(-z_BT), negative_BT)


class _Treatment(NamedTuple):
    """Loss of a sample, and what a correction from negative to positive adds: the sample's loss is taken
    back, or the positive is counted `again`, once or not at all."""

    of: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    takes_back: bool = False
    again: float = 1.0


_TREATMENTS: dict[LossName, _Treatment] = {
    "log": _Treatment(_log, takes_back=True),
    "fnw": _Treatment(_weighted),
    "fnc": _Treatment(_calibrated),
    "dfm": _Treatment(_delayed, again=0.0),
    "es_dfm": _Treatment(_weighted),
}


class Task(NamedTuple):
    """The objective of a label, and its weight in the loss."""

    objective: Objective
    scale: float
    weight: float


def task_objectives(schema: Schema) -> tuple[Task, ...]:
    """() if every label is an event of weight 1."""
    tasks = tuple(Task(label.objective, label.scale, label.weight) for label in schema.labels)
    return tasks if any(task.objective != "event" or task.weight != 1.0 for task in tasks) else ()


def objective_losses(
    logits_BT: Tensor,
    targets: Targets,
    event_BT: Tensor,
    tasks: Sequence[Task],
    groups: CandidateGroups | None,
) -> Tensor:
    """The loss of every candidate and task, [B, T]; `event_BT`: the losses as if all were events."""
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
    """The log share that `amount` learns, 0..1."""
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
