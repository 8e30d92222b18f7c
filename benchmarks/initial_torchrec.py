"""What does a step of the initial phase cost with rows in TorchRec's collections?

A step of two workers whose rows are in TorchRec's sharded collections, under several placements, or at two
shards. Each does the same work: pooled sums of a batch of requests, and one row-wise Adagrad step with the
gradients of all workers. `python -m benchmarks.initial_torchrec JSON` is a worker process, controlled by
lines on stdin. placement-apply uses the same workers, two or four of them.

Letters: W workers, T tables (each with one feature), E impressions of a worker, L ids of a batch, U unique
ones, D width.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from benchmarks.common.peer_process import start_peer
from benchmarks.common.shard import empty_shard, remote_client, shard_processes
from benchmarks.common.shared_setup import SharedSetup, opened_with
from benchmarks.harness.benchmark import Benchmark, Row, Subject, SubjectResult, TurnResult, WholeTurn
from param_server.placement.plan import PlannedTable, imbalance, plan
from roostream.models.embedding_ops import pool_bags
from roostream.runtime.address import parse_address
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.lookup import Lookup, StackLookup, insert
from trainer.row_home import OwnShard
from trainer.rows import PushTimes, Rows, ShardRows
from trainer.torchrec_plan import TablePlacement
from trainer.torchrec_rows import TorchRecRows, read_placement

_HERE = "benchmarks.initial_torchrec"
WORKERS = 2
RATE, EPSILON, SCALE = 0.05, 1e-8, 0.05
_BATCHES = 8


class Shape(NamedTuple):
    """Sizes of a step."""

    tables: int
    ids_a_table: int
    width: int
    requests: int  # a worker
    candidates: int  # a request; the first half of the tables are of request-only features
    valency: int  # in the mean
    zipf: float
    uneven: bool = False  # table n has a share of the ids in proportion to 1 / (n + 1)

    def valency_of(self, table: int) -> int:
        """Ids of an example, in the mean."""
        if not self.uneven:
            return self.valency
        share = 1 / (table + 1) / sum(1 / (n + 1) for n in range(self.tables))
        return max(round(self.valency * self.tables * share), 1)

    @property
    def examples(self) -> int:
        return self.requests * self.candidates

    def schema_source(self) -> dict[str, Any]:
        rule = {
            "name": "rowwise_adagrad",
            "learning_rate": RATE,
            "epsilon": EPSILON,
            "initial_accumulator": 0.0,
        }
        tables = {f"t{n}": {"dim": self.width, "init_scale": SCALE, "rule": rule} for n in range(self.tables)}
        return {"tables": tables, "label": [{"name": "click", "action": "click"}]}

    @property
    def schema(self) -> Schema:
        return schema_from_dict(self.schema_source())

    def table_ids(self) -> list[int]:
        schema = self.schema
        return [schema.table_by_name[f"t{n}"].id for n in range(self.tables)]


class Batch(NamedTuple):
    """One worker's part of a step."""

    id_TL: list[np.ndarray]  # int64, each table's
    length_TE: np.ndarray  # int64 [T, E]
    gradient_TED: Tensor  # of the pooled sums

    @property
    def ends(self) -> Tensor:
        """int64 [T * E + 1]: where each bag begins and the last one ends, the tables behind each other."""
        return torch.from_numpy(np.concatenate([[0], np.cumsum(self.length_TE.ravel())]))


def batches_of(shape: Shape, worker: int) -> list[Batch]:
    """Random batches; equal arguments give equal batches."""
    random = np.random.default_rng([worker, shape.examples, shape.valency])
    frequency = np.arange(1, shape.ids_a_table + 1, dtype=np.float64) ** -shape.zipf
    size = (shape.tables, shape.examples, shape.width)
    batches = []
    for _ in range(_BATCHES):
        id_TL, length_TE = [], np.empty(size[:2], np.int64)
        for table in range(shape.tables):
            times = shape.candidates if table < shape.tables // 2 else 1
            lists = [
                random.choice(shape.ids_a_table, int(n), p=frequency / frequency.sum())
                for n in random.integers(1, 2 * shape.valency_of(table), shape.examples // times)
            ]
            lists = [each for each in lists for _ in range(times)]
            id_TL.append(np.concatenate(lists))
            length_TE[table] = [len(each) for each in lists]
        batches.append(
            Batch(id_TL, length_TE, 0.1 * torch.from_numpy(random.standard_normal(size, np.float32)))
        )
    return batches


class Trainer:
    """Trains batches in one of the workers. All workers take each step together.

    `expanded`: an id is sent as often as impressions contain it, as if every impression were an example of
    its own. Otherwise each distinct id of a batch is sent once.
    """

    def __init__(self, shape: Shape, rows: Rows, *, expanded: bool = False) -> None:
        self.rows, self.tables, self.num_steps, self.expanded = rows, shape.table_ids(), 0, expanded
        (self.stack,) = shape.schema.stacks

    @property
    def bytes_W(self) -> list[int]:
        """Bytes of ids, rows and gradients that each owner exchanged for this worker so far; [] = not
        counted."""
        return self.rows.bytes_W.tolist() if isinstance(self.rows, TorchRecRows) else []

    def step(self, batch: Batch) -> Tensor:
        """Train a batch. Returns [T, E, D], the pooled sums before the update."""
        lookup, index_L = self._lookup(batch)
        rows_UD = self.rows.pull(lookup)[self.stack].requires_grad_()
        out_TED = pool_bags(rows_UD, torch.from_numpy(index_L), batch.ends, torch.ones(len(index_L))).view_as(
            batch.gradient_TED
        )
        torch.autograd.backward(out_TED, batch.gradient_TED)
        assert rows_UD.grad is not None
        self.num_steps += 1
        self.rows.push(lookup, {self.stack: rows_UD.grad}, PushTimes(step=self.num_steps, time_ms=0))
        return out_TED.detach()

    def _lookup(self, batch: Batch) -> tuple[Lookup, np.ndarray]:
        """Like `roostream.wire.lookup.build_lookup`."""
        total = sum(map(len, batch.id_TL))
        if self.expanded:
            table_L = np.repeat(np.array(self.tables, np.uint32), [len(ids) for ids in batch.id_TL])
            every = StackLookup(table_L, np.concatenate(batch.id_TL), {})
            return Lookup({self.stack: every}), np.arange(total)
        slots = np.full(1 << max(4, (2 * total - 1).bit_length()), -1, np.int32)
        table_U, id_U, index_L = (
            np.empty(total, np.uint32),
            np.empty(total, np.int64),
            np.empty(total, np.int64),
        )
        count = start = 0
        for table, ids in zip(self.tables, batch.id_TL, strict=True):
            count = insert(ids, table, slots, table_U, id_U, count, index_L[start : start + len(ids)])
            start += len(ids)
        return Lookup({self.stack: StackLookup(table_U[:count].copy(), id_U[:count].copy(), {})}), index_L


class DefaultGroup:
    """The group of this benchmark's workers, as `TorchRecRows.meet` wants one."""

    def __init__(self, index: int) -> None:
        self.index = index

    def connect(self) -> Any:
        return dist.group.WORLD


def placement_of(kind: str, shape: Shape, workers: int) -> dict[str, TablePlacement]:
    """`kind`: rows | tables (round robin) | planner (TorchRec's, which guesses) | profiled (TorchRec's, from
    the traffic of the first worker) | plan (ours, from that traffic)."""
    if kind == "planner":
        return read_placement("planner", shape.schema, workers)
    if kind == "profiled":
        return read_placement("planner", shape.schema, workers, profiled(shape))
    if kind == "plan":
        found = plan(profiled(shape), workers, whole_or_all=True)
        return {p.table: TablePlacement("table_wise", (p.owner,)) for p in found.pieces if p.kind == "table"}
    if kind == "tables":
        return {f"t{n}": TablePlacement("table_wise", (n % workers,)) for n in range(shape.tables)}
    return {}


def profiled(shape: Shape) -> list[PlannedTable]:
    """The tables with what the first worker reads in a step, in the mean."""
    batches = batches_of(shape, 0)
    return [
        PlannedTable(
            name=f"t{n}",
            dim=shape.width,
            row_wise_rule=True,
            rows=shape.ids_a_table,
            uniques=float(np.mean([len(np.unique(batch.id_TL[n])) for batch in batches])),
            ids=float(np.mean([len(batch.id_TL[n]) for batch in batches])),
        )
        for n in range(shape.tables)
    ]


CHECKED = 16  # updates after which the sums of all exchanges are compared
_TIMEOUT_S = 60.0


class Took(NamedTuple):
    """Costs of some steps of one worker."""

    wall_s: float
    worker: int
    bytes_W: list[int]  # of each owner, for this worker; [] = not counted
    differs: float  # largest difference from our sums after CHECKED updates
    ids: int


class BenchmarkWorker:
    """The trainers of one worker process. Each is made when it is first used, and its sums are compared with
    those of the first trainer of the same shape."""

    def __init__(self, index: int, workers: int, opened: contextlib.ExitStack) -> None:
        self.index, self.workers, self.opened = index, workers, opened
        self._exchanges: dict[tuple[str, Shape], tuple[Trainer, float]] = {}
        self._expected: dict[Shape, Tensor] = {}
        self._batches: dict[Shape, list[Batch]] = {}

    def take(self, kind: str, shape: Shape, steps: int, shards: list[str]) -> Took:
        """Take this many steps, together with the other workers."""
        if shape not in self._batches:
            self._batches[shape] = batches_of(shape, self.index)
        batches = self._batches[shape]
        if (kind, shape) not in self._exchanges:
            self._exchanges[kind, shape] = self._checked(self._make(kind, shape, shards), shape)
        exchange, differs = self._exchanges[kind, shape]
        before_W = exchange.bytes_W
        dist.barrier()
        began_s = time.perf_counter()
        for n in range(steps):
            exchange.step(batches[n % len(batches)])
        wall_s = time.perf_counter() - began_s
        ids = sum(sum(map(len, batches[n % len(batches)].id_TL)) for n in range(steps))
        bytes_W = [now - before for now, before in zip(exchange.bytes_W, before_W, strict=True)]
        return Took(wall_s, self.index, bytes_W, differs, ids)

    def _make(self, kind: str, shape: Shape, shards: list[str]) -> Trainer:
        if kind == "shards":
            client = remote_client(shape.schema, shards, worker=self.index, workers=self.workers)
            return Trainer(shape, ShardRows(self.opened.enter_context(client)))
        store = self.opened.enter_context(tempfile.TemporaryDirectory())
        shard = empty_shard(shape.schema, store, publishing=False, index=self.index, num_shards=self.workers)
        rows = TorchRecRows(shape.schema, OwnShard(shard), lambda workers: placement_of(kind, shape, workers))
        rows.meet(DefaultGroup(self.index))
        rows.set_incarnation(1, self.workers)
        return Trainer(shape, rows, expanded=kind == "expanded")

    def _checked(self, exchange: Trainer, shape: Shape) -> tuple[Trainer, float]:
        """All trainers start from equal rows and have equal sums after CHECKED updates."""
        batches = self._batches[shape]
        for n in range(CHECKED):
            exchange.step(batches[n % len(batches)])
        out_TED = exchange.step(batches[CHECKED % len(batches)])
        if not bool(torch.isfinite(out_TED).all()):
            raise ArithmeticError("sums are not finite")
        expected = self._expected.setdefault(shape, out_TED)
        return exchange, float((out_TED - expected).abs().max())


class Workers:
    """The worker processes, which take all steps together."""

    def __init__(self, opened: contextlib.ExitStack, count: int = WORKERS) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            store_address = f"127.0.0.1:{free.getsockname()[1]}"
        arguments = (json.dumps([index, count, store_address]) for index in range(count))
        self._peers = [opened.enter_context(start_peer(_HERE, each)) for each in arguments]

    def take(self, kind: str, shape: Shape, steps: int, shards: list[str]) -> list[Took]:
        for peer in self._peers:
            peer.send_line(json.dumps([kind, shape, steps, shards]))
        return [Took(*json.loads(peer.read_line())) for peer in self._peers]


_shared_workers = {count: SharedSetup(opened_with(Workers)) for count in (WORKERS, 2 * WORKERS)}


def workers(count: int = WORKERS) -> contextlib.AbstractContextManager[Workers]:
    """The workers of a run, shared by its rows."""
    return _shared_workers[count].open(count)


@contextlib.contextmanager
def exchanged(kind: str, sizes: Any, steps: int, count: int = WORKERS) -> Iterator[WholeTurn]:
    """A subject, which counts steps; a step takes as long as the slower worker needs.

    `kind`: where the rows are. rows, tables, planner, profiled, plan: in TorchRec's collections, placed so;
    expanded: as rows with every id of every impression sent; shards. `sizes`: of the Shape. `count`: workers.
    """
    shape = Shape(*sizes)
    with (
        workers(count) as together,
        shard_processes(shape.schema_source(), WORKERS if kind == "shards" else 0) as shards,
    ):
        addresses = [shard.address for shard in shards]

        def turn() -> TurnResult:
            took = together.take(kind, shape, steps, addresses)
            figures = {
                "sums differ by": max(one.differs for one in took),
                "ids a step": sum(one.ids for one in took) / steps,
            }
            if all(one.bytes_W for one in took):
                bytes_WW = np.array([one.bytes_W for one in sorted(took, key=lambda one: one.worker)])
                sent_W = bytes_WW.sum(1) - bytes_WW.diagonal()
                figures["MB sent a worker and step"] = float(sent_W.max()) / steps / 1e6
                figures["imbalance of owners' bytes"] = imbalance(bytes_WW.sum(0))
            return TurnResult(steps, max(one.wall_s for one in took), figures)

        yield WholeTurn(turn, warm_up=turn)


_STEPS = 13
SPREAD, EXPANDED, SHARDS, TABLES, PLANNER = (
    "rows in TorchRec, spread",
    "the same, every impression with all its ids",
    "rows at two shards",
    "rows in TorchRec, tables round robin",
    "rows in TorchRec, its own planner",
)


def _against(results: Mapping[str, SubjectResult]) -> dict[str, float]:
    sent = {name: results[name].figures["MB sent a worker and step"] for name in (SPREAD, EXPANDED)}
    return {
        "bytes of expanded impressions, in times of requests": sent[EXPANDED] / sent[SPREAD],
        "steps/s against rows at shards": results[SHARDS].cost_us / results[SPREAD].cost_us,
        "steps/s of tables round robin against spread rows": results[SPREAD].cost_us
        / results[TABLES].cost_us,
        "steps/s of TorchRec's planner against spread rows": results[SPREAD].cost_us
        / results[PLANNER].cost_us,
    }


def _row(zipf: float, valency: int) -> Row:
    size = ([8, 20_000, 32, 64, 5, valency, zipf], _STEPS)
    return Row(
        name=f"8 tables of 20 000 rows of width 32, 64 requests of 5 a worker, {valency} ids, Zipf {zipf:g}",
        unit="steps",
        shows="cost",
        subjects=(
            Subject(SPREAD, f"{_HERE}:exchanged", ("rows", *size)),
            Subject(SHARDS, f"{_HERE}:exchanged", ("shards", *size), "stage"),
            Subject(EXPANDED, f"{_HERE}:exchanged", ("expanded", *size), "stage"),
            Subject(TABLES, f"{_HERE}:exchanged", ("tables", *size), "stage"),
            Subject(PLANNER, f"{_HERE}:exchanged", ("planner", *size), "peer"),
        ),
        derives=_against,
    )


BENCHMARK = Benchmark(
    name="initial-torchrec",
    summary="What does a step of the initial phase cost with rows in TorchRec's collections?",
    rows=(_row(1.05, 3), _row(1.05, 20)),
    slice_s=0.0,
    rounds=3,
    run_setup="benchmarks.initial_torchrec:workers",
    interpretation="""\
Two worker processes, gloo over loopback, one torch thread each. All subjects start from equal rows; "sums
differ by" compares their pooled sums with the first one's after 16 updates, and the target is at most 1e-5.
Half of the tables belong to request-only features. "Rows in TorchRec" (`trainer/torchrec_rows.py`) sends each
distinct id of a worker once a step; "every impression with all its ids" sends the ids of a request once for
each of its candidates, as a model on impressions does. Bytes are counted at the requester: ids and gradients
sent, rows received. "Rows at two shards" has two more processes on the same cores.""",
)


def main() -> None:
    index, count, store_address = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    with contextlib.ExitStack() as opened:
        print("ready", file=answers, flush=True)
        host, port = parse_address(store_address)
        timeout = datetime.timedelta(seconds=_TIMEOUT_S)
        store = c10d.TCPStore(host, port, is_master=index == 0, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=index, world_size=count)
        opened.callback(dist.destroy_process_group)
        worker = BenchmarkWorker(index, count, opened)
        for line in sys.stdin:
            kind, shape, steps, shards = json.loads(line)
            print(json.dumps(worker.take(kind, Shape(*shape), steps, shards)), file=answers, flush=True)


if __name__ == "__main__":
    main()
