"""From a ranker's modules and parameters to a tape: operations of roostream/models/fused/machine.py and one array of weights.

request parts → registers of R rows → tower ─ SPREAD ─┐
candidate parts → columns of `x0`, a register of B rows ┴→ CROSS … → dense → NORM, TO_EACH_OTHER … → deep → heads → logits
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple, cast

import numpy as np
from torch import nn

from roostream.models.feature_encoders import (
    EmbeddingEncoder,
    FeatureEncoder,
    FloatEncoder,
    HistoryAttentionEncoder,
)
from roostream.models.fused import machine as m
from roostream.models.interaction_layers import CrossNet
from roostream.models.layers import Mlp
from roostream.models.ranker import Ranker
from roostream.schema.schema import Schema
from roostream.wire.block import Side

REQUESTS, CANDIDATES = 0, 1
"""Kinds of rows; those after them are the entries of a sequence each."""


class Spot(NamedTuple):
    register: int
    column: int = 0


class LaidFloats(NamedTuple):
    """Floats and presence of a side, before the tape runs."""

    side: Side
    to: Spot


class LaidList(NamedTuple):
    """A pooled list feature, before the tape runs."""

    side: Side
    name: str
    number: int  # among the side's lists
    stack: str
    weighted: bool
    to: Spot


class LaidSequence(NamedTuple):
    """A sequence's entries, before the tape runs: rows, rows of its id columns, vectors of its time columns' buckets."""

    name: str
    number: int  # among the request's lists
    stacks: dict[str, str]  # "" or an id column → its stack
    times: dict[str, np.ndarray]  # time column → float32 [buckets, width]
    to: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tape:
    """Immutable; weights are copies."""

    floats: tuple[LaidFloats, ...]
    lists: tuple[LaidList, ...]
    sequences: tuple[LaidSequence, ...]
    kind_G: np.ndarray  # int64: what a register's rows are; the last one has the logits
    width_G: np.ndarray  # int64: its columns
    ops_O: np.ndarray  # int64 [O, 11]
    weights: np.ndarray  # float32


def tape_of(model: Ranker, schema: Schema) -> Tape | None:
    """None: some part of it isn't among those that a tape knows."""
    request = cast("dict[str, FeatureEncoder]", dict(model.request_parts.items()))
    candidate = cast("dict[str, FeatureEncoder]", dict(model.candidate_parts.items()))
    known = {FloatEncoder, EmbeddingEncoder, HistoryAttentionEncoder}
    if model.user_arch is not None or model.normalizes_rows or type(model.cross) is not CrossNet:
        return None
    if not {type(part) for part in (*request.values(), *candidate.values())} <= known:
        return None
    writer = _Writer(schema)
    tower = writer.tower(model, request)
    x0 = writer.candidates(tower, candidate)
    x = writer.cross(model.cross, x0)
    x = writer.mlp(model.dense, x)
    for block in model.list_attention:
        writer.list_attention(block, x)
    writer.heads(model, writer.mlp(model.deep, x))
    return writer.tape()


class _Writer:
    """Notes registers, operations and weights."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._floats: list[LaidFloats] = []
        self._lists: list[LaidList] = []
        self._sequences: list[LaidSequence] = []
        self._registers: list[tuple[int, int]] = []
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
        """The register of what a request's candidates share."""
        if not parts:
            return None
        register = self._register(REQUESTS, sum(part.width for part in parts.values()))
        self._lay("ro", parts, register, 0)
        return self.mlp(model.request_tower, register)

    def candidates(self, tower: int | None, parts: dict[str, FeatureEncoder]) -> int:
        """The register of all that is known of a candidate."""
        shared = self._width(tower) if tower is not None else 0
        x0 = self._register(CANDIDATES, shared + sum(part.width for part in parts.values()))
        if tower is not None:
            self._op(m.SPREAD, a=Spot(tower), to=Spot(x0), width_in=shared, width_out=shared)
        self._lay("nro", parts, x0, shared)
        return x0

    def cross(self, cross: CrossNet, x0: int) -> int:
        x = x0
        for i, layer in enumerate(cross.layers):
            y = self._linear(cross.down[i], x) if cross.down else x
            y = self._linear(layer, y)
            out = self._register(CANDIDATES, cross.width)
            self._op(
                m.CROSS,
                a=Spot(x0),
                b=Spot(y),
                to=Spot(out),
                width_in=cross.width,
                width_out=cross.width,
                mode=x,
            )
            x = out
        return x

    def mlp(self, mlp: Mlp, x: int) -> int:
        for layer in mlp.layers:
            x = self._linear(layer, x, mode=m.RELU)
        return x

    def list_attention(self, block: nn.Module, x: int) -> None:
        """x + W_o attend(LN(x)), in place."""
        norm, out, width = cast(nn.LayerNorm, block.norm), cast(nn.Linear, block.out), self._width(x)
        normal, attended = self._register(CANDIDATES, width), self._register(CANDIDATES, width)
        at = self._keep([norm.weight.numpy(force=True), norm.bias.numpy(force=True)])
        self._op(m.NORM, a=Spot(x), to=Spot(normal), width_in=width, width_out=width, weight=at)
        packed = self._linear(cast(nn.Linear, block.query_key_value), normal)
        heads = cast(int, block._heads)
        self._op(
            m.TO_EACH_OTHER,
            a=Spot(packed),
            to=Spot(attended),
            width_in=3 * width,
            width_out=width,
            mode=heads,
        )
        self._linear(out, attended, to=Spot(x), mode=m.ADDED)

    def heads(self, model: Ranker, x: int) -> None:
        """The logits are the last register."""
        towers = [self.mlp(cast(Mlp, tower), x) for tower in model.heads.towers]
        logits = self._register(CANDIDATES, len(towers))
        for task, (layer, tower) in enumerate(zip(model.heads.logits, towers, strict=True)):
            self._linear(cast(nn.Linear, layer), tower, to=Spot(logits, task))

    def _lay(self, side: Side, parts: dict[str, FeatureEncoder], register: int, column: int) -> None:
        """Parts side by side from `column` on; histories are asked by the candidate's embeddings, which come before them."""
        asking = Spot(register)
        for part in parts.values():
            to = Spot(register, column)
            if isinstance(part, FloatEncoder):
                self._floats.append(LaidFloats(side, to))
            elif isinstance(part, EmbeddingEncoder):
                asking = to
                self._lay_lists(side, to)
            else:
                self._history(cast(HistoryAttentionEncoder, part), asking, to)
            column += part.width

    def _lay_lists(self, side: Side, to: Spot) -> None:
        for number, f in enumerate(self.schema.lists(side)):
            table = self.schema.table_by_name[f.table]
            self._lists.append(LaidList(side, f.name, number, table.stack, f.kind == "weighted_ids", to))
            to = Spot(to.register, to.column + table.dim)

    def _history(self, part: HistoryAttentionEncoder, asking: Spot, to: Spot) -> None:
        attention, number = part.attention, len(self._sequences)
        entries = self._register(CANDIDATES + 1 + number, attention.key_value.in_features)
        times = {
            c: cast(nn.Embedding, table).weight.numpy(force=True).copy() for c, table in part.times.items()
        }
        name = part._feature.name
        at = [f.name for f in self.schema.lists("ro")].index(name)
        self._sequences.append(LaidSequence(name, at, dict(part._stacks), times, entries))
        query = self._linear(attention.query, asking.register, a_column=asking.column)
        self._op(
            m.TO_ENTRIES,
            a=Spot(query),
            b=Spot(self._linear(attention.key_value, entries)),
            to=to,
            width_in=attention.width,
            width_out=attention.width,
            weight=number,
            mode=attention._heads,
        )

    def _linear(
        self, layer: nn.Module, x: int, *, a_column: int = 0, to: Spot | None = None, mode: int = m.PLAIN
    ) -> int:
        """Into a register of its own, unless `to` says where."""
        assert isinstance(layer, nn.Linear)
        weight_JK = layer.weight.numpy(force=True)
        bias_J = np.zeros(len(weight_JK), np.float32) if layer.bias is None else layer.bias.numpy(force=True)
        if to is None:
            to = Spot(self._register(self._registers[x][0], len(weight_JK)))
        at = self._keep([*weight_JK.T, bias_J])
        self._op(
            m.LINEAR,
            a=Spot(x, a_column),
            to=to,
            width_in=layer.in_features,
            width_out=layer.out_features,
            weight=at,
            mode=mode,
        )
        return to.register

    def _keep(self, rows: Iterable[np.ndarray]) -> int:
        """Where the weights begin."""
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
        *,
        a: Spot,
        to: Spot,
        width_in: int,
        width_out: int,
        b: Spot = Spot(0),
        weight: int = 0,
        mode: int = 0,
    ) -> None:
        self._ops.append((op, *a, *b, *to, width_in, width_out, weight, mode))
