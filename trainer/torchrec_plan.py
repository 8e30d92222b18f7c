"""A placement plan as TorchRec's ShardingPlan; rows and optimizer state in and out of a sharded collection.

Import it only where TorchRec is installed (`roostream[torchrec]`); nothing else here imports it.

    sharding_plan(FILE) ──► DistributedModelParallel(model, plan=…)          or, for one collection,
                            EmbeddingBagCollectionSharder().shard(…)

`load_tables` and `read_tables` move whole tables: rows float32 [N, D] and, by TorchRec's names, optimizer
state ("momentum1": [N, D] for element-wise rules, [N] for row-wise ones). So training continues bit by bit
under another plan. Every rank must call them.

Letters: N rows of a table, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec import EmbeddingCollection
from torchrec.distributed import sharding_plan as torchrec_plans
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from param_server.placement.plan import Kind as PieceKind
from param_server.placement.plan import PlannedTable, TablePiece
from param_server.placement.sharding_file import read_sharding
from roostream.errors import CheckpointError, ConfigError, reason_of

_WEIGHT = ".weight"


class TableTensors(NamedTuple):
    """Rows and state of all tables of a collection."""

    rows: dict[str, np.ndarray]  # table → float32 [N, D]
    # Table → name → float32 [N, D] or [N]; {} for a rule without state.
    state: dict[str, dict[str, np.ndarray]]


Kind = Literal["row_wise", "table_wise", "column_wise"]
_NO_SUCH_SEQUENCES = {
    "table_row_wise": "TorchRec 1.9 has it for pooled tables only; within one machine row_wise is the same",
    "data_parallel": "TorchRec 1.9 mixes it with other kinds for pooled tables only, and its update is dense",
}


_PIECE_KINDS: dict[Kind, PieceKind] = {"row_wise": "row", "table_wise": "table", "column_wise": "column"}


class TablePlacement(NamedTuple):
    """Where a table's rows are among the workers, whatever their number."""

    kind: Kind = "row_wise"  # over all workers
    ranks: tuple[int, ...] = ()  # of table_wise: its worker; of column_wise: the worker of each equal piece


def placements(plan: Mapping[str, ParameterSharding], workers: int) -> dict[str, TablePlacement]:
    """The placement of each table of TorchRec's plan for a collection.

    Raises:
        ConfigError: a kind that TorchRec cannot use for unpooled rows, or ranks that `workers` workers do not
            have.
    """
    out = {}
    for table, sharding in plan.items():
        kind, ranks = sharding.sharding_type, tuple(sharding.ranks or ())
        if kind not in get_args(Kind):
            why = _NO_SUCH_SEQUENCES.get(kind, "no such kind")
            raise ConfigError(
                f"placement of table {table!r}: expected {', '.join(get_args(Kind))}, got {kind}: {why}"
            )
        if len({*ranks}) < len(ranks) or not all(0 <= rank < workers for rank in ranks):
            raise ConfigError(
                f"placement of table {table!r}: expected different ranks below workers = {workers}, got "
                f"{list(ranks)}; plan for as many owners as there are workers"
            )
        out[table] = TablePlacement(kind, () if kind == "row_wise" else ranks)
    return out


def planned_by_torchrec(
    collections: Mapping[str, EmbeddingCollection],
    sharder: Any,
    workers: int,
    device: str,
    uniques: Mapping[str, float | None],
) -> dict[str, TablePlacement]:
    """The placements that TorchRec's own `EmbeddingShardingPlanner` chooses for the tables of some
    collections: by rows or whole.

    `uniques`: table → distinct rows that a worker reads in a step, None = not known. A table of which nothing
    is known is spread by rows, because a wrong guess costs far more. If nothing is known of any table,
    TorchRec guesses.
    """
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import ParameterConstraints

    def constraints(table: str) -> ParameterConstraints:
        kinds, rows = ["row_wise", "table_wise"], uniques.get(table)
        if rows is None:
            return ParameterConstraints(
                sharding_types=kinds[:1] if any(uniques.values()) else kinds, compute_kernels=["fused"]
            )
        # A worker sends its distinct ids as one list.
        return ParameterConstraints(
            sharding_types=kinds, compute_kernels=["fused"], pooling_factors=[max(rows, 1.0)], batch_sizes=[1]
        )

    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=workers, compute_device=device, local_world_size=workers),
        storage_reservation=FixedPercentageStorageReservation(percentage=0.15),
        constraints={
            name: constraints(name) for collection in collections.values() for name in collection.embeddings
        },
    )
    plan = planner.plan(nn.ModuleDict(collections), [sharder])
    return {
        table: where
        for of_module in plan.plan.values()
        for table, where in placements(of_module, workers).items()
    }


def pieces_of(
    placement: Mapping[str, TablePlacement], tables: Sequence[PlannedTable], workers: int
) -> list[TablePiece]:
    """A placement as the planner's pieces; a table that it lacks is spread by rows."""
    out = []
    for table in tables:
        kind, ranks = placement.get(table.name, TablePlacement())
        owners = tuple(range(workers)) if kind == "row_wise" else ranks
        width = table.dim // len(owners) if kind == "column_wise" else 0
        out += [
            TablePiece(
                table=table.name,
                kind=_PIECE_KINDS[kind],
                owner=owner,
                number=n,
                of=len(owners),
                columns=(n * width, (n + 1) * width) if width else (0, table.dim),
            )
            for n, owner in enumerate(owners)
        ]
    return out


def module_plan(
    collection: nn.Module, placement: Mapping[str, TablePlacement], sharder: Any, workers: int, device: str
) -> EmbeddingModuleShardingPlan:
    """TorchRec's plan for a collection of tables of any size."""
    kinds = {
        "row_wise": lambda ranks: torchrec_plans.row_wise(compute_kernel="fused"),
        "table_wise": lambda ranks: torchrec_plans.table_wise(ranks[0], compute_kernel="fused"),
        "column_wise": lambda ranks: torchrec_plans.column_wise(list(ranks), compute_kernel="fused"),
    }
    return torchrec_plans.construct_module_sharding_plan(
        collection,
        {table: kinds[where.kind](where.ranks) for table, where in placement.items()},
        sharder,
        local_size=workers,
        world_size=workers,
        device_type=device,
    )


def sharding_plan(text: str, device: str = "cpu", kernel: str = "fused") -> ShardingPlan:
    """Plan from the file of `placement plan --write-torchrec`; `kernel`: TorchRec's compute kernel for every
    table. Raises ConfigError: the file is not such a plan."""
    plan = read_sharding(text)
    try:
        tables = {
            name: _parameter(table["sharding_type"], table["shards"], device, kernel)
            for name, table in plan["tables"].items()
        }
    except (ValueError, TypeError) as error:
        raise ConfigError(
            "sharding plan: expected JSON of `roostream placement plan --write-torchrec`, got shards that do "
            f"not fit together ({reason_of(error)})"
        ) from None
    return ShardingPlan({plan["module"]: EmbeddingModuleShardingPlan(tables)})


def load_tables(collection: nn.Module, tables: TableTensors) -> None:
    """Write this rank's part of each table. `collection`: sharded by TorchRec. State that is not given stays.
    Raises CheckpointError: a table is missing or has another size. Nothing was changed."""
    plan = [
        *((_get(tables.rows, table, "rows"), tensor) for table, tensor in weights_of(collection)),
        *(
            (_get(tables.state[table], name, table), tensor)
            for table, name, tensor in states_of(collection)
            if table in tables.state
        ),
    ]
    for table_ND, tensor in plan:
        if tuple(table_ND.shape) != tuple(tensor.size()):
            raise CheckpointError(
                f"expected a table of {list(tensor.size())}, got {list(table_ND.shape)}; "
                "shard it for that many rows"
            )
    with torch.no_grad():
        for table_ND, tensor in plan:
            for shard in tensor.local_shards():
                shard.tensor.copy_(torch.from_numpy(np.ascontiguousarray(table_ND[_slices(shard.metadata)])))


def read_tables(collection: nn.Module) -> TableTensors:
    """Whole tables, at every rank; each needs memory for them."""
    local = {(table, ""): tensor for table, tensor in weights_of(collection)}
    local |= {(table, name): tensor for table, name, tensor in states_of(collection)}
    sizes: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(sizes, {key: tuple(tensor.size()) for key, tensor in local.items()})
    out = TableTensors({}, {})
    for (table, name), size in sorted(
        {key: size for by_key in sizes for key, size in by_key.items()}.items()
    ):
        table_ND = _gather_table(local.get((table, name)), size)
        if name:
            out.state.setdefault(table, {})[name] = table_ND
        else:
            out.rows[table] = table_ND
    return out


def _parameter(
    sharding_type: str, shards: list[dict[str, Any]], device: str, kernel: str
) -> ParameterSharding:
    def where(rank: int) -> str:
        return f"rank:{rank}/{device}" if device == "cpu" else f"rank:{rank}/{device}:{rank}"

    metadata = [ShardMetadata(s["offsets"], s["sizes"], where(s["rank"])) for s in shards]
    ranks = [shard["rank"] for shard in shards]
    return ParameterSharding(
        sharding_type, kernel, ranks=ranks, sharding_spec=EnumerableShardingSpec(metadata)
    )


def weights_of(collection: nn.Module) -> Iterator[tuple[str, ShardedTensor]]:
    """Tables known to this rank."""
    for name, tensor in sorted(collection.state_dict().items()):
        if name.endswith(_WEIGHT) and isinstance(tensor, ShardedTensor):
            yield _table(name), tensor


def states_of(collection: Any) -> Iterator[tuple[str, str, ShardedTensor]]:
    """State of the optimizer that is fused into the collection."""
    for name, state in sorted(collection.fused_optimizer.state_dict()["state"].items()):
        for key, tensor in sorted(state.items()):
            if isinstance(tensor, ShardedTensor):
                yield _table(name), key.rpartition(".")[2], tensor


def _table(name: str) -> str:
    return name.removesuffix(_WEIGHT).rpartition(".")[2]


def _get(given: Mapping[str, np.ndarray], name: str, where: str) -> np.ndarray:
    if name not in given:
        raise CheckpointError(
            f"expected {name!r} of {where}, got {', '.join(given) or 'nothing'}; give every table's"
        )
    return given[name]


def _slices(metadata: ShardMetadata) -> tuple[slice, ...]:
    return tuple(
        slice(at, at + size) for at, size in zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)
    )


def _gather_table(tensor: ShardedTensor | None, size: tuple[int, ...]) -> np.ndarray:
    """Every rank adds its own bits to zeros, as integers, so nothing is rounded and -0 stays -0. None: the
    rank has no part."""
    bits = torch.zeros(size, dtype=torch.int32)
    for shard in tensor.local_shards() if tensor is not None else ():
        bits[_slices(shard.metadata)] = _float32(shard.tensor).view(torch.int32)
    distributed.all_reduce(bits)
    return bits.numpy().view(np.float32)


def _float32(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float32).contiguous()
