"""Compile a ranker to a tape: operations for interpreter.py and one array of weights.

request encoders → registers of R rows → tower ─ BROADCAST ─┐ candidate encoders → columns of `x0`, a register
of B rows ─┴→ CROSS … → dense → NORM, ATTEND_CANDIDATES … → deep → heads → logits
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from roostream.models.attention import ListAttention
from roostream.models.compiled import interpreter as ops
from roostream.models.feature_encoders import (
    EmbeddingEncoder,
    FeatureEncoder,
    FloatEncoder,
    HistoryAttentionEncoder,
    RateScale,
)
from roostream.models.interaction_layers import CrossNet
from roostream.models.layers import Mlp
from roostream.models.linear_part import Hinges, LinearPart
from roostream.models.ranker import Ranker
from roostream.schema.schema import Schema
from roostream.wire.block import Side

REQUESTS, CANDIDATES = 0, 1
"""Kinds of rows; the kinds after them are the entries of one sequence each."""


class ColumnRange(NamedTuple):
    """Where a value begins: the register and its first column."""

    register: int
    column: int = 0


class FloatBlock(NamedTuple):
    """Floats and presence of a side, written before the tape runs."""

    side: Side
    to: ColumnRange
    scale_G: np.ndarray | None  # float32: by what the floats are multiplied


class PooledList(NamedTuple):
    """A pooled list feature, written before the tape runs."""

    side: Side
    name: str
    number: int  # among the side's lists
    stack: str
    weighted: bool
    to: ColumnRange


class SequenceBlock(NamedTuple):
    """Entries of a sequence, written before the tape runs: rows, rows of id columns, vectors of time
    buckets."""

    name: str
    number: int  # among the request's lists
    stacks: dict[str, str]  # "" or an id column → its stack
    times: dict[str, np.ndarray]  # time column → float32 [buckets, width]
    to: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tape:
    """Immutable; weights are copies."""

    floats: tuple[FloatBlock, ...]
    lists: tuple[PooledList, ...]
    sequences: tuple[SequenceBlock, ...]
    kind_G: np.ndarray  # int64: what a register's rows are; the last one has the logits
    width_G: np.ndarray  # int64: its columns
    ops_O: np.ndarray  # int64 [O, 11]
    weights: np.ndarray  # float32


def compile_tape(model: Ranker, schema: Schema) -> Tape | None:
    """The tape of a model; None if it has a part for which the interpreter has no operation."""
    request = cast("dict[str, FeatureEncoder]", dict(model.request_parts.items()))
    candidate = cast("dict[str, FeatureEncoder]", dict(model.candidate_parts.items()))
    known = {FloatEncoder, EmbeddingEncoder, HistoryAttentionEncoder}
    if model.user_arch is not None or model.normalizes_rows or type(model.cross) is not CrossNet:
        return None
    if not {type(part) for part in (*request.values(), *candidate.values())} <= known:
        return None
    writer = _Writer(schema, model.scale_rates)
    tower = writer.tower(model, request)
    x0 = writer.candidates(tower, candidate)
    x = writer.cross(model.cross, x0)
    x = writer.mlp(model.dense, x)
    for block in model.list_attention:
        writer.list_attention(cast(ListAttention, block), x)
    x = writer.mlp(model.deep, x)
    linear = writer.linear_part(model, x0, tower) if model.linear is not None else None
    logits = writer.heads(model, x)
    if model.first_order is not None:
        layer = model.first_order.as_linear(candidate["floats"].width)
        writer.add_linear(_scaled(layer, _network_factor(model)), x0, tower, logits)
    if linear is not None:
        writer.add(linear, logits)
    return writer.tape()


class _Writer:
    """Collects registers, operations and weights."""

    def __init__(self, schema: Schema, rates: RateScale | None) -> None:
        self.schema, self.rates = schema, rates
        self._floats: list[FloatBlock] = []
        self._lists: list[PooledList] = []
        self._sequences: list[SequenceBlock] = []
        self._registers: list[tuple[int, int]] = []
        self.request_columns = -1  # register of the request's parts, floats first
        self._ops: list[tuple[int, ...]] = []
        self._weights: list[np.ndarray] = []
        self._num_weights = 0

    def tape(self) -> Tape:
        return Tape(
            floats=tuple(self._floats),
            lists=tuple(self._lists),
            sequences=tuple(self._sequences),
            kind_G=np.array([kind for kind, _ in self._registers], dtype=np.int64),
            width_G=np.array([width for _, width in self._registers], dtype=np.int64),
            ops_O=np.array(self._ops, dtype=np.int64),
            weights=np.concatenate(self._weights),
        )

    def tower(self, model: Ranker, parts: dict[str, FeatureEncoder]) -> int | None:
        """Register of what the candidates of a request share."""
        if not parts:
            return None
        self.request_columns = self._register(REQUESTS, sum(part.width for part in parts.values()))
        self._write_parts("ro", parts, self.request_columns, 0)
        return self.mlp(model.request_tower, self.request_columns)

    def candidates(self, tower: int | None, parts: dict[str, FeatureEncoder]) -> int:
        """Register of everything known about a candidate."""
        shared = self._width(tower) if tower is not None else 0
        x0 = self._register(CANDIDATES, shared + sum(part.width for part in parts.values()))
        if tower is not None:
            self._op(ops.BROADCAST, ColumnRange(tower), ColumnRange(x0), shared, shared)
        self._write_parts("nro", parts, x0, shared)
        return x0

    def cross(self, cross: CrossNet, x0: int) -> int:
        x = x0
        for i, layer in enumerate(cross.layers):
            y = self._linear(cross.down[i], x) if cross.down else x
            y = self._linear(layer, y)
            out = self._register(CANDIDATES, cross.width)
            columns = ColumnRange(x0), ColumnRange(out)
            self._op(ops.CROSS, *columns, cross.width, cross.width, b=ColumnRange(y), mode=x)
            x = out
        return x

    def mlp(self, mlp: Mlp, x: int) -> int:
        for layer in mlp.layers:
            x = self._linear(layer, x, mode=ops.RELU)
        return x

    def list_attention(self, block: ListAttention, x: int) -> None:
        """x + W_o attend(LN(x)), in place."""
        norm, width = block.norm, self._width(x)
        normal, attended = self._register(CANDIDATES, width), self._register(CANDIDATES, width)
        at = self._keep([norm.weight.numpy(force=True), norm.bias.numpy(force=True)])
        self._op(ops.NORM, ColumnRange(x), ColumnRange(normal), width, width, weight=at)
        packed = self._linear(block.query_key_value, normal)
        columns = ColumnRange(packed), ColumnRange(attended)
        self._op(ops.ATTEND_CANDIDATES, *columns, 3 * width, width, mode=block.heads)
        self._linear(block.out, attended, to=ColumnRange(x), mode=ops.ADDED)

    def heads(self, model: Ranker, x: int) -> int:
        """The logits are the last register, which is returned."""
        towers = [self.mlp(cast(Mlp, tower), x) for tower in model.heads.towers]
        logits = self._register(CANDIDATES, len(towers))
        factor_T = _network_factor(model)
        for task, (layer, tower) in enumerate(zip(model.heads.logits, towers, strict=True)):
            scaled = _scaled(cast(nn.Linear, layer), factor_T[task : task + 1])
            self._linear(scaled, tower, to=ColumnRange(logits, task))
        return logits

    def add_linear(self, layer: nn.Linear, x0: int, tower: int | None, logits: int) -> None:
        """Add a layer of the candidate's floats to the logits; they are the first of its own columns."""
        own = self._width(tower) if tower is not None else 0
        self._linear(layer, x0, a_column=own, to=ColumnRange(logits), mode=ops.ADDED)

    def linear_part(self, model: Ranker, x0: int, tower: int | None) -> int:
        """Register of what the linear model adds to the scores."""
        columns, layer = model.linear_columns, cast(LinearPart, model.linear).as_linear()
        start, done = self._width(tower) if tower is not None else 0, columns.own.width
        added = self._linear(_part_of(layer, slice(0, done), with_bias=True), x0, a_column=start)
        to = ColumnRange(added)

        def add_hinges(hinges: Hinges | None, at: int) -> int:
            if hinges is None or not hinges.width:
                return at
            bent = self._linear(hinges.as_linear(self._scale("nro")), x0, a_column=start, mode=ops.RELU)
            self._linear(_part_of(layer, slice(at, at + hinges.width)), bent, to=to, mode=ops.ADDED)
            return at + hinges.width

        done = add_hinges(columns.candidate_hinges, done)
        if (hinges := columns.request_hinges) is not None and hinges.width:
            floats, width = slice(done, done + columns.num_request_floats), layer.out_features
            done = floats.stop + hinges.width
            of_request = self._linear(_part_of(layer, floats), self.request_columns)
            bent = self._linear(hinges.as_linear(self._scale("ro")), self.request_columns, mode=ops.RELU)
            of_hinges = _part_of(layer, slice(floats.stop, done))
            self._linear(of_hinges, bent, to=ColumnRange(of_request), mode=ops.ADDED)
            of_candidates = self._register(CANDIDATES, width)
            self._op(ops.BROADCAST, ColumnRange(of_request), ColumnRange(of_candidates), width, width)
            self.add(of_candidates, added)
        add_hinges(columns.rate_hinges, done)
        return added

    def add(self, x: int, to: int) -> None:
        """Add a register to one of equal shape."""
        same = nn.Linear(self._width(x), self._width(x), bias=False)
        with torch.no_grad():
            nn.init.eye_(same.weight)
        self._linear(same, x, to=ColumnRange(to), mode=ops.ADDED)

    def _scale(self, side: Side) -> Tensor | None:
        return None if self.rates is None else self.rates.of(side)

    def _write_parts(self, side: Side, parts: dict[str, FeatureEncoder], register: int, column: int) -> None:
        """Parts side by side from `column` on. Histories are queried by the candidate's embeddings, which
        come first."""
        asking = ColumnRange(register)
        for part in parts.values():
            to = ColumnRange(register, column)
            if isinstance(part, FloatEncoder):
                scale_G = self._scale(side)
                self._floats.append(
                    FloatBlock(side, to, None if scale_G is None else scale_G.numpy(force=True))
                )
            elif isinstance(part, EmbeddingEncoder):
                asking = to
                self._write_lists(side, to)
            else:
                self._history(cast(HistoryAttentionEncoder, part), asking, to)
            column += part.width

    def _write_lists(self, side: Side, to: ColumnRange) -> None:
        for number, f in enumerate(self.schema.lists(side)):
            table = self.schema.table_by_name[f.table]
            self._lists.append(PooledList(side, f.name, number, table.stack, f.kind == "weighted_ids", to))
            to = ColumnRange(to.register, to.column + table.dim)

    def _history(self, part: HistoryAttentionEncoder, asking: ColumnRange, to: ColumnRange) -> None:
        attention, number = part.attention, len(self._sequences)
        entries = self._register(CANDIDATES + 1 + number, attention.key_value.in_features)
        times = {
            c: cast(nn.Embedding, table).weight.numpy(force=True).copy()
            for c, table in zip(part.feature.time_columns, part.times.values(), strict=True)
        }
        name = part.feature.name
        at = [f.name for f in self.schema.lists("ro")].index(name)
        self._sequences.append(SequenceBlock(name, at, dict(part.stacks), times, entries))
        query = self._linear(attention.query, asking.register, a_column=asking.column)
        keys, width = ColumnRange(self._linear(attention.key_value, entries)), attention.width
        self._op(
            ops.ATTEND_HISTORY,
            ColumnRange(query),
            to,
            width,
            width,
            b=keys,
            weight=number,
            mode=attention.heads,
        )

    def _linear(
        self,
        layer: nn.Module,
        x: int,
        *,
        a_column: int = 0,
        to: ColumnRange | None = None,
        mode: int = ops.PLAIN,
    ) -> int:
        """Into a new register, unless `to` is given."""
        assert isinstance(layer, nn.Linear)
        weight_JK = layer.weight.numpy(force=True)
        bias_J = np.zeros(len(weight_JK), np.float32) if layer.bias is None else layer.bias.numpy(force=True)
        if to is None:
            to = ColumnRange(self._register(self._registers[x][0], len(weight_JK)))
        at = self._keep([*weight_JK.T, bias_J])
        widths = layer.in_features, layer.out_features
        self._op(ops.LINEAR, ColumnRange(x, a_column), to, *widths, weight=at, mode=mode)
        return to.register

    def _keep(self, rows: Iterable[np.ndarray]) -> int:
        """Store weights; returns their start."""
        at = self._num_weights
        self._weights.append(np.concatenate([np.asarray(row, np.float32) for row in rows]))
        self._num_weights += len(self._weights[-1])
        return at

    def _register(self, kind: int, width: int) -> int:
        self._registers.append((kind, width))
        return len(self._registers) - 1

    def _width(self, register: int) -> int:
        return self._registers[register][1]

    def _op(
        self,
        op: int,
        a: ColumnRange,
        to: ColumnRange,
        width_in: int,
        width_out: int,
        *,
        b: ColumnRange = ColumnRange(0),
        weight: int = 0,
        mode: int = 0,
    ) -> None:
        self._ops.append((op, *a, *b, *to, width_in, width_out, weight, mode))


def _part_of(layer: nn.Linear, columns: slice, *, with_bias: bool = False) -> nn.Linear:
    """The layer of some of its columns."""
    part = nn.Linear(columns.stop - columns.start, layer.out_features)
    with torch.no_grad():
        part.weight.copy_(layer.weight[:, columns])
        part.bias.copy_(layer.bias if with_bias else torch.zeros_like(layer.bias))
    return part


def _network_factor(model: Ranker) -> Tensor:
    """By which the network's logits count in the scores, [T]."""
    return torch.ones(len(model.heads.logits)) if model.linear is None else model.linear.network_factor()


def _scaled(layer: nn.Linear, factor_J: Tensor) -> nn.Linear:
    """The layer with each output times a factor."""
    scaled = nn.Linear(layer.in_features, layer.out_features)
    with torch.no_grad():
        scaled.weight.copy_(layer.weight * factor_J[:, None].to(layer.weight))
        scaled.bias.copy_(layer.bias * factor_J.to(layer.bias))
    return scaled
