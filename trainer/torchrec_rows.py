"""Rows held by the workers as TorchRec's `ShardedEmbeddingCollection` under `DistributedModelParallel`.

    pull   ids ─► slots (SlotIndex, equal at every worker) ─► forward: TorchRec's all-to-all ─► rows
    push   gradients ─► backward: TorchRec's all-to-all ─► sums per row, clipped ─► FBGEMM's fused optimizer
    save   rows changed since the last commit ─► shards (trainer/row_home.py), which write the commit
    first pull after a restore: rows of the shards ─► the collection

All of these are collective: every worker calls them in the same order, also without keys. A key crosses the
network once a step and worker, however many requests and candidates name it. Imported only where TorchRec is
installed (`roostream[torchrec]`).

Letters: U keys of a lookup, M keys of one table or exchange, N numbered keys, D width, A state width,
F = D + A numbers of a row with its state, K tables, W workers.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, ShardingEnv, collective_utils, comm_ops
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad

from param_server.embedding_table import KeyIndex, Keys, grown, join_keys, no_keys
from param_server.initial_rows import initial_rows
from param_server.placement.plan import CostModel, PlannedTable, imbalance, loads, round_robin
from param_server.placement.profiles import impression_bytes, planned_tables, read_profiles
from param_server.row_block import RowBlock
from param_server.rules import MAX_GRADIENT
from roostream.errors import ConfigError, RoostreamError, SchemaError, UnavailableError, reason_of
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.schema.ids import buckets_of
from roostream.schema.schema import Schema, Table
from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup
from trainer.process_group import GROUP_ERRORS, is_out_of_memory
from trainer.row_home import RowHome
from trainer.rows import PushTimes
from trainer.torchrec_plan import (
    TablePlacement,
    module_plan,
    pieces_of,
    placements,
    planned_by_torchrec,
    sharding_plan,
    states_of,
    weights_of,
)

log = logging.getLogger("roostream.worker")

T = TypeVar("T")
PlacementOf: TypeAlias = Callable[[int], Mapping[str, TablePlacement]]
"""Number of workers → table → placement."""

_FIRST_BLOCK = 1 << 10  # slots of a table at first, of each worker if its rows are spread
_LANES = 4  # FBGEMM's rows are a multiple of so many numbers wide
_FEW_VALUES = 1 << 9  # of a worker that the first message of an exchange of keys has room for
_UNCHANGED = np.iinfo(np.int64).min
SLICE_BYTES = 32 << 20
"""Rows with their states that move between workers and shards at once, in bytes."""


class RowPeers(Protocol):
    """The workers of one incarnation: `trainer.process_group.RowGroup`."""

    index: int

    def connect(self) -> Any:
        """The `torch.distributed.ProcessGroup`; the first call waits for all. Raises UnavailableError."""


class SlotIndex:
    """Which slot of its table each key has. Exact: no two keys share a slot, and no key loses its slot.

    Every worker has a copy, and equal calls in equal order give equal slots. A slot is a part and a place in
    it: for rows that are spread, a part is a worker's block of the table, and a key's part is the owner of
    its bucket. Tables grow by doubling their parts, so no row changes its worker or place.
    """

    def __init__(self, tables: Sequence[Table], num_parts_K: Sequence[int], owners: BucketMap) -> None:
        self.owner_B = np.asarray(owners.owner_B, np.int64)
        order = sorted(range(len(tables)), key=lambda k: tables[k].id)
        self._ids, self._which = np.array([tables[k].id for k in order], np.uint32), np.array(order)
        self.num_parts_K = np.array(num_parts_K, np.int64)
        self.block_K = np.full(len(tables), _FIRST_BLOCK, np.int64)
        self.keys = KeyIndex(len(self.owner_B))
        self.home_N = self.which_N = self.place_N = self.part_N = np.zeros(0, np.int64)
        self._used = [[0] * parts for parts in num_parts_K]
        self._free: list[list[list[int]]] = [[[] for _ in range(parts)] for parts in num_parts_K]

    def tables_of(self, keys: Keys) -> np.ndarray:
        """int64 [M]: number of each key's table."""
        return self._which[np.searchsorted(self._ids, keys.table_U)]

    def add(self, keys: Keys) -> np.ndarray:
        """int64 [M]: the numbers of the keys that were absent; each has a slot now."""
        self.keys.reserve(len(keys))
        number_M, new_M = self.keys.add(keys)
        number_M, keys = number_M[new_M], keys.take(new_M)
        if len(self.home_N) < self.keys.capacity:
            for name in ("home_N", "which_N", "place_N", "part_N"):
                setattr(self, name, grown(getattr(self, name), self.keys.capacity))
        home_M = self.owner_B[buckets_of(keys.id_U, keys.table_U, len(self.owner_B))]
        which_M = self.tables_of(keys)
        part_M = np.where(self.num_parts_K[which_M] > 1, home_M, 0)
        self.home_N[number_M], self.which_N[number_M], self.part_N[number_M] = home_M, which_M, part_M
        for k, part in {*zip(which_M.tolist(), part_M.tolist(), strict=True)}:
            here_M = np.flatnonzero((which_M == k) & (part_M == part))
            self.place_N[number_M[here_M]] = self._take(k, part, len(here_M))
            while self._used[k][part] > self.block_K[k]:
                self.block_K[k] *= 2
        return number_M

    def remove(self, keys: Keys) -> None:
        """Free the slots of the keys that are present."""
        number_M = self.keys.find(keys)
        for number in number_M[number_M >= 0].tolist():
            self._free[self.which_N[number]][self.part_N[number]].append(int(self.place_N[number]))
        self.keys.remove(keys)

    def slots(self, number_M: np.ndarray) -> np.ndarray:
        """int64 [M]: row of its table that each numbered key has now; it changes when the table grows."""
        return self.part_N[number_M] * self.block_K[self.which_N[number_M]] + self.place_N[number_M]

    def rows(self, k: int) -> int:
        """Rows of table `k`, used or not."""
        return int(self.num_parts_K[k] * self.block_K[k])

    def _take(self, k: int, part: int, count: int) -> np.ndarray:
        free = self._free[k][part]
        again = [free.pop() for _ in range(min(count, len(free)))]
        first = self._used[k][part]
        self._used[k][part] += count - len(again)
        return np.array([*again, *range(first, self._used[k][part])], np.int64)


class Piece(NamedTuple):
    """A worker's part of a table: some rows, some columns."""

    k: int  # number of the table
    worker: int
    rows: tuple[int, int]  # first row and end
    columns: np.ndarray  # int64: which of the F numbers of a row and its state

    def positions(self, slot_M: np.ndarray) -> np.ndarray:
        """int64: which of these slots are in the piece."""
        return np.flatnonzero((slot_M >= self.rows[0]) & (slot_M < self.rows[1]))


class LocalPiece:
    """The tensors of one of this worker's pieces: rows [N, d] and the state that belongs to them."""

    def __init__(self, piece: Piece, rows_ND: Tensor, state_NA: Tensor, rule: str) -> None:
        self.piece, self.rows_ND, self.state_NA, self.rule = piece, rows_ND, state_NA, rule

    def get(self, slot_M: np.ndarray) -> np.ndarray:
        """Rows and state at these slots (int64) of the table, float32 [M, columns]."""
        at_M = torch.from_numpy(slot_M - self.piece.rows[0]).to(self.rows_ND.device)
        return torch.cat([self.rows_ND[at_M], self.state_NA[at_M]], dim=1).cpu().numpy()

    def put(self, slot_M: np.ndarray, values_MF: np.ndarray) -> None:
        """Set rows and state from float32 [M, columns]."""
        at_M = torch.from_numpy(slot_M - self.piece.rows[0]).to(self.rows_ND.device)
        values = torch.from_numpy(values_MF).to(self.rows_ND.device)
        width = self.rows_ND.shape[1]
        self.rows_ND[at_M], self.state_NA[at_M] = values[:, :width], values[:, width:]

    def copy_from(self, smaller: LocalPiece) -> None:
        """Take over the rows of the same piece before its table grew."""
        count = len(smaller.rows_ND)
        self.rows_ND[:count], self.state_NA[:count] = smaller.rows_ND, smaller.state_NA

    def adam(self, at_U: Tensor, gradient_UD: Tensor, table: Table) -> None:
        """The kernel `param_server.rules.adam` in torch, for distinct rows. State: m [d], v [d], t."""
        rate, beta1, beta2, epsilon = table.rule.parameters
        width = gradient_UD.shape[1]
        state_UA = self.state_NA[at_U]
        m_UD, v_UD, t_U1 = torch.split(state_UA, [width, width, 1], dim=1)
        t_U1 = t_U1 + 1
        m_UD = beta1 * m_UD + (1 - beta1) * gradient_UD
        v_UD = beta2 * v_UD + (1 - beta2) * gradient_UD * gradient_UD
        step_U1 = (rate / (1 - beta1 ** t_U1.double())).float()
        root_U1 = torch.sqrt(1 - beta2 ** t_U1.double()).float()
        self.state_NA[at_U] = torch.cat([m_UD, v_UD, t_U1], dim=1)
        self.rows_ND[at_U] -= step_U1 * m_UD / (v_UD.sqrt() / root_U1 + epsilon)


class _RowsModel(nn.Module):
    """The model that `DistributedModelParallel` shards: a collection for each width, as TorchRec wants it."""

    def __init__(self, collections: Mapping[str, EmbeddingCollection]) -> None:
        super().__init__()
        self.collections = nn.ModuleDict(collections)

    def forward(self, features: Mapping[str, KeyedJaggedTensor]) -> dict[str, Any]:
        """Table → its rows, as a JaggedTensor."""
        pending = [self.collections[name](lists) for name, lists in features.items()]
        return {table: rows for found in pending for table, rows in found.items()}


def _tables_by_width(schema: Schema) -> dict[str, list[Table]]:
    """Name of a collection → its tables."""
    out: dict[str, list[Table]] = {}
    for table in schema.tables:
        out.setdefault(f"d{table.dim}", []).append(table)
    return out


class _Pull(NamedTuple):
    """The last pull, whose backward pass is the next push."""

    lookup: Lookup
    number_U: dict[str, np.ndarray]  # stack → the keys' numbers
    parts: list[tuple[str, Tensor, Tensor]]  # stack, positions in it, and rows [M, D] of each table


class TorchRecRows:
    """`Rows` of workers that hold them in a TorchRec collection. `home` keeps what is committed.

    `bytes_W`: int64, bytes of ids, rows and gradients that each worker, as an owner, has exchanged with this
    one in this incarnation. `sent_bytes`: of all incarnations, what crossed to other workers.
    `impression_bytes`: what the same batches would have sent as expanded impressions.

    Pulls and pushes alternate; several workers pull and push together. **If one fails**, every further call
    raises UnavailableError until `set_incarnation`.
    """

    def __init__(
        self,
        schema: Schema,
        home: RowHome,
        placement_of: PlacementOf = lambda workers: {},
        device: str = "cpu",
        on_progress: Callable[[], None] = lambda: None,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        """`placement_of`: worker 0 calls it once in each incarnation and sends the others what it returns, so
        all place the tables alike. A table without a placement is spread by rows. `on_progress` is called
        after each slice of the rows that is loaded or saved, of about `slice_bytes`, because all of them
        take minutes if there are many.

        Raises:
            SchemaError: a table's width is no multiple of 4.
        """
        self.schema, self.home, self.device = schema, home, torch.device(device)
        self._by_width = _tables_by_width(schema)
        self.tables = [table for tables in self._by_width.values() for table in tables]
        self._placement_of, self._on_progress = placement_of, on_progress
        record_bytes = max(4 * (table.dim + table.rule.state_width(table.dim)) for table in self.tables)
        self._slice_rows = max(slice_bytes // record_bytes, 1)
        self.placement: dict[str, TablePlacement] = {}
        check_tables(schema, {})
        self._group: RowPeers | None = None
        self._broken = "not restored yet"
        self.workers, self.index, self.bytes_W = 1, 0, np.zeros(1, np.int64)
        self.sent_bytes = self.impression_bytes = 0
        self._collection: DistributedModelParallel | None = None
        self._clip = 0.0
        self._last: _Pull | None = None
        self._after_backward: list[tuple[LocalPiece, Tensor, Tensor, Table]] = []  # Adam's rows and gradients

    def note_batch(self, batch: Batch) -> None:
        """Count what the batch would have exchanged with all ids at every impression: of rows that are spread
        evenly, a share of (W - 1) / W crosses."""
        self.impression_bytes += impression_bytes(batch) * (self.workers - 1) // self.workers

    def meet(self, group: RowPeers) -> None:
        """Set the workers of the next incarnation; `set_incarnation` follows."""
        self._broken = "a new group of workers forms"
        self._collection = self._last = None
        self._group = group

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        """The shards were restored; the next pull loads their rows into a new collection."""
        assert self._group is not None, "meet comes first"
        self.workers, self.index = workers, self._group.index
        self._owners = self.home.set_incarnation(incarnation, self.index, workers, owners)
        self.bytes_W = np.zeros(workers, np.int64)
        self._stamp_ms_N = np.zeros(0, np.int64)  # of pushes since the last save
        self._saved_N = np.zeros(0, np.bool_)  # keys whose row this worker's shard has
        self._may_have_expired = False
        self._pieces: list[Piece] = []
        self._num_rows: list[int] = []
        self._local: dict[tuple[int, tuple[int, int]], LocalPiece] = {}  # by table, first row and column
        self._collection, self._last, self._broken = None, None, ""

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        return self._collective(lambda: self._pulled(lookup))

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        self._collective(lambda: self._pushed(lookup, gradients, times))

    def save(self) -> None:
        """Give the shards every row that was pushed since the last call. A commit is cut here. Collective."""
        self._collective(self._save)

    def _collective(self, run: Callable[[], T]) -> T:
        """Do one step that all workers take together. After an error every further step is refused, because
        the workers may no longer agree, until `set_incarnation`."""
        if self._broken:
            raise UnavailableError(f"rows in workers: {self._broken}; waiting to be restored")
        try:
            return run()
        except RoostreamError as error:
            self._broken = str(error)
            raise
        except GROUP_ERRORS as error:
            if is_out_of_memory(error):
                raise  # no restore helps
            self._collection = self._last = None
            self._broken = f"the exchange of rows failed: {str(error).partition(chr(10))[0]:.200}"
            raise UnavailableError(self._broken) from None

    # Pull and push

    def _pulled(self, lookup: Lookup) -> dict[str, Tensor]:
        if self._collection is None:
            self._load()
        elif self._may_have_expired:
            self._drop_expired()
        number_U = self._numbered(lookup)
        self._last = self._forward(lookup, number_U)
        out = {
            name: torch.empty(len(stack.id_U), self.schema.stacks[name][0].dim, device=self.device)
            for name, stack in lookup.stacks.items()
        }
        for stack, at_M, rows_MD in self._last.parts:
            out[stack].index_copy_(0, at_M, rows_MD.detach())
        return out

    def _numbered(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Stack → each key's number. Keys that no worker had get a slot and an initial row, everywhere."""
        found = {name: Keys(stack.table_U, stack.id_U) for name, stack in lookup.stacks.items()}
        absent = join_keys(*(keys.take(self._slots.keys.find(keys) < 0) for keys in found.values()))
        new = self._slots.add(join_keys(*self._gather_keys(absent)))
        if len(new):
            self._fit()
            self._fill(new)
        return {name: self._slots.keys.find(keys) for name, keys in found.items()}

    def _forward(self, lookup: Lookup, number_U: dict[str, np.ndarray]) -> _Pull:
        assert self._collection is not None
        parts, features = [], {}
        for collection, tables in self._by_width.items():
            slots = []
            for table in tables:
                at_M = np.flatnonzero(lookup.stacks[table.stack].table_U == table.id)
                number_M = number_U[table.stack][at_M]
                parts.append((table.stack, torch.from_numpy(at_M).to(self.device)))
                slots.append(self._slots.slots(number_M))
                self._count_bytes(table, number_M)
            features[collection] = KeyedJaggedTensor(
                keys=[table.name for table in tables],
                values=torch.from_numpy(np.concatenate(slots)).to(self.device),
                lengths=torch.tensor([len(slot_M) for slot_M in slots], device=self.device),
            )
        rows = self._collection(features)
        return _Pull(
            lookup,
            number_U,
            [
                (stack, at_M, rows[table.name].values())
                for table, (stack, at_M) in zip(self.tables, parts, strict=True)
            ],
        )

    def _count_bytes(self, table: Table, number_M: np.ndarray) -> None:
        """8 bytes for an id, 4 for a number of a row or of its gradient."""
        bytes_W = np.zeros(self.workers, np.int64)
        if self.placement[table.name].kind == "row_wise":
            rows_W = np.bincount(self._slots.home_N[number_M], minlength=self.workers)
            bytes_W += rows_W * (8 + 8 * table.dim)
        else:
            for piece in self._pieces:
                if self.tables[piece.k] is not table:
                    continue
                width = int((piece.columns < table.dim).sum())
                bytes_W[piece.worker] += len(number_M) * (8 + 8 * width)
        self.bytes_W += bytes_W
        self.sent_bytes += int(bytes_W.sum() - bytes_W[self.index])

    def _pushed(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        last, self._last = self._last, None
        is_empty = not any(len(stack.id_U) for stack in lookup.stacks.values())
        if last is None or (last.lookup is not lookup and not is_empty):
            if self.workers > 1:
                raise RoostreamError(
                    "expected a push of the rows of the last pull; workers would wait for each other"
                )
            last = self._forward(lookup, self._numbered(lookup))
        # NaN: a row without a gradient. Adam moves every row that has one, also if it is 0.
        sent = [
            gradients[stack].to(rows_MD.device).index_select(0, at_M)
            if stack in gradients and not is_empty
            else torch.full_like(rows_MD, torch.nan)
            for stack, at_M, rows_MD in last.parts
        ]
        self._clip = times.clip_row_norm
        self._after_backward.clear()
        torch.autograd.backward([rows_MD for *_, rows_MD in last.parts], sent)
        for piece, at_U, gradient_UD, table in self._after_backward:
            piece.adam(at_U, gradient_UD, table)
        if not is_empty:
            self._fit_stamps()
            for stack in gradients:
                number_U = last.number_U[stack]
                self._stamp_ms_N[number_U] = np.maximum(self._stamp_ms_N[number_U], times.time_ms)

    def _fit_stamps(self) -> None:
        more = self._slots.keys.capacity - len(self._stamp_ms_N)
        if more > 0:
            self._stamp_ms_N = np.concatenate([self._stamp_ms_N, np.full(more, _UNCHANGED)])
            self._saved_N = grown(self._saved_N, self._slots.keys.capacity)

    def _watch(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Forward hook of FBGEMM's lookups: the gradients of the rows that they gave go through `_summed`."""
        if output.requires_grad:
            output.register_hook(functools.partial(self._summed, module, inputs[0]))  # type: ignore[no-untyped-call]

    def _summed(self, module: Any, features: KeyedJaggedTensor, gradient_MD: Tensor) -> Tensor:
        """Add up the gradients of each row as shards do: in the order of workers, in float64, then limited.
        The sum stands where the row comes first; the fused optimizer finds 0 elsewhere."""
        at_M = features.values()
        which_M = torch.repeat_interleave(
            torch.arange(len(features.keys()), device=at_M.device),
            torch.tensor(features.length_per_key(), device=at_M.device),
        )
        real_M = ~torch.isnan(gradient_MD[:, 0])
        out_MD = torch.zeros_like(gradient_MD)
        if not bool(real_M.any()):
            return out_MD
        chosen_M = torch.nonzero(real_M).squeeze(1)
        row_M, order_M = torch.sort(at_M[chosen_M] + (which_M[chosen_M] << 48), stable=True)
        _, count_U = torch.unique_consecutive(row_M, return_counts=True)
        start_U, from_M = torch.cumsum(count_U, 0) - count_U, chosen_M[order_M]
        first_U = from_M[start_U]
        sum_UD = gradient_MD[first_U].double()
        for nth in range(1, int(count_U.max())):
            more_U = torch.nonzero(count_U > nth).squeeze(1)
            sum_UD.index_add_(0, more_U, gradient_MD[from_M[start_U[more_U] + nth]].double())
        sum_UD = _limited(sum_UD, self._clip)
        for k, (name, piece) in enumerate(self._of_module(module)):
            table = self.schema.table_by_name[name]
            if table.rule.name == "adam":
                here = which_M[first_U] == k
                self._after_backward.append((piece, at_M[first_U[here]], sum_UD[here], table))
                sum_UD[here] = 0
        out_MD[first_U] = sum_UD
        return out_MD

    def _of_module(self, module: Any) -> Iterator[tuple[str, LocalPiece]]:
        """The tables of one of FBGEMM's lookups, in their order in it."""
        for config in module.config.embedding_tables:
            k = next(k for k, table in enumerate(self.tables) if table.name == config.name)
            offsets = config.local_metadata.shard_offsets
            yield config.name, self._local[k, (offsets[0], offsets[1])]

    # The collection

    def _fit(self) -> None:
        """Build a larger collection, with the rows of the present one, if a table needs more rows than it
        has."""
        old, old_rows = self._local, self._num_rows
        rows = [self._slots.rows(k) for k in range(len(self.tables))]
        if rows == old_rows:
            return
        self._num_rows = rows
        self._build()
        if not old_rows:
            return
        for (k, (first, column)), piece in self._local.items():
            piece.copy_from(old[k, (first * old_rows[k] // rows[k], column)])

    def _build(self) -> None:
        assert self._group is not None
        comm_ops.set_gradient_division(False)  # sums over workers, as at shards
        rows = dict(zip((table.name for table in self.tables), self._num_rows, strict=True))
        collections = {
            name: _collection(tables, [rows[table.name] for table in tables])
            for name, tables in self._by_width.items()
        }
        sharder = EmbeddingCollectionSharder()
        plans = {
            name: module_plan(
                collections[name],
                {table.name: self.placement[table.name] for table in tables},
                sharder,
                self.workers,
                self.device.type,
            )
            for name, tables in self._by_width.items()
        }
        # The first DistributedModelParallel of a process agrees with the other workers on a debugging switch.
        # A restarted worker would wait for workers that have done so before.
        collective_utils._INITIALIZED = True  # noqa: SLF001 (TorchRec has no public name)
        self._collection = DistributedModelParallel(
            _RowsModel(collections),
            env=ShardingEnv.from_process_group(self._group.connect()),
            device=self.device,
            plan=ShardingPlan({f"collections.{name}": plan for name, plan in plans.items()}),
            sharders=[sharder],
        )
        self._pieces, self._local = [], {}
        hooked = 0
        for name, plan in plans.items():
            collection = self._collection.module.collections[name]
            self._read_pieces(collection, plan)
            for lookup in collection._lookups:  # noqa: SLF001 (TorchRec keeps them out of `modules()`)
                for module in lookup.modules():
                    if isinstance(module, BatchedFusedEmbedding):
                        module.register_forward_hook(self._watch)
                        hooked += len(module.config.embedding_tables)
        assert hooked == len(self._local), "every piece of this worker is in one of FBGEMM's lookups"

    def _read_pieces(self, collection: Any, plan: Any) -> None:
        weights, states = dict(weights_of(collection)), {name: t for name, _, t in states_of(collection)}
        for k, table in enumerate(self.tables):
            if table.name not in plan:
                continue
            for shard in plan[table.name].sharding_spec.shards:
                (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
                span = np.arange(column, column + columns)
                piece = Piece(k, shard.placement.rank(), (row, row + rows), _columns(table, span))
                self._pieces.append(piece)
                if piece.worker != self.index:
                    continue
                (rows_ND,) = (s.tensor.detach() for s in weights[table.name].local_shards())
                if table.rule.name == "adam":
                    state_NA = torch.zeros(rows, 2 * columns + 1, device=self.device)
                else:
                    (state_NA,) = (s.tensor.detach() for s in states[table.name].local_shards())
                    state_NA = state_NA.view(rows, -1)
                self._local[k, (row, column)] = LocalPiece(piece, rows_ND, state_NA, table.rule.name)

    def _fill(self, number_M: np.ndarray) -> None:
        """Give these keys their initial rows and states."""
        which_M, slot_M = self._slots.which_N[number_M], self._slots.slots(number_M)
        for piece in self._local.values():
            table, here_M = self.tables[piece.piece.k], np.flatnonzero(which_M == piece.piece.k)
            here_M = here_M[piece.piece.positions(slot_M[here_M])]
            keys = self._slots.keys.keys_at(number_M[here_M])
            rows_MD = initial_rows(self.home.seed, keys.table_U, keys.id_U, table.dim, table.init_scale)
            state_MA = np.full(
                (len(here_M), table.rule.state_width(table.dim)), table.rule.first_state, np.float32
            )
            piece.put(slot_M[here_M], np.concatenate([rows_MD, state_MA], axis=1)[:, piece.piece.columns])

    # Shards to collection and back

    def _place(self) -> None:
        """Set `placement` to that of worker 0."""
        planned = self._placement_of(self.workers) if self.index == 0 else {}
        text = json.dumps(dict(planned)).encode()
        sent = self._gather(np.frombuffer(text, np.uint8).astype(np.int64))[0]
        given = {
            table: TablePlacement(kind, tuple(ranks))
            for table, (kind, ranks) in json.loads(sent.astype(np.uint8).tobytes()).items()
        }
        self.placement = {t.name: given.get(t.name, TablePlacement()) for t in self.tables}
        check_tables(self.schema, self.placement)
        parts_K = [self.workers if self.placement[t.name].kind == "row_wise" else 1 for t in self.tables]
        self._slots = SlotIndex(self.tables, parts_K, self._owners)

    def _load(self) -> None:
        """Fill a new collection with the rows of all workers' shards. All workers load one piece, then the
        next one, so that none waits for another one's whole part."""
        self._place()
        number_W = [[np.zeros(0, np.int64)] for _ in range(self.workers)]
        records_K = [
            [np.zeros((0, table.dim + table.rule.state_width(table.dim)), np.float32)]
            for table in self.tables
        ]
        for stack in self.schema.stacks:
            pieces = self.home.load(stack)
            while True:
                piece = next(pieces, None)
                everyone = self._gather_keys(piece.keys if piece else no_keys())
                self._on_progress()
                if not any(map(len, everyone)):
                    break
                for worker, keys in enumerate(everyone):
                    self._slots.add(keys)
                    number_W[worker].append(self._slots.keys.find(keys))
                for k, table in enumerate(self.tables):
                    if piece is not None and table.stack == stack:
                        records_K[k].append(piece.records_MF[piece.keys.table_U == table.id])
        self._fit_stamps()
        self._stamp_ms_N[:] = _UNCHANGED
        self._fit()
        loaded_W = [np.concatenate(parts) for parts in number_W]
        self._saved_N[loaded_W[self.index]] = True
        self._move(loaded_W, {k: np.concatenate(parts) for k, parts in enumerate(records_K)}, to_shards=False)

    def _save(self) -> None:
        if self._collection is None:
            return  # nothing was pulled since the restore
        self._fit_stamps()
        changed_M = np.flatnonzero(self._stamp_ms_N != _UNCHANGED)
        gathered = self._gather(np.stack([changed_M, self._stamp_ms_N[changed_M]]).ravel())
        number, stamp_ms = np.concatenate([part.reshape(2, -1) for part in gathered], axis=1)
        changed_M, inverse = np.unique(number, return_inverse=True)
        stamp_ms_M = np.full(len(changed_M), _UNCHANGED)
        np.maximum.at(stamp_ms_M, inverse, stamp_ms)
        home_M = self._slots.home_N[changed_M]
        number_W = [changed_M[home_M == worker] for worker in range(self.workers)]
        records = {
            k: np.empty((len(number_M), table.dim + table.rule.state_width(table.dim)), np.float32)
            for (k, number_M), table in zip(self._by_table(number_W[self.index]), self.tables, strict=True)
        }
        self._move(number_W, records, to_shards=True)
        for k, number_N in self._by_table(number_W[self.index]):
            table = self.tables[k]
            for rows in self._slices(len(number_N)):
                number_M, records_MF = number_N[rows], records[k][rows]
                block = RowBlock(
                    keys=self._slots.keys.keys_at(number_M),
                    unpublished_K=np.zeros(len(number_M), np.uint8),
                    stamp_ms_L=stamp_ms_M[np.searchsorted(changed_M, number_M)],
                    rows_LD=np.ascontiguousarray(records_MF[:, : table.dim]),
                    state_LA=np.ascontiguousarray(records_MF[:, table.dim :]),
                )
                self.home.store(table.stack, block)
                self._saved_N[number_M] = True
                self._on_progress()
        self._stamp_ms_N[:] = _UNCHANGED
        self._may_have_expired = any(table.expire_after_ms for table in self.tables)

    def _drop_expired(self) -> None:
        """Free the slots of rows that the shards evicted in the last commit."""
        self._may_have_expired = False
        number_M = np.flatnonzero(self._saved_N)
        keys = self._slots.keys.keys_at(number_M)
        is_gone_M = np.zeros(len(keys), np.bool_)
        for name, tables in self.schema.stacks.items():
            at_N = np.flatnonzero(np.isin(keys.table_U, [table.id for table in tables]))
            for rows in self._slices(len(at_N)):
                is_gone_M[at_N[rows]] = ~self.home.contains(name, keys.take(at_N[rows]))
                self._on_progress()
        for gone in self._gather_keys(keys.take(is_gone_M)):
            number_M = self._slots.keys.find(gone)
            self._saved_N[number_M] = False
            self._slots.remove(gone)

    def _by_table(self, number_M: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        which_M = self._slots.which_N[number_M]
        for k in range(len(self.tables)):
            yield k, number_M[which_M == k]

    def _slices(self, count: int) -> Iterator[slice]:
        return (slice(start, start + self._slice_rows) for start in range(0, count, self._slice_rows))

    def _move(
        self, number_W: Sequence[np.ndarray], records: Mapping[int, np.ndarray], *, to_shards: bool
    ) -> None:
        """Move rows with their states between the pieces and `records` (table → float32 [M, F]), which every
        worker has for the keys `number_W[worker]` that its shard owns. All know what comes from whom."""
        moved_K = np.zeros(len(self.tables), np.int64)  # rows of `records`
        for rows in self._slices(max(map(len, number_W))):
            part_W = [number_M[rows] for number_M in number_W]
            which_M = self._slots.which_N[part_W[self.index]]
            end_K = moved_K + np.bincount(which_M, minlength=len(self.tables))
            parts = {k: records_MF[moved_K[k] : end_K[k]] for k, records_MF in records.items()}
            self._move_part(part_W, parts, to_shards=to_shards)
            moved_K = end_K
            self._on_progress()

    def _move_part(
        self, number_W: Sequence[np.ndarray], records: Mapping[int, np.ndarray], *, to_shards: bool
    ) -> None:
        by_table_W = [dict(self._by_table(number_M)) for number_M in number_W]
        home: list[list[np.ndarray]] = [[] for _ in range(self.workers)]  # sent or received as the keys' home
        held: list[list[np.ndarray]] = [[] for _ in range(self.workers)]  # as the holder of pieces
        spots: list[tuple[Piece, int, np.ndarray, np.ndarray]] = []
        for piece in self._pieces:
            for worker in range(self.workers):
                if self.index not in (worker, piece.worker):
                    continue
                slot_M = self._slots.slots(by_table_W[worker][piece.k])
                at_M = piece.positions(slot_M)
                spots.append((piece, worker, at_M, slot_M[at_M]))
        size_in = [0] * self.workers
        for piece, worker, at_M, slot_M in spots:
            if piece.worker == self.index and to_shards:
                held[worker].append(self._own(piece).get(slot_M).ravel())
            if worker == self.index and not to_shards:
                home[piece.worker].append(records[piece.k][at_M][:, piece.columns].ravel())
            if worker == self.index and to_shards:
                size_in[piece.worker] += at_M.size * piece.columns.size
            if piece.worker == self.index and not to_shards:
                size_in[worker] += at_M.size * piece.columns.size
        sent = held if to_shards else home
        received = self._swap([np.concatenate([*parts, np.zeros(0, np.float32)]) for parts in sent], size_in)
        read = [0] * self.workers
        for piece, worker, at_M, slot_M in spots:
            source = piece.worker if to_shards else worker
            if self.index != (worker if to_shards else piece.worker):
                continue
            end = read[source] + at_M.size * piece.columns.size
            values_MF = received[source][read[source] : end].reshape(len(at_M), piece.columns.size)
            read[source] = end
            if to_shards:
                records[piece.k][np.ix_(at_M, piece.columns)] = values_MF
            else:
                self._own(piece).put(slot_M, values_MF)

    def _own(self, piece: Piece) -> LocalPiece:
        return self._local[piece.k, (piece.rows[0], int(piece.columns[0]))]

    def _swap(self, parts: Sequence[np.ndarray], sizes: Sequence[int]) -> list[np.ndarray]:
        """Send one float32 array to each worker, and receive arrays of these sizes."""
        assert self._group is not None
        sent = torch.from_numpy(np.concatenate(parts).astype(np.float32, copy=False)).to(self.device)
        received = torch.empty(sum(sizes), dtype=torch.float32, device=self.device)
        distributed.all_to_all_single(
            received, sent, list(sizes), [len(part) for part in parts], group=self._group.connect()
        )
        return np.split(received.cpu().numpy(), np.cumsum(sizes)[:-1])

    def _gather_keys(self, keys: Keys) -> list[Keys]:
        """Every worker's keys."""
        parts = self._gather(np.stack([keys.table_U.astype(np.int64), keys.id_U]).ravel())
        return [
            Keys(table_M.astype(np.uint32), id_M) for table_M, id_M in (part.reshape(2, -1) for part in parts)
        ]

    def _gather(self, values_M: np.ndarray) -> list[np.ndarray]:
        """Every worker's int64 values."""
        assert self._group is not None
        group = self._group.connect()

        def everyone(mine_M: np.ndarray, length: int) -> np.ndarray:
            padded = torch.zeros(length, dtype=torch.int64, device=self.device)
            padded[: len(mine_M)] = torch.from_numpy(mine_M)
            all_WM = torch.empty(self.workers * length, dtype=torch.int64, device=self.device)
            distributed.all_gather_single(all_WM, padded, group=group)
            return all_WM.cpu().numpy().reshape(self.workers, length)

        # A step waits for the slowest worker in each collective: few values go in one, with their number.
        first_WM = everyone(np.concatenate([[len(values_M)], values_M[:_FEW_VALUES]]), 1 + _FEW_VALUES)
        size_W, all_WM = first_WM[:, 0], first_WM[:, 1:]
        if (more := int(size_W.max()) - _FEW_VALUES) > 0:
            all_WM = np.concatenate([all_WM, everyone(values_M[_FEW_VALUES:], more)], axis=1)
        return [row_M[:size] for row_M, size in zip(all_WM, size_W.tolist(), strict=True)]


def read_placement(
    given: str, schema: Schema, workers: int, profiled: Sequence[PlannedTable] = ()
) -> dict[str, TablePlacement]:
    """Table → placement, as the settings `placement` of `roostream train` and `initial_placement` of a worker
    say: '' = {}, so every table is spread by rows; `planner` = by TorchRec's planner, from the traffic in
    `profiled`; else a file of `placement plan --write-torchrec`.

    Raises:
        ConfigError: the file cannot be read, is no such plan, or names workers at or above `workers`.
    """
    if not given:
        return {}
    if given == "planner":
        collections = {
            name: _collection(tables, [_FIRST_BLOCK * workers] * len(tables))
            for name, tables in _tables_by_width(schema).items()
        }
        uniques = {table.name: table.uniques for table in profiled}
        return planned_by_torchrec(collections, EmbeddingCollectionSharder(), workers, "cpu", uniques)
    try:
        text = Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"placement: expected '', planner or a file, got {given!r}: {reason_of(error)}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"placement: expected a file of `placement plan --write-torchrec`, got {given!r}, which is not "
            "UTF-8"
        ) from None
    return placements(next(iter(sharding_plan(text).plan.values())), workers)


def planned_placement(
    given: str, schema: Schema, workers: int, store: CheckpointStore, *, batch: int, now_ms: int
) -> dict[str, TablePlacement]:
    """`read_placement` with the profiles in `store`, for batches of `batch` requests. Logs how even the
    planner's placement is. Raises as `read_placement` and `read_profiles`."""
    if given != "planner":
        return read_placement(given, schema, workers)
    tables, why = planned_tables(schema, read_profiles(store, schema), batch=batch, now_ms=now_ms, rows={})
    placement = read_placement(given, schema, workers, tables)
    dealt, planned = (
        imbalance(loads(pieces, tables, workers, CostModel())[1])
        for pieces in (round_robin(tables, workers), pieces_of(placement, tables, workers))
    )
    log.info(
        "placement by profiles of %d of %d tables: imbalance of bytes %.2f (tables round robin) → %.2f%s",
        len(tables) - len(why),
        len(tables),
        dealt,
        planned,
        "".join(f"; no profile of {text}" for text in why),
    )
    return placement


def _collection(tables: Sequence[Table], num_rows: Sequence[int]) -> EmbeddingCollection:
    """Without memory, and with the optimizers that FBGEMM fuses."""
    configs = [
        EmbeddingConfig(name=t.name, embedding_dim=t.dim, num_embeddings=rows, feature_names=[t.name])
        for t, rows in zip(tables, num_rows, strict=True)
    ]
    collection = EmbeddingCollection(tables=configs, device=torch.device("meta"))
    for table in tables:
        kind, settings = _optimizer(table)
        apply_optimizer_in_backward(kind, collection.embeddings[table.name].parameters(), settings)
    return collection


def check_tables(schema: Schema, placement: Mapping[str, TablePlacement]) -> None:
    """Raises SchemaError: TorchRec cannot hold a table, or not in this placement; a table that `placement`
    lacks is spread by rows."""
    for table in schema.tables:
        if table.dim % _LANES:
            raise SchemaError(
                f"table {table.name!r}: expected a dim that is a multiple of {_LANES} with rows = torchrec, "
                f"as FBGEMM needs it, got {table.dim}; change dim, or use rows = shards"
            )
        if hasattr(nn.ModuleDict(), table.name):
            raise SchemaError(
                f"table {table.name!r}: expected another name with rows = torchrec, because modules of torch "
                "have an attribute of this name; rename the table, or use rows = shards"
            )
        kind, ranks = placement.get(table.name, TablePlacement())
        if kind == "column_wise" and table.dim % len(ranks):
            raise SchemaError(
                f"table {table.name!r}: expected a dim that {len(ranks)} equal pieces of columns divide, got "
                f"{table.dim}; plan its placement again for this schema"
            )
        if kind == "column_wise" and table.rule.name == "rowwise_adagrad":
            raise SchemaError(
                f"table {table.name!r}: expected a rule with a state of each element for column_wise, got "
                "rowwise_adagrad, which has one state a row; use rule = adagrad, or another placement"
            )


def _optimizer(table: Table) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """FBGEMM's fused optimizer that equals the table's rule.

    FBGEMM has no Adam on CPU, and its Adam on devices counts the steps of all rows together. So
    `LocalPiece.adam` updates the rows of such tables, and FBGEMM adds 0.
    """
    if table.rule.name == "adam":
        return torch.optim.SGD, {"lr": 0.0}
    rate, _, epsilon = table.rule.parameters
    kind = torch.optim.Adagrad if table.rule.name == "adagrad" else RowWiseAdagrad
    return kind, {"lr": rate, "eps": epsilon}


def _columns(table: Table, span: np.ndarray) -> np.ndarray:
    """Which of a row's F numbers a piece with these columns of the row has."""
    dim = table.dim
    state = {
        "adagrad": [span],
        "rowwise_adagrad": [np.zeros(1, np.int64)],
        "adam": [span, dim + span, np.full(1, 2 * dim)],
    }[table.rule.name]
    return np.concatenate([span, *(dim + part for part in state)])


def _limited(sum_UD: Tensor, max_norm: float) -> Tensor:
    """float32: as `param_server.kernels.round_rows`."""
    norm_U1 = torch.linalg.vector_norm(sum_UD, dim=1, keepdim=True)
    scale_U1 = (
        torch.where(norm_U1 > max_norm, max_norm / norm_U1, 1.0) if max_norm else torch.ones_like(norm_U1)
    )
    largest_U1 = sum_UD.abs().amax(dim=1, keepdim=True)
    limit = float(MAX_GRADIENT)
    scale_U1 = torch.where(largest_U1 * scale_U1 > limit, limit / largest_U1, scale_U1)
    return (sum_UD * scale_U1).float()
