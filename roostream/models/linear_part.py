"""A linear model of floats beside a network, and the mixture of both.

The network needs thousands of requests to find what a linear model finds in some hundreds, and later finds
more. Each of them learns from the loss of its own logits, so neither depends on the other. The scores are

    m = (1 - a) z_network + a z_linear          z = (1 + s) m + b

a is the share of the linear model. The calibration s, b repairs that both, and so m, are too cautious. Each
task has its own three numbers, learned from the losses of m and z on requests that no part has seen. These
numbers and the weights of the linear model are trained by online Newton steps
(trainer/dense_part/newton.py), the network by Adam.

The model is linear in columns that `LinearColumns` computes. They contain hinges, so it is piecewise linear
in each float, as a generalized additive model is.

Letters: B candidates, G columns, F columns and a constant, H hinges, T tasks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roostream.models.feature_encoders import FloatEncoder, RateScale, float_kinds
from roostream.models.inputs import Inputs
from roostream.models.named_columns import ColumnNames
from roostream.schema.schema import Schema
from roostream.wire.block import Side
from roostream.wire.transform import output_names

MAX_WIDTH = 256
"""A candidate with more floats gets no linear part, because a step takes the cube of their number."""
MAX_WIDTH_WITH_KNOTS = 384
"""With more columns, those of MORE_RATE_KNOTS not counted, there are none but the candidate's floats."""
KNOTS = {"rank": (1 / 3, 2 / 3), "share": (0.05, 0.2), "rate": (0.05, 0.2), "standardize": (-1.0, 1.0)}
OTHER_KNOTS = (1.0, 4.0)
MORE_RATE_KNOTS = (0.02, 0.1, 0.35)
"""Where the model may bend, by what a float is: the last transform, or a rate of a counter. Others are mostly
logarithms of counts and times. A candidate's rates have more knots, whose columns follow all others, because
commits from before do not have them."""
FIRST_SHARE, MAX_SHARE = 0.5, 0.95
MIN_SCALE, MAX_SCALE = -0.5, 1.0
"""Bounds of s."""


class LinearColumns(nn.Module):
    """The columns of the linear model, [B, G].

    own      the candidate's floats and presence bits
    added    hinges of the candidate's floats, the request's floats, hinges of those, more hinges of the
             candidate's rates; only with `knots`
    """

    def __init__(self, schema: Schema, knots: bool) -> None:
        super().__init__()
        self.own = FloatEncoder(schema, "nro")
        sides: tuple[Side, Side] = ("nro", "ro")
        candidate, request = (Hinges(knots_of(schema, side)) for side in sides)
        is_rate = [kind == "rate" for kind in float_kinds(schema, "nro")]
        rate_hinges = Hinges([np.arcsinh(MORE_RATE_KNOTS).tolist() if rate else [] for rate in is_rate])
        self.num_request_floats = len(output_names(schema, "ro"))
        added = candidate.width + self.num_request_floats + request.width
        fits = knots and self.own.width + added <= MAX_WIDTH_WITH_KNOTS
        self.candidate_hinges: Hinges | None = candidate if fits else None
        self.request_hinges: Hinges | None = request if fits else None
        self.rate_hinges: Hinges | None = rate_hinges if fits else None
        self.added_width = added + rate_hinges.width if fits else 0
        floats = [[f"{side} {name}" for name in output_names(schema, side)] for side in sides]
        self.columns = (
            *self.own.columns,
            "constant",
            *(
                (
                    *candidate.columns(floats[0]),
                    *floats[1],
                    *request.columns(floats[1]),
                    *rate_hinges.columns(floats[0]),
                )
                if fits
                else ()
            ),
        )

    def forward(self, inputs: Inputs, rates: RateScale | None = None) -> Tensor:
        """[B, G]. `rates`: what multiplied the rates of `inputs`; None = nothing."""
        own_BG = self.own(inputs, {})
        if self.candidate_hinges is None or self.request_hinges is None or self.rate_hinges is None:
            return own_BG
        ro_scale_G, nro_scale_G = (rates.of("ro"), rates.of("nro")) if rates is not None else (None, None)
        request_RH = self.request_hinges(inputs.ro_float_RG, ro_scale_G)
        request_RG = torch.cat([inputs.ro_float_RG, request_RH], dim=1)
        columns = [
            own_BG,
            self.candidate_hinges(inputs.nro_float_BG, nro_scale_G),
            request_RG.index_select(0, inputs.request_index_B),
            self.rate_hinges(inputs.nro_float_BG, nro_scale_G),
        ]
        return torch.cat(columns, dim=1)


class Hinges(nn.Module):
    """max(x - k, 0) for each knot k of each column, [B, G] → [B, H]."""

    column_H: Tensor
    knot_H: Tensor

    def __init__(self, knots: Sequence[Sequence[float]]) -> None:
        """`knots`: of each column."""
        super().__init__()
        pairs = [(column, knot) for column, its in enumerate(knots) for knot in its]
        self.width, self._num_columns = len(pairs), len(knots)
        columns, values = [column for column, _ in pairs], [knot for _, knot in pairs]
        self.register_buffer("column_H", torch.tensor(columns, dtype=torch.int64), persistent=False)
        self.register_buffer("knot_H", torch.tensor(values, dtype=torch.float32), persistent=False)

    def forward(self, x_BG: Tensor, scale_G: Tensor | None = None) -> Tensor:
        """`scale_G`: by what the columns, and so the knots, were multiplied."""
        return torch.relu(x_BG.index_select(1, self.column_H) - self._scaled_knots(scale_G))

    def columns(self, names: Sequence[str]) -> list[str]:
        """Names of the hinges. `names`: of the columns that they bend."""
        pairs = zip(self.column_H.tolist(), self.knot_H.tolist(), strict=True)
        return [f"{names[column]} above {knot:.4g}" for column, knot in pairs]

    def as_linear(self, scale_G: Tensor | None = None) -> nn.Linear:
        """The same before the ReLU, as a layer for the compiled scorer."""
        layer = nn.Linear(self._num_columns, self.width)
        with torch.no_grad():
            nn.init.zeros_(layer.weight)
            layer.weight[torch.arange(self.width), self.column_H] = 1.0
            layer.bias.copy_(-self._scaled_knots(scale_G))
        return layer

    def _scaled_knots(self, scale_G: Tensor | None) -> Tensor:
        return self.knot_H if scale_G is None else self.knot_H * scale_G[self.column_H]


def knots_of(schema: Schema, side: Side) -> list[list[float]]:
    """For each float of a side after transforms, where the linear model may bend, as models see floats
    (asinh)."""
    knots = [KNOTS.get(kind, OTHER_KNOTS) for kind in float_kinds(schema, side)]
    return [np.arcsinh(values).tolist() for values in knots]


class LinearPart(nn.Module):
    """The linear model, its share in the scores, and their calibration.

    If all parameters are 0, the scores are those of the network.

    After `backward`, the gradient of a `…curvature` is not a derivative. It is Σ |e| x xᵀ / 2 over the
    candidates, with the derivative e of the loss by the candidate's logit, which a Newton step adds to it.
    """

    def __init__(self, width: int, first_weight: Sequence[Sequence[float]], added_width: int = 0) -> None:
        """The part has `width` + `added_width` columns.

        `first_weight` [T, width + 1]: weights of the first `width` columns and then of the constant, before
        training. The added columns start with weight 0; their weights are stored behind the constant's, so
        that a commit of a part without them can be continued.
        """
        super().__init__()
        num_tasks, self._width = len(first_weight), width
        self._first_weight = [[*weight_F, *[0.0] * added_width] for weight_F in first_weight]
        total = width + 1 + added_width
        self.weight = nn.Parameter(torch.zeros(num_tasks, total))
        self.curvature = nn.Parameter(torch.zeros(num_tasks, total, total))
        self.share = nn.Parameter(torch.zeros(num_tasks, 1))
        self.share_curvature = nn.Parameter(torch.zeros(num_tasks, 1, 1))
        self.calibration = nn.Parameter(torch.zeros(num_tasks, 2))  # s, b
        self.calibration_curvature = nn.Parameter(torch.zeros(num_tasks, 2, 2))

    def adjust_initial_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.weight.copy_(torch.tensor(self._first_weight))
        nn.init.constant_(self.share, FIRST_SHARE)

    def column_names(self, columns: tuple[str, ...]) -> dict[str, ColumnNames]:
        """`columns`: those of `LinearColumns`."""
        return {"weight": (None, columns), "curvature": (None, columns, columns)}

    def mixture_parameters(self) -> list[nn.Parameter]:
        """Those that compare predictions, so only batches can train them from which no part has learned."""
        return [self.share, self.share_curvature, self.calibration, self.calibration_curvature]

    def forward(self, x_BG: Tensor) -> Tensor:
        """The linear model's own logits, [B, T]."""
        constant_B1 = x_BG.new_ones(len(x_BG), 1)
        x_BF = torch.cat([x_BG[:, : self._width], constant_B1, x_BG[:, self._width :]], dim=1)
        logits_BT: Tensor = _Linear.apply(x_BF, self.weight, self.curvature)
        return logits_BT

    def mixed(self, network_BT: Tensor, x_BG: Tensor) -> Tensor:
        """The mixture of both parts' logits, calibrated, [B, T]: the model's scores.

        Computed in the precision of `x_BG`, even where the network uses a lower one, because `loss` computes
        the network's logits from the result."""
        with _without_autocast(x_BG.device.type):
            linear_BT = self(x_BG).detach()
            share_T, scale_T, shift_T = self._mixture()
            return torch.lerp(network_BT.to(x_BG.dtype), linear_BT, share_T) * scale_T + shift_T

    def loss(self, x_BG: Tensor, logits_BT: Tensor, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum of four losses: of the network's logits, of the linear ones, of their mixture, which
        reaches only the shares, and of the scores, which reaches only the calibration. `logits_BT`: from
        `mixed`."""
        linear_BT = self(x_BG)
        share_T, scale_T, shift_T = self._mixture()
        mixture_BT = (logits_BT - shift_T) / scale_T
        network_BT = (mixture_BT - share_T * linear_BT.detach()) / (1 - share_T)
        fixed_BT, before_BT = mixture_BT.detach(), network_BT.detach()
        gap_BT1 = (linear_BT.detach() - before_BT)[..., None]
        column_BT2 = torch.stack([fixed_BT, torch.ones_like(fixed_BT)], dim=-1)
        return (
            loss_of(network_BT)
            + loss_of(linear_BT)
            + loss_of(before_BT + _OfTask.apply(gap_BT1, self.share, self.share_curvature))
            + loss_of(fixed_BT + _OfTask.apply(column_BT2, self.calibration, self.calibration_curvature))
        )

    def network_factor(self) -> Tensor:
        """By which the network's logits count in the scores, [T]."""
        share_T, scale_T, _ = self._mixture()
        return (1 - share_T) * scale_T

    def as_linear(self) -> nn.Linear:
        """What the part adds to the scores, as a layer of all columns for the compiled scorer."""
        layer = nn.Linear(self.weight.shape[1] - 1, len(self.weight))
        share_T, scale_T, shift_T = self._mixture()
        with torch.no_grad():
            weight_TF = self.weight * (share_T * scale_T)[:, None]
            layer.weight.copy_(
                torch.cat([weight_TF[:, : self._width], weight_TF[:, self._width + 1 :]], dim=1)
            )
            layer.bias.copy_(weight_TF[:, self._width] + shift_T)
        return layer

    def _mixture(self) -> tuple[Tensor, Tensor, Tensor]:
        """a, 1 + s and b, [T] each."""
        scale_T, shift_T = self.calibration.detach().unbind(dim=1)
        return self.share.detach()[:, 0], 1 + scale_T, shift_T


def _without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """A context without automatic mixed precision. Devices that have none, such as `meta`, need nothing."""
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


class _Linear(torch.autograd.Function):
    """x w, with the curvature of the batch as gradient of `curvature`."""

    @staticmethod
    def forward(ctx: Any, x_BF: Tensor, weight_TF: Tensor, curvature_TFF: Tensor) -> Tensor:
        ctx.save_for_backward(x_BF)
        return nn.functional.linear(x_BF, weight_TF)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        (x_BF,) = ctx.saved_tensors
        gradient_BT = gradients[0].to(x_BF.dtype)
        outer = [(x_BF * (g_B.abs() / 2)[:, None]).T @ x_BF for g_B in gradient_BT.unbind(dim=1)]
        return None, gradient_BT.T @ x_BF, torch.stack(outer)


class _OfTask(torch.autograd.Function):
    """x w for columns that each task has of its own, [B, T, F] and [T, F] → [B, T], with the curvature of the
    batch as gradient of `curvature`."""

    @staticmethod
    def forward(ctx: Any, x_BTF: Tensor, weight_TF: Tensor, curvature_TFF: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTF)
        return (x_BTF * weight_TF).sum(dim=2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        (x_BTF,) = ctx.saved_tensors
        gradient_BT1 = gradients[0].to(x_BTF.dtype)[..., None]
        weighted_TFB = (gradient_BT1.abs() / 2 * x_BTF).permute(1, 2, 0)
        return None, (gradient_BT1 * x_BTF).sum(dim=0), weighted_TFB @ x_BTF.transpose(0, 1)
