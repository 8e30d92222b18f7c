"""TorchRec's EmbeddingBagCollection with rows on the parameter servers, for custom models.

Importing it imports TorchRec; nothing else here does. A batch's rows come with `Inputs` and their gradients
leave the same way: the collection has no parameters and no state.

    request-only   R bags ─┐ as_kjt        values: positions in the stack's U rows
    per candidate  B bags ─┘ ───────► KJT  inverse indices: the bag of each of the B candidates
                                       │
                rows_of(inputs) ──► RemoteEmbeddingBagCollection ──► KeyedTensor [B, C]

Letters: R requests, B candidates, K keys, L entries, S bags, U unique rows of a stack, D width of a table, C
columns of all features.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec import EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor, KeyedTensor, PoolingType
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from roostream.errors import SchemaError, nearest
from roostream.models.embedding_ops import gather_rows, pool_bags
from roostream.models.inputs import Inputs
from roostream.schema.schema import Schema

_ROWS: ContextVar[Mapping[str, Tensor] | None] = ContextVar("rows of a batch", default=None)


@contextlib.contextmanager
def rows_of(inputs: Inputs) -> Iterator[None]:
    """Within this context, collections in this thread read the rows of `inputs`."""
    token = _ROWS.set(inputs.rows)
    try:
        yield
    finally:
        _ROWS.reset(token)


class _KeyedLists(NamedTuple):
    """Lists of consecutive keys."""

    keys: tuple[str, ...]
    per_request: tuple[bool, ...]
    sizes: tuple[int, ...]  # bags of each
    index_L: Tensor
    length_S: Tensor
    weight_L: Tensor | None


def as_kjt(inputs: Inputs, *, expand: bool = False) -> KeyedJaggedTensor:
    """All list features of a batch, one row per candidate.

    Values are positions in the rows of the feature's stack, never ids. Keys are the features, and
    `feature.column` for id columns with a table in request-only sequences. If any feature has weights, all
    keys do: asinh of the weights, 1 for the others.

    A request-only key has R bags (stride R), other keys B; `inverse_indices_or_none()` [K, B] gives each
    candidate's bag, so a collection pools a request's bag once. With `expand`, each request's bags are
    repeated for its candidates instead: stride B throughout, for modules that permute or split a tensor
    (TorchRec then drops inverse indices). The result is the same, at the cost of impression-level work.
    """
    index_B, num_candidates = inputs.request_index_B, len(inputs.request_index_B)
    lists = list(_lists(inputs))
    if expand:
        lists = [_expanded(one, index_B) for one in lists]
    weighted = any(one.weight_L is not None for one in lists)
    weights = [_ones(one.index_L) if one.weight_L is None else one.weight_L for one in lists]
    keys = [key for one in lists for key in one.keys]
    parts = {
        "keys": keys,
        "values": _cat([one.index_L for one in lists]),
        "lengths": _cat([one.length_S for one in lists]),
        "weights": torch.cat(weights) if weighted else None,
    }
    per_request = [is_per_request for one in lists for is_per_request in one.per_request]
    if expand or not any(per_request):
        return KeyedJaggedTensor(**parts, stride=num_candidates)
    own_B = torch.arange(num_candidates, device=index_B.device)
    bag_KB = torch.stack([index_B if is_per_request else own_B for is_per_request in per_request])
    strides = [[size] for one in lists for size in one.sizes]
    return KeyedJaggedTensor(**parts, stride_per_key_per_rank=strides, inverse_indices=(keys, bag_KB))


def _lists(inputs: Inputs) -> Iterator[_KeyedLists]:
    for bags in inputs.bags:
        yield _KeyedLists(
            bags.features, bags.per_request, bags.sizes, bags.index_L, bags.offset_S1.diff(), bags.weight_L
        )
    for feature, sequence in inputs.sequences.items():
        length_R, sizes = sequence.length_R, (len(sequence.length_R),)
        for column, index_L in sequence.column_L.items():
            yield _KeyedLists((f"{feature}.{column}",), (True,), sizes, index_L, length_R, None)


def _expanded(one: _KeyedLists, request_index_B: Tensor) -> _KeyedLists:
    """The lists with B bags for each key."""
    num_candidates = len(request_index_B)
    own_B = torch.arange(num_candidates, device=request_index_B.device)
    starts = [sum(one.sizes[:k]) for k in range(len(one.keys))]
    bags = [
        start + (request_index_B if is_per_request else own_B)
        for start, is_per_request in zip(starts, one.per_request, strict=True)
    ]
    bag_S = torch.cat(bags)
    length_S, first_S = one.length_S[bag_S], (one.length_S.cumsum(0) - one.length_S)[bag_S]
    moved_L = torch.repeat_interleave(first_S - (length_S.cumsum(0) - length_S), length_S)
    at_L = torch.arange(len(moved_L), device=moved_L.device) + moved_L
    weight_L = None if one.weight_L is None else one.weight_L[at_L]
    sizes = (num_candidates,) * len(one.keys)
    return _KeyedLists(one.keys, (False,) * len(one.keys), sizes, one.index_L[at_L], length_S, weight_L)


def _ones(index_L: Tensor) -> Tensor:
    return index_L.new_ones(len(index_L), dtype=torch.float32)


def _cat(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


@dataclasses.dataclass(kw_only=True)
class _PooledAlike:
    """Features of a stack that are pooled alike, and the place of each one's columns."""

    stack: str
    mean: bool
    features: list[str] = dataclasses.field(default_factory=list)
    slots: list[int] = dataclasses.field(default_factory=list)


class RemoteEmbeddingBagCollection(EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """Drop-in for `torchrec.EmbeddingBagCollection`, over the rows of `rows_of`.

    In a config, `name` is a table of the schema, `embedding_dim` its width, `feature_names` features of that
    table, and `pooling` SUM or MEAN. The schema defines initialization, update rule and expiry of rows;
    `num_embeddings` and `init_fn` are ignored. An empty bag is 0. Gradients of rows equal TorchRec's.
    """

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], schema: Schema, is_weighted: bool = False
    ) -> None:
        """`is_weighted`: use the weights of the KJT; requires SUM. Raises SchemaError: configs and schema
        differ."""
        super().__init__()
        self._configs = [
            dataclasses.replace(c, feature_names=list(c.feature_names) or [c.name]) for c in tables
        ]
        self._is_weighted = is_weighted
        for difference in _differences(self._configs, schema, is_weighted):
            raise SchemaError(difference)
        self._keys = [feature for c in self._configs for feature in c.feature_names]
        self._widths = [c.embedding_dim for c in self._configs for _ in c.feature_names]
        together: dict[tuple[str, bool], _PooledAlike] = {}
        slot = 0
        for c in self._configs:
            stack, mean = schema.table_by_name[c.name].stack, c.pooling is PoolingType.MEAN
            group = together.setdefault((stack, mean), _PooledAlike(stack=stack, mean=mean))
            group.features += c.feature_names
            group.slots += range(slot, slot := slot + len(c.feature_names))
        self._together = tuple(together.values())

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """[B, C], the features in the order of the configs.

        Raises:
            SchemaError: outside `rows_of`, a feature is missing, or bags do not match the rows and candidates
            of the batch.
        """
        rows = _ROWS.get()
        if rows is None:
            raise SchemaError(
                "expected the rows of a batch, got none; call the model inside `with rows_of(inputs):`"
            )
        lists = features.to_dict()
        if missing := [key for key in self._keys if key not in lists]:
            raise SchemaError(
                f"expected feature {missing[0]!r} in the KeyedJaggedTensor, got {', '.join(lists)}; use "
                "as_kjt(inputs)"
            )
        inverse = features.inverse_indices_or_none()
        bag_of = {} if inverse is None else dict(zip(*inverse, strict=True))
        columns: dict[int, Tensor] = {}
        for group in self._together:
            columns |= zip(group.slots, self._pooled(group, rows[group.stack], lists, bag_of), strict=True)
        parts = [columns[slot] for slot in range(len(self._keys))]
        if len({len(part) for part in parts}) > 1:
            heights = ", ".join(f"{len(part)} of {key}" for key, part in zip(self._keys, parts, strict=True))
            raise SchemaError(
                f"expected as many bags of each feature, got {heights}: inverse indices were dropped; "
                "use as_kjt(inputs, expand=True)"
            )
        return KeyedTensor(
            keys=list(self._keys), length_per_key=list(self._widths), values=torch.cat(parts, dim=1)
        )

    def _pooled(
        self,
        group: _PooledAlike,
        rows_UD: Tensor,
        lists: Mapping[str, JaggedTensor],
        bag_of: Mapping[str, Tensor],
    ) -> Sequence[Tensor]:
        """[B, D] of each feature; all are pooled at once."""
        jagged = [lists[feature] for feature in group.features]
        index_L = torch.cat([j.values() for j in jagged])
        length_S = torch.cat([j.lengths() for j in jagged])
        offset_S1 = F.pad(length_S.cumsum(0), (1, 0))
        weight_L = None if group.mean else _ones(index_L)
        if self._is_weighted:
            weight_L = torch.cat([j.weights() for j in jagged])
        x_SD = _pool(rows_UD, index_L, offset_S1, weight_L)
        sizes = [len(j.lengths()) for j in jagged]
        if not bag_of:
            return torch.split(x_SD, sizes)
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        at_BK = torch.stack(
            [start + bag_of[f] for start, f in zip(starts, group.features, strict=True)], dim=1
        )
        width = rows_UD.shape[1]
        x_BC = gather_rows([(x_SD, at_BK.ravel())]).view(len(at_BK), len(sizes) * width)
        return torch.split(x_BC, width, dim=1)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Device of the current rows; CPU outside `rows_of`."""
        return next((rows_UD.device for rows_UD in (_ROWS.get() or {}).values()), torch.device("cpu"))


def _pool(rows_UD: Tensor, index_L: Tensor, offset_S1: Tensor, weight_L: Tensor | None) -> Tensor:
    if (
        index_L.device.type == "cpu"
        and len(index_L)
        and not 0 <= int(index_L.min()) <= int(index_L.max()) < len(rows_UD)
    ):
        raise SchemaError(
            f"expected positions in {len(rows_UD)} rows, got {int(index_L.min())} to {int(index_L.max())}; "
            "values are positions that as_kjt(inputs) gives, not ids"
        )
    # Weights that are learned, by TorchRec's feature processors.
    if weight_L is not None and weight_L.requires_grad:
        return F.embedding_bag(
            index_L, rows_UD, offset_S1, mode="sum", per_sample_weights=weight_L, include_last_offset=True
        )
    return pool_bags(rows_UD, index_L, offset_S1, weight_L)


def _differences(configs: Sequence[EmbeddingBagConfig], schema: Schema, is_weighted: bool) -> Iterator[str]:
    """Sentences on what differs between configs and schema."""
    if not configs:
        yield "expected an EmbeddingBagConfig or more, got none; give one a table"
    table_of, names = tables_of_features(schema), [c.name for c in configs]
    poolings = [PoolingType.SUM] if is_weighted else [PoolingType.SUM, PoolingType.MEAN]
    seen: dict[str, str] = {}
    for c in configs:
        what, table = f"EmbeddingBagConfig {c.name!r}", schema.table_by_name.get(c.name)
        if table is None:
            near = nearest(c.name, schema.table_by_name)
            yield f"{what}: expected a table of the schema as its name, got none such{near}"
        elif c.embedding_dim != table.dim:
            yield f"{what}: expected embedding_dim = {table.dim}, got {c.embedding_dim}; change one of them"
        if names.count(c.name) > 1:
            yield f"{what}: expected one config a table, got more; put their features into one"
        if c.pooling not in poolings:
            expected = "SUM, as weights need it" if is_weighted else "SUM or MEAN"
            yield f"{what}: expected pooling {expected}, got {c.pooling}; change it"
        if c.data_type is not DataType.FP32:
            yield f"{what}: expected data_type FP32, as rows are, got {c.data_type}; leave it out"
        for feature in c.feature_names:
            where, near = f"{what}: feature {feature!r}", nearest(feature, table_of)
            if feature in seen:
                yield f"{where}: expected it in one config, got it in {seen[feature]!r} too; remove one"
            elif feature not in table_of:
                yield f"{where}: expected a list feature of the schema, got none such{near}"
            elif table_of[feature] != c.name:
                yield f"{where}: expected it in config {table_of[feature]!r}, its table; change one of them"
            seen[feature] = c.name


def tables_of_features(schema: Schema) -> dict[str, str]:
    """Key of `as_kjt` → table."""
    found = {f.name: f.table for f in (*schema.lists("ro"), *schema.lists("nro"))}
    for f in schema.lists("ro"):
        found |= {f"{f.name}.{column}": table for column, table in f.column_tables.items()}
    return found
