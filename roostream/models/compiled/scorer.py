"""Logits of a batch for serving: compiled where the model allows it, else by its torch modules.

Both equal the trainer's forward pass to 1e-5 (guarantee G9, docs/decisions/0103): only the order of sums
differs.

Letters: R requests, B candidates, T tasks, U unique rows of a stack, D width, L entries of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from roostream.models.compiled import interpreter as interpreter
from roostream.models.compiled.tape import PooledList, SequenceBlock, Tape, compile_tape
from roostream.models.inputs import BUCKET_MS, build_inputs
from roostream.models.model import Model
from roostream.models.ranker import Ranker
from roostream.models.simd import COMPILED
from roostream.models.two_tower.models import Cascade
from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from roostream.wire.jagged import Jagged
from roostream.wire.lookup import Lookup
from roostream.wire.transform import apply_transforms

Rows = Mapping[str, np.ndarray]
"""Stack → float32 [U, D], aligned with the batch's lookup."""
Forward = Callable[[Batch, Lookup, Rows], np.ndarray]
"""Return float32 logits [B, T]."""
_NONE = np.zeros(0, np.float32)


def build_scorer(model: Model, schema: Schema) -> Forward:
    """A scorer with the model's current parameters; the compiled one has copies of them.

    Custom models, and models with a part that `compile_tape` does not know (HSTU, DHEN, UserArch), run
    through torch.
    """
    ranks = model.ranker if isinstance(model, Cascade) else model
    tape = compile_tape(ranks, schema) if COMPILED and type(ranks) is Ranker else None
    return torch_forward(model) if tape is None else CompiledScorer(tape)


def torch_forward(model: Model) -> Forward:
    """The forward pass of training: a request alone gets the same bits as in training."""

    def forward(batch: Batch, lookup: Lookup, rows: Rows) -> np.ndarray:
        with torch.inference_mode():
            logits_BT: np.ndarray = model(build_inputs(batch, lookup, rows)).numpy()
        return logits_BT

    return forward


class CompiledScorer:
    """Runs a tape. Thread-safe: each call has its own buffers."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        members: dict[str, list[PooledList]] = {}
        for one in tape.lists:
            members.setdefault(one.stack, []).append(one)
        self._lists = {
            stack: (its, _numbers(its), any(one.weighted for one in its)) for stack, its in members.items()
        }
        self._sequence_S = np.array([sequence.number for sequence in tape.sequences], np.int64)

    def __call__(self, batch: Batch, lookup: Lookup, rows: Rows) -> np.ndarray:
        tape, r = self.tape, batch.num_requests
        # Of candidates, and of each sequence's entries.
        start_SR1 = np.empty((1 + len(tape.sequences), r + 1), np.int64)
        where_G3 = np.empty((len(tape.kind_G), 3), np.int64)
        counts_R, lengths_KR = batch.num_candidates_R, batch.ro_lists.lengths_KN
        size = interpreter.allocate(
            tape.kind_G, tape.width_G, counts_R, lengths_KR, self._sequence_S, start_SR1, where_G3
        )
        x = np.empty(size, np.float32)

        def register(number: int) -> np.ndarray:
            begin, num_rows, width = where_G3[number].tolist()
            return x[begin : begin + num_rows * width].reshape(num_rows, width)

        floats = dict(zip(("ro", "nro"), apply_transforms(batch), strict=True))
        sides = {"ro": (batch.ro_present_RF, batch.ro_lists), "nro": (batch.nro_present_BF, batch.nro_lists)}
        for laid in tape.floats:
            present_NF, lists = sides[laid.side]
            float_NG = np.arcsinh(floats[laid.side])
            interpreter.write_floats(
                float_NG if laid.scale_G is None else float_NG * laid.scale_G,
                present_NF,
                lists.present_KN,
                register(laid.to.register),
                laid.to.column,
            )
        lengths = lengths_KR, batch.nro_lists.lengths_KN
        for stack, (members, lists_M5, weighted) in self._lists.items():
            index_L = np.concatenate([lookup.stacks[stack].index[one.name] for one in members])
            weight_L = (
                np.concatenate([_weights(sides[one.side][1], one.name) for one in members])
                if weighted
                else _NONE
            )
            interpreter.write_pooled_lists(rows[stack], index_L, weight_L, lengths, lists_M5, where_G3, x)
        for s, sequence in enumerate(tape.sequences, 1):
            if start_SR1[s, -1]:
                _write_entries(sequence, batch, lookup, rows, register(sequence.to))
        belong = interpreter.RowGroups(start_SR1[0], start_SR1[1:], batch.request_index_B)
        interpreter.run_tape(tape.ops_O, tape.weights, where_G3, belong, x)
        return register(-1)


def _numbers(lists: list[PooledList]) -> np.ndarray:
    """The `lists_M5` of `interpreter.write_pooled_lists`."""
    return np.array([(one.side == "nro", one.number, one.weighted, *one.to) for one in lists], np.int64)


def _weights(lists: Jagged, name: str) -> np.ndarray:
    """As in roostream/models/inputs.py."""
    weight_L = lists.weights_of(name)
    return np.ones(lists.total_of(name), np.float32) if weight_L is None else np.arcsinh(weight_L)


def _write_entries(
    sequence: SequenceBlock, batch: Batch, lookup: Lookup, rows: Rows, out_LW: np.ndarray
) -> None:
    """In the same order as `HistoryAttentionEncoder`."""
    lists, column = batch.ro_lists, 0
    for name, stack in sequence.stacks.items():
        key = f"{sequence.name}.{name}" if name else sequence.name
        interpreter.write_rows(rows[stack], lookup.stacks[stack].index[key], out_LW, column)
        column += rows[stack].shape[1]
    length_R = lists.lengths_KN[sequence.number]
    for name, table in sequence.times.items():
        times_L = lists.columns[f"{sequence.name}.{name}"]
        interpreter.write_time_buckets(table, length_R, batch.time_ms_R, times_L, BUCKET_MS, out_LW, column)
        column += table.shape[1]


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    x = np.zeros((1, 2), np.float32)
    none = np.zeros(1, np.int64)
    interpreter.write_floats(
        x, np.zeros((1, 1), np.bool_), np.zeros((1, 1), np.bool_), np.zeros((1, 4), np.float32), 0
    )
    lengths, registers = np.ones((1, 1), np.int32), np.array([(0, 1, 2)])
    interpreter.allocate(
        none, none, lengths[0], lengths, none, np.zeros((1, 2), np.int64), np.zeros((1, 3), np.int64)
    )
    interpreter.write_pooled_lists(
        x, none, _NONE, (lengths, lengths), np.zeros((1, 5), np.int64), registers, x.ravel()
    )
    interpreter.write_time_buckets(x, lengths[0], none, none, BUCKET_MS, x, 0)
    interpreter.write_rows(x, none, x, 0)
    one_request = interpreter.RowGroups(np.array([0, 1]), np.zeros((0, 2), np.int64), none)
    interpreter.run_tape(np.zeros((0, 11), np.int64), _NONE, np.zeros((1, 3), np.int64), one_request, _NONE)
