"""The input of all models, in training and serving: a batch, its embedding rows, and its lookup (which says
which row each id of the batch has) as tensors.

Letters: R requests, B candidates, G floats after transforms, P presence bits, U unique rows of a stack, D
width of a stack, L entries, V shared entries, S bags (one per feature and row), N longest sequence in the
batch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roostream.models.candidate_groups import CandidateGroups, build_groups
from roostream.schema.counter_plan import declared
from roostream.schema.schema import Feature, Schema
from roostream.wire.batch import Batch
from roostream.wire.block import Side
from roostream.wire.dedup import Inverse, PartialDedup
from roostream.wire.jagged import Jagged
from roostream.wire.lookup import Lookup
from roostream.wire.transform import apply_transforms, output_names

# The gaps in whole ms at which bucket ⌊ln(seconds) / 0.301⌋ (HSTU) increases. Comparing integers makes the
# bucket exact. The last one is within int64.
BUCKET_MS = np.ceil(np.exp(0.301 * np.arange(1, 123)) * 1000).astype(np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Bags:
    """The features of a stack that have the same pooling. They are pooled in one call, `embedding_bag`."""

    stack: str
    features: tuple[str, ...]
    sizes: tuple[int, ...]  # bags of each feature: R or B
    per_request: tuple[bool, ...]  # of each feature: it has R bags, not B
    index_L: Tensor  # int64, positions in the stack's rows
    offset_S1: Tensor  # int64
    weight_L: Tensor | None  # None = mean; otherwise asinh of the weights, for the weighted sum


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Padding:
    """How the entries of a sequence are padded to a matrix [R, N]."""

    shape_RN: tuple[int, int]
    entry_RN: Tensor | None  # int64 [R · N], of L; padding is any entry; None = the entries in their order
    mask_RN: Tensor | None  # bool, True = an entry; None = no padding


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SharedEntries:
    """Entries of a sequence that several requests share, once each (roostream/wire/dedup.py).

    What depends on an entry alone, without its time, is computed once for each shared entry; `at_L` maps it
    to the entries of each request.
    """

    index_V: Tensor  # int64, positions in the stack's rows
    column_V: dict[str, Tensor]
    at_L: Tensor  # int64: the shared entry of each entry


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class UniqueRequests:
    """Distinct requests: equal in all request-only features except times. What depends on these is computed
    once (RecD §5)."""

    first_U: Tensor  # int64: the first request of each distinct one
    index_B: Tensor  # int64: each candidate's distinct request; not sorted


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sequence:
    """A request-only sequence, jagged: entries of all requests one after the other.

        length_R = [2, 0, 3]    offset_R1 = [0, 2, 2, 5]    index_L = [a, b, c, d, e]

    `pad` makes it a matrix of the requests that have a candidate, in the order of
    `CandidateGroups.request_order`; N is the longest of them. The padding is computed on first use, or before
    the tensors are copied to a device.
    """

    length_R: Tensor  # int64
    offset_R1: Tensor  # int64
    index_L: Tensor  # int64, positions in the stack's rows
    column_L: dict[str, Tensor]  # id column with a table → int64 positions in its stack's rows
    bucket_L: dict[str, Tensor]  # time column → int64 bucket of the time since the entry
    host_length_R: np.ndarray  # `length_R`, readable without waiting for the device
    gap_ms_L: dict[str, np.ndarray]  # time column → int64 time from the entry to its request
    groups: CandidateGroups
    padding: Padding | None = None  # None: computed on first use
    shared_entries: SharedEntries | None = None  # None: nothing is shared, or it was not checked

    def pad(self, x_L: Tensor) -> Tensor:
        """[L, ...] → [R · N, ...]; padding has arbitrary values and must be masked."""
        entry_RN = self._padding.entry_RN
        return x_L if entry_RN is None else x_L.index_select(0, entry_RN)

    @property
    def shape_RN(self) -> tuple[int, int]:
        """Shape after padding; known without synchronizing with the device."""
        return self._padding.shape_RN

    @property
    def mask_RN(self) -> Tensor | None:
        """bool, True = an entry; None = no padding."""
        return self._padding.mask_RN

    def with_padding(self, groups: CandidateGroups) -> Sequence:
        """A copy with its padding computed. `groups`: the same groups, with their slots computed."""
        return dataclasses.replace(self, groups=groups, padding=self._padding)

    @functools.cached_property
    def _padding(self) -> Padding:
        return self.padding or _build_padding(self.host_length_R, self.groups.request_order)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What a model gets; see `build_inputs`.

    After `backward`, `rows[stack].grad` [U, D] are the gradients to push, one per unique row. None: the model
    does not use the stack.

    Floats (after the schema's transforms) and weights are given as asinh: almost linear for small numbers,
    logarithmic for large ones, so raw counts, ages or prices cannot overflow a layer.
    """

    ro_float_RG: Tensor
    ro_present_RP: Tensor  # bool: declared floats, then lists
    nro_float_BG: Tensor
    nro_present_BP: Tensor
    request_index_B: Tensor
    item_B: Tensor  # int64 ids
    num_candidates_R: np.ndarray  # int32
    rows: dict[str, Tensor]  # stack → embedding rows [U, D], leaves of autograd
    bags: tuple[Bags, ...]
    sequences: dict[str, Sequence]
    groups: CandidateGroups
    unique: UniqueRequests | None = None  # None: requests differ, or it was not checked

    def once(self, x_RD: Tensor) -> Tensor:
        """[R, D] → [U, D]: one row per distinct request. Map results back with `shared_index_B`."""
        return x_RD if self.unique is None else x_RD.index_select(0, self.unique.first_U)

    @property
    def shared_index_B(self) -> Tensor:
        """int64: each candidate's row in what was computed from `once`."""
        return self.request_index_B if self.unique is None else self.unique.index_B


INPUT_NAMES = "inputs.names"
"""Name of the tensor of a commit that holds `input_names` as JSON, in bytes; older commits have none."""


def input_names(schema: Schema) -> dict[str, list[str]]:
    """What a model reads, in order: floats after transforms and lists with their widths, by name, and what
    their values depend on. Two schemas with equal names, also of one fingerprint, give a model's weights the
    same meaning."""
    dims = {name: table.dim for name, table in schema.table_by_name.items()}

    def name_of(f: Feature) -> str:
        tables = {f.table: dims[f.table], **{t: dims[t] for t in f.column_tables.values()}}
        return f"{f.name} {f.kind} {tables}"

    sides: tuple[Side, Side] = ("ro", "nro")
    floats = {f"{side} floats": list(output_names(schema, side)) for side in sides}
    lists = {f"{side} lists": [name_of(f) for f in schema.lists(side)] for side in sides}
    return floats | lists | {"settings of features": _settings(schema)}


def _settings(schema: Schema) -> list[str]:
    """Settings outside of the fingerprint by which the same sample gives a model other numbers."""
    counters, out = declared(schema), list[str]()
    for f in (*schema.ro, *schema.nro):
        out.append(f"{f.name} {f.default} {f.max_len} {[*f.column_tables]} {f.online}")
        if counter := counters.get(f.online):
            event = counter.event or schema.online.click
            out[-1] += f" {counter.aggregation} {event} {counter.half_life_ms} {counter.window_ms}"
    for t in schema.transforms:
        settings = {"clip": (t.low, t.high), "standardize": (t.mean, t.std)}.get(t.op, ())
        out.append(f"{t.output} = {t.op} {t.input} {settings}")
    return out


def input_names_tensor(schema: Schema) -> np.ndarray:
    """`input_names` as the tensor INPUT_NAMES."""
    return np.frombuffer(json.dumps(input_names(schema)).encode(), dtype=np.uint8)


def changed_inputs(tensors: Mapping[str, np.ndarray], schema: Schema) -> set[str] | None:
    """Which groups of `input_names` differ from those of a commit; None if an older commit does not tell. A
    group that an older commit lacks counts as equal."""
    if INPUT_NAMES not in tensors:
        return None
    before, now = json.loads(tensors[INPUT_NAMES].tobytes()), input_names(schema)
    return {group for group, names in now.items() if before.get(group, names) != names}


def build_inputs(
    batch: Batch,
    lookup: Lookup,
    rows: Mapping[str, np.ndarray | Tensor],
    device: str | None = "cpu",
    *,
    train: bool = False,
    floats: tuple[np.ndarray, np.ndarray] | None = None,
) -> Inputs:
    """Build the inputs, without copies if the device is the CPU; with `train=True` the rows require
    gradients.

    `rows`: stack → float32 [U, D], in the order of `lookup`; numpy arrays, or tensors on any device, which
    are not written to. `device`: None = rows stay where they are, everything else is on the host. `floats`:
    those of requests and of candidates after the schema's transforms, if they were transformed before.

    If the lookup has found equal requests, they are computed once; results differ only by the order of sums.
    """
    schema = batch.schema
    ro_float_RG, nro_float_BG = apply_transforms(batch, lookup.unique) if floats is None else floats
    groups = build_groups(batch.num_candidates_R)
    inputs = Inputs(
        ro_float_RG=_wrap(np.arcsinh(ro_float_RG)),
        ro_present_RP=_wrap(np.concatenate([batch.ro_present_RF, batch.ro_lists.present_KN.T], axis=1)),
        nro_float_BG=_wrap(np.arcsinh(nro_float_BG)),
        nro_present_BP=_wrap(np.concatenate([batch.nro_present_BF, batch.nro_lists.present_KN.T], axis=1)),
        request_index_B=_wrap(batch.request_index_B),
        item_B=_wrap(batch.item_B),
        num_candidates_R=batch.num_candidates_R,
        rows={stack: _leaf(rows_UD).requires_grad_(train) for stack, rows_UD in rows.items()},
        bags=_build_bags(batch, lookup),
        sequences={
            f.name: _build_sequence(f, batch, lookup, groups)
            for f in schema.lists("ro")
            if f.kind == "sequence"
        },
        groups=groups,
        unique=None if lookup.unique is None else _build_unique(lookup.unique, batch),
    )
    if device == "cpu" and all(rows_UD.device.type == "cpu" for rows_UD in inputs.rows.values()):
        return inputs
    # Compute the padding on the host, so that it is part of the one copy to the device.
    groups = inputs.groups.with_slots()
    sequences = {name: sequence.with_padding(groups) for name, sequence in inputs.sequences.items()}
    inputs = dataclasses.replace(inputs, groups=groups, sequences=sequences)
    return inputs if device is None else change_tensors(inputs, lambda x: x.to(device))


def change_tensors(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Apply `change` to every tensor, once each, in a fixed order. Rows stay leaves. Host arrays stay
    unchanged, and padding that is not computed yet is not computed here."""
    done: dict[int, Tensor] = {}

    def once(x: Tensor) -> Tensor:
        if id(x) not in done:
            done[id(x)] = change(x.detach()).requires_grad_(x.requires_grad)
        return done[id(x)]

    changed: Inputs = _changed(inputs, once)
    return changed


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_changed(each, change) for each in value)
    if isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _changed(getattr(value, f.name), change) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def _leaf(rows_UD: np.ndarray | Tensor) -> Tensor:
    return rows_UD.detach() if isinstance(rows_UD, Tensor) else _wrap(rows_UD)


def _wrap(array: np.ndarray) -> Tensor:
    """A read-only array is copied, because torch tensors are writable."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _build_bags(batch: Batch, lookup: Lookup) -> tuple[Bags, ...]:
    """One entry for each stack and way of pooling, in declared order."""
    groups: dict[tuple[str, bool], list[tuple[Feature, Jagged, bool]]] = {}
    schema, ro = batch.schema, batch.ro_lists
    for features, jagged in ((schema.lists("ro"), ro), (schema.lists("nro"), batch.nro_lists)):
        for f in features:
            stack = schema.table_by_name[f.table].stack
            groups.setdefault((stack, f.kind == "weighted_ids"), []).append((f, jagged, jagged is ro))
    return tuple(_bags(stack, weighted, members, lookup) for (stack, weighted), members in groups.items())


def _bags(stack: str, weighted: bool, members: list[tuple[Feature, Jagged, bool]], lookup: Lookup) -> Bags:
    """Bags of the features, in the order of `members`."""
    lengths_S = np.concatenate([jagged.lengths_KN[jagged.index(f.name)] for f, jagged, _ in members])
    offset_S1 = np.zeros(len(lengths_S) + 1, dtype=np.int64)
    np.cumsum(lengths_S, out=offset_S1[1:])
    index_L = np.concatenate([lookup.stacks[stack].index[f.name] for f, *_ in members])
    weight_L = np.concatenate([_weights(jagged, f.name) for f, jagged, _ in members]) if weighted else None
    return Bags(
        stack=stack,
        features=tuple(f.name for f, *_ in members),
        sizes=tuple(jagged.num_rows for _, jagged, _ in members),
        per_request=tuple(per_request for *_, per_request in members),
        index_L=_wrap(index_L),
        offset_S1=_wrap(offset_S1),
        weight_L=None if weight_L is None else _wrap(np.arcsinh(weight_L)),
    )


def _weights(jagged: Jagged, name: str) -> np.ndarray:
    weight_L = jagged.weights_of(name)
    return np.ones(jagged.total_of(name), dtype=np.float32) if weight_L is None else weight_L


def _build_sequence(f: Feature, batch: Batch, lookup: Lookup, groups: CandidateGroups) -> Sequence:
    """Wraps the batch's arrays; only lengths and buckets are copied."""
    schema = batch.schema

    def index_of(table: str, key: str) -> Tensor:
        return _wrap(lookup.stacks[schema.table_by_name[table].stack].index[key])

    length_R = batch.ro_lists.lengths_KN[batch.ro_lists.index(f.name)].astype(np.int64)
    offset_R1 = np.concatenate([[0], np.cumsum(length_R)])
    request_ms_L = np.repeat(batch.time_ms_R, length_R)
    dedup = lookup.shared.get(f.name)
    gap_ms = {c: request_ms_L - batch.ro_lists.columns[f"{f.name}.{c}"] for c in f.time_columns}
    return Sequence(
        length_R=_wrap(length_R),
        offset_R1=_wrap(offset_R1),
        index_L=index_of(f.table, f.name),
        column_L={c: index_of(table, f"{f.name}.{c}") for c, table in f.column_tables.items()},
        bucket_L={c: _wrap(time_buckets(gap_ms_L)) for c, gap_ms_L in gap_ms.items()},
        host_length_R=length_R,
        gap_ms_L=gap_ms,
        groups=groups,
        shared_entries=None if dedup is None else _build_shared_entries(f, dedup, index_of),
    )


def _build_shared_entries(
    f: Feature, dedup: PartialDedup, index_of: Callable[[str, str], Tensor]
) -> SharedEntries:
    entry_V = _wrap(dedup.entry_V)
    return SharedEntries(
        index_V=index_of(f.table, f.name)[entry_V],
        column_V={c: index_of(table, f"{f.name}.{c}")[entry_V] for c, table in f.column_tables.items()},
        at_L=_wrap(dedup.at_L),
    )


def _build_unique(inverse: Inverse, batch: Batch) -> UniqueRequests:
    return UniqueRequests(first_U=_wrap(inverse.first_U), index_B=_wrap(inverse.row_N[batch.request_index_B]))


def _build_padding(length_R: np.ndarray, order: np.ndarray) -> Padding:
    """Padding of the requests `order`, which are those with a candidate."""
    start_R = np.cumsum(length_R) - length_R
    column_N = np.arange(length_R[order].max(initial=0), dtype=np.int64)
    mask_RN = column_N < length_R[order, None]
    entry_RN = np.where(mask_RN, start_R[order, None] + column_N, 0)
    is_dense = mask_RN.all() and mask_RN.size == length_R.sum() and (np.diff(order) > 0).all()
    return Padding(
        shape_RN=(mask_RN.shape[0], mask_RN.shape[1]),
        entry_RN=None if is_dense else _wrap(entry_RN.ravel()),
        mask_RN=None if mask_RN.all() else _wrap(mask_RN),
    )


def time_buckets(gap_ms_L: np.ndarray) -> np.ndarray:
    """⌊ln(max(|Δt|, 1 s)) / 0.301⌋ (HSTU, Zhai et al. 2024), int64 ms → int64 in 0..122; exact, by
    comparison."""
    return np.searchsorted(BUCKET_MS, np.abs(gap_ms_L), side="right").astype(np.int64)
