"""One of two processes that hold rows in TorchRec's collections. test_torchrec_rows.py starts them.

    python -m tests.trainer.torchrec_row_workers RANK FOLDER

Every rank trains the runs of FOLDER/runs.json, and writes the state of its shard to FOLDER/out-RANK.npz. If
FOLDER/shards.json exists, the rows are saved to the shards whose addresses it lists.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from param_server.client import Client
from param_server.server import Shard
from roostream.runtime.rpc.client import SocketTransport
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.lookup import Lookup, StackLookup
from tests.param_server.shard_support import started_shard
from trainer.process_group import DualRendezvous, GroupSpec, TorchRendezvous
from trainer.row_home import KeptRows, OwnShard, StackShards
from trainer.rows import PushTimes
from trainer.torchrec_plan import TablePlacement
from trainer.torchrec_rows import TorchRecRows

WORKERS = 2
CLIP = 2.0
EXPIRE_AFTER_MS = 10_000  # rows expire after the last step; only the run "expired" moves the time past it
PLACEMENTS = {
    "rows": {},
    "mixed": {
        "item": TablePlacement("table_wise", (1,)),
        "user": TablePlacement("table_wise", (0,)),
        "brand": TablePlacement("column_wise", (1, 0)),
    },
}


def schema() -> Schema:
    tables: dict[str, dict[str, Any]] = {
        "item": {"dim": 8, "rule": {"name": "adagrad", "learning_rate": 0.05, "epsilon": 1e-3}},
        "user": {"dim": 8, "init_scale": 0.5, "rule": {"name": "adagrad", "initial_accumulator": 0.1}},
        "topic": {"dim": 4, "rule": "rowwise_adagrad"},
        "brand": {"dim": 8, "rule": {"name": "adam", "learning_rate": 0.01}},
    }
    for table in tables.values():
        table["expire_after_ms"] = EXPIRE_AFTER_MS
    return schema_from_dict({"tables": tables, "label": [{"name": "click", "action": "click"}]})


def batch(worker: int, step: int) -> tuple[Lookup, dict[str, np.ndarray]]:
    """A worker's keys and gradients. Some keys are shared with the other worker, ids are large, and one batch
    is empty. In step 3 the tables outgrow their initial size."""
    random = np.random.default_rng([worker, step])
    count = 2500 if step == 3 else 0 if (worker, step) == (1, 2) else 40
    stacks, gradients = {}, {}
    for name, tables in schema().stacks.items():
        ids = [random.choice(3000 if step == 3 else 60, min(count, 2900), replace=False) for _ in tables]
        table_U = np.concatenate([np.full(len(i), t.id, np.uint32) for t, i in zip(tables, ids, strict=True)])
        id_U = np.concatenate(ids).astype(np.int64) * 0x1234567890ABCD
        order_U = random.permutation(len(id_U))
        stacks[name] = StackLookup(table_U[order_U], id_U[order_U], {})
        gradients[name] = random.normal(size=(len(id_U), tables[0].dim)).astype(np.float32)
    return Lookup(stacks), gradients


def train(rows: TorchRecRows, worker: int, steps: range) -> None:
    for step in steps:
        lookup, gradients = batch(worker, step)
        rows.pull(lookup)
        if step % 4 == 1:
            continue  # pull without push, as for requests without labels
        rows.push(
            lookup,
            {name: torch.from_numpy(g) for name, g in gradients.items()},
            PushTimes(step=step, time_ms=100 * step, clip_row_norm=CLIP),
        )


def expire(shard: Shard) -> None:
    """Commit at a time when every row has expired."""
    shard.freeze(1, 10 * EXPIRE_AFTER_MS)
    shard.write(1)
    shard.commit(1)


def stack_shards(folder: Path, rank: int) -> StackShards | None:
    """Connect to the shards of FOLDER/shards.json, if the file exists."""
    path = folder / "shards.json"
    if not path.exists():
        return None
    transports = [SocketTransport(address) for address in json.loads(path.read_text())]
    return StackShards(Client(schema(), transports, worker=rank, num_buckets=64), 0)


class PacedShard(OwnShard):
    """A `RowHome` that fails if a worker loads its next rows before the other one has loaded its own: the
    other one may be slow, and the first would wait for longer than a collective operation may take. The
    second worker is slow."""

    def __init__(self, shard: Shard, folder: Path, rank: int, incarnation: int) -> None:
        super().__init__(shard)
        self.folder, self.rank, self.incarnation = folder, rank, incarnation
        self._before = ""

    def load(self, stack: str) -> Iterator[KeptRows]:
        before, self._before = self._before, stack
        assert not before or all(self._marker(before, rank).exists() for rank in range(WORKERS))
        time.sleep(0.1 * self.rank)
        yield from super().load(stack)
        self._marker(stack, self.rank).touch()

    def _marker(self, stack: str, rank: int) -> Path:
        return self.folder / f"loaded-{self.incarnation}-{stack}-{rank}"


def state(shard: Shard) -> Iterator[tuple[str, np.ndarray]]:
    for stack, table in shard.tables.items():
        row_M = table.index.flagged(1)
        yield f"{stack}/table", table.index.table_N[row_M]
        yield f"{stack}/id", table.index.id_N[row_M]
        yield f"{stack}/stamp", table.stamp_ms_N[row_M]
        yield f"{stack}/rows", table.embeddings.rows_ND[row_M]
        yield f"{stack}/state", table.state_NA[row_M]


def first_address(folder: Path, rank: int, own: str) -> str:
    """Return the address of rank 0, which rank 0 writes to a file."""
    path = folder / "address"
    if rank == 0:
        path.with_suffix(".new").write_text(own)
        path.with_suffix(".new").rename(path)
    ends_s = time.monotonic() + 60
    while not path.exists() and time.monotonic() < ends_s:
        time.sleep(0.01)
    return path.read_text()


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    rendezvous = TorchRendezvous("127.0.0.1:0", device="cpu", timeout_s=60)
    address, incarnation = first_address(folder, rank, rendezvous.address), 0
    runs: Mapping[str, list[str]] = json.loads((folder / "runs.json").read_text())
    out = {}
    for name, placements in runs.items():
        shard = started_shard(index=rank, num_shards=WORKERS, schema=schema())
        for part, placement in enumerate(placements):
            incarnation += 1
            home = stack_shards(folder, rank) or PacedShard(shard, folder, rank, incarnation)
            # Only worker 0 has a plan. The others get the placement from it.
            planned = PLACEMENTS[placement] if rank == 0 else None
            rows = TorchRecRows(schema(), home, lambda workers, planned=planned: planned)
            group = DualRendezvous(rendezvous, rows).join(GroupSpec(incarnation, rank, WORKERS, address))
            rows.set_incarnation(shard.incarnation, WORKERS)
            length = 12 // len(placements)
            if name == "late":
                train(rows, rank, range(6, 12))
            elif name == "expired":
                train(rows, rank, range(6))
                rows.save()
                expire(shard)
                train(rows, rank, range(6, 12))
            else:
                train(rows, rank, range(part * length, (part + 1) * length))
            rows.save()
            actual = {table: rows.placement[table] for table in PLACEMENTS[placement]}
            assert actual == PLACEMENTS[placement], "every worker must have the placement of worker 0"
            group.leave()
        out |= {f"{name}/{key}": value for key, value in state(shard)}
    np.savez(folder / f"out-{rank}.npz", **out)
    rendezvous.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
