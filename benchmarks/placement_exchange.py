"""What does a step cost where the workers hold the rows themselves?

A step of two workers whose rows are held by the workers, by shards, or by peers such as TorchRec. Each
exchange does the same work: pooled sums in the forward pass, and one row-wise Adagrad step with the gradients
of all workers. `python -m benchmarks.placement_exchange JSON` is a worker process, controlled by lines on
stdin.

Letters: W workers, T tables (each with one feature), E examples of a worker, L ids of a batch, U unique ones,
D width.
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
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from benchmarks.common.peer_process import start_peer
from benchmarks.common.shard import empty_shard, remote_client, shard_processes
from benchmarks.common.shared_setup import SharedSetup
from benchmarks.harness.benchmark import Benchmark, Row, Subject, SubjectResult, TurnResult, WholeTurn
from param_server.initial_rows import initial_rows
from param_server.row_exchange import RowExchange
from roostream.models.embedding_ops import pool_bags
from roostream.runtime.address import parse_address
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.lookup import Lookup, StackLookup, insert
from trainer.process_group import GroupSpec, TorchRendezvous
from trainer.rows import PushTimes, Rows, ShardRows

_HERE = "benchmarks.placement_exchange"
WORKERS = 2
RATE, EPSILON, SCALE = 0.05, 1e-8, 0.05
_BATCHES = 8


class Shape(NamedTuple):
    """Sizes of a step."""

    tables: int
    ids_a_table: int
    width: int
    examples: int  # a worker
    valency: int  # in the mean
    zipf: float

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

    def first_rows(self, table: int) -> np.ndarray:
        """float32 [ids_a_table, D] of a table by its id."""
        ids = np.arange(self.ids_a_table, dtype=np.int64)
        return initial_rows(0, np.full(len(ids), table, np.uint32), ids, self.width, SCALE)


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
    """The same for the same arguments."""
    random = np.random.default_rng([worker, shape.examples, shape.valency])
    frequency = np.arange(1, shape.ids_a_table + 1, dtype=np.float64) ** -shape.zipf
    size = (shape.tables, shape.examples, shape.width)
    batches = []
    for _ in range(_BATCHES):
        length_TE = random.integers(1, 2 * shape.valency, size[:2])
        id_TL = [
            random.choice(shape.ids_a_table, int(n), p=frequency / frequency.sum())
            for n in length_TE.sum(axis=1)
        ]
        batches.append(
            Batch(id_TL, length_TE, 0.1 * torch.from_numpy(random.standard_normal(size, np.float32)))
        )
    return batches


class Exchange(Protocol):
    """One worker's side of an exchange; all workers take their steps together."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to others so far; 0 = not counted."""

    def step(self, batch: Batch) -> Tensor:
        """Train a batch. Returns [T, E, D], the pooled sums before the update."""


class OurExchange:
    """Our code, with rows at shards or at workers: each unique key is pulled and pushed once."""

    def __init__(self, shape: Shape, rows: Rows) -> None:
        self.rows, self.tables, self.num_steps = rows, shape.table_ids(), 0
        (self.stack,) = shape.schema.stacks

    @property
    def sent_bytes(self) -> int:
        return int(getattr(getattr(self.rows, "client", None), "sent_bytes", 0))

    def step(self, batch: Batch) -> Tensor:
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


class PlainExchange:
    """torch's all-to-all of every id, with repetitions; rows are at worker id mod W."""

    def __init__(self, shape: Shape) -> None:
        self.workers, self.index = dist.get_world_size(), dist.get_rank()
        local_rows = [
            torch.from_numpy(shape.first_rows(table)[self.index :: self.workers].copy())
            for table in shape.table_ids()
        ]
        self.base_T = np.cumsum([0, *(len(rows) for rows in local_rows)])[:-1]
        self.rows_ND, self.state_N = torch.cat(local_rows), torch.zeros(sum(map(len, local_rows)))
        self.max_T = [-(-(shape.ids_a_table - worker) // self.workers) for worker in range(self.workers)]
        self.sent_bytes = 0

    def step(self, batch: Batch) -> Tensor:
        id_L, table_L = (
            np.concatenate(batch.id_TL),
            np.repeat(np.arange(len(batch.id_TL)), [len(ids) for ids in batch.id_TL]),
        )
        owner_L = id_L % self.workers
        order_L = torch.from_numpy(np.argsort(owner_L, kind="stable"))
        place_L = id_L // self.workers + table_L * np.array(self.max_T)[owner_L]  # tables one after another
        sizes = np.bincount(owner_L, minlength=self.workers)
        requested = self._swapped(torch.from_numpy(sizes), [1] * self.workers, [1] * self.workers)
        sent, received = sizes.tolist(), requested.tolist()
        place_M = self._swapped(torch.from_numpy(place_L)[order_L], sent, received)
        got_LD = self._swapped(self.rows_ND[place_M], received, sent)
        rows_LD = torch.empty_like(got_LD).index_copy_(0, order_L, got_LD).requires_grad_()
        bags_BD = F.embedding_bag(
            torch.arange(len(id_L)), rows_LD, batch.ends, mode="sum", include_last_offset=True
        )
        out_TED = bags_BD.view_as(batch.gradient_TED)
        torch.autograd.backward(out_TED, batch.gradient_TED)
        assert rows_LD.grad is not None
        self._update(place_M, self._swapped(rows_LD.grad[order_L], sent, received))
        return out_TED.detach()

    def _update(self, place_M: Tensor, gradient_MD: Tensor) -> None:
        place_U, index_M = torch.unique(place_M, return_inverse=True)
        gradient_UD = torch.zeros(len(place_U), gradient_MD.shape[1]).index_add_(0, index_M, gradient_MD)
        self.state_N[place_U] += gradient_UD.square().mean(dim=1)
        self.rows_ND[place_U] -= RATE * gradient_UD / (self.state_N[place_U].sqrt() + EPSILON)[:, None]

    def _swapped(self, values: Tensor, sizes: list[int], wanted: list[int]) -> Tensor:
        got = values.new_empty(sum(wanted), *values.shape[1:])
        dist.all_to_all_single(got, values.contiguous(), wanted, sizes)
        row_bytes = values.element_size() * int(np.prod(values.shape[1:]))
        self.sent_bytes += (sum(sizes) - sizes[self.index]) * row_bytes
        return got


class TorchRecSharded:
    """TorchRec's sharded collection with FBGEMM's fused row-wise Adagrad and a fixed plan."""

    sent_bytes = 0

    def __init__(self, shape: Shape, kind: str) -> None:
        """`kind`: "table" | "row"."""
        import torchrec
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed import comm_ops, sharding_plan
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.types import ShardingEnv

        comm_ops.set_gradient_division(False)  # sums, as in the other exchanges
        self.names = [f"t{n}" for n in range(shape.tables)]
        configs = [
            torchrec.EmbeddingBagConfig(
                name=name,
                embedding_dim=shape.width,
                num_embeddings=shape.ids_a_table,
                feature_names=[name],
                pooling=torchrec.PoolingType.SUM,
            )
            for name in self.names
        ]
        collection = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": RATE, "eps": EPSILON}
        sharder: Any = EmbeddingBagCollectionSharder(fused_params=fused)
        workers = dist.get_world_size()
        each = {
            name: sharding_plan.row_wise(compute_kernel="fused")
            if kind == "row"
            else sharding_plan.table_wise(n % workers, compute_kernel="fused")
            for n, name in enumerate(self.names)
        }
        plan = sharding_plan.construct_module_sharding_plan(
            collection, each, sharder, local_size=workers, world_size=workers, device_type="cpu"
        )
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        self.module: Any = sharder.shard(collection, plan, env, device=torch.device("cpu"))
        self._kjt: Any = torchrec.KeyedJaggedTensor
        for name, table in zip(self.names, shape.table_ids(), strict=True):
            self._put(name, torch.from_numpy(shape.first_rows(table)))

    def step(self, batch: Batch) -> Tensor:
        lists = self._kjt(
            keys=self.names,
            values=torch.from_numpy(np.concatenate(batch.id_TL)),
            lengths=torch.from_numpy(batch.length_TE.ravel()),
        )
        pooled = self.module(lists).wait().to_dict()
        out_TED = torch.stack([pooled[name] for name in self.names])  # the plan determines their order
        torch.autograd.backward(out_TED, batch.gradient_TED)
        return out_TED.detach()

    def _put(self, name: str, rows_ND: Tensor) -> None:
        """Copy this worker's part of a table."""
        weights = self.module.state_dict()[f"embedding_bags.{name}.weight"]
        for shard in weights.local_shards():
            first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            shard.tensor.detach().copy_(rows_ND[first : first + rows])


CHECKED = 16  # updates after which the sums of all exchanges are compared
_TIMEOUT_S = 60.0


class Took(NamedTuple):
    """Costs of some steps of one worker."""

    wall_s: float
    sent_bytes: int  # 0 = not counted
    differs: float  # largest difference from our sums after CHECKED updates
    ids: int


class ExchangeWorker:
    """Makes each exchange on first use, and checks it against the first one of its shape."""

    def __init__(
        self, index: int, workers: int, place: TorchRendezvous, first: str, opened: contextlib.ExitStack
    ) -> None:
        """`first`: rendezvous address of worker 0."""
        self.index, self.workers, self.place, self.first, self.opened = index, workers, place, first, opened
        self._exchanges: dict[tuple[str, Shape], tuple[Exchange, float]] = {}
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
        sent = exchange.sent_bytes
        dist.barrier()
        began_s = time.perf_counter()
        for n in range(steps):
            exchange.step(batches[n % len(batches)])
        wall_s = time.perf_counter() - began_s
        ids = sum(sum(map(len, batches[n % len(batches)].id_TL)) for n in range(steps))
        return Took(wall_s, exchange.sent_bytes - sent, differs, ids)

    def _make(self, kind: str, shape: Shape, shards: list[str]) -> Exchange:
        if kind == "workers":
            store = self.opened.enter_context(tempfile.TemporaryDirectory())
            shard = empty_shard(
                shape.schema, store, publishing=False, index=self.index, num_shards=self.workers
            )
            about = f" rows {len(self._exchanges)}"
            peers = self.place.join(GroupSpec(1, self.index, self.workers, self.first, about))
            self.opened.callback(peers.leave)
            rows = RowExchange(shard, peers)
            rows.set_incarnation(1, self.workers)
            return OurExchange(shape, ShardRows(rows))
        if kind == "shards":
            client = remote_client(shape.schema, shards, worker=self.index, workers=self.workers)
            return OurExchange(shape, ShardRows(self.opened.enter_context(client)))
        if kind == "plain":
            return PlainExchange(shape)
        return TorchRecSharded(shape, kind.removeprefix("torchrec "))

    def _checked(self, exchange: Exchange, shape: Shape) -> tuple[Exchange, float]:
        """All exchanges start from equal rows and have equal sums after CHECKED updates."""
        batches = self._batches[shape]
        for n in range(CHECKED):
            exchange.step(batches[n % len(batches)])
        out_TED = exchange.step(batches[CHECKED % len(batches)])
        if not bool(torch.isfinite(out_TED).all()):
            raise ArithmeticError("sums are not finite")
        expected = self._expected.setdefault(shape, out_TED)
        return exchange, float((out_TED - expected).abs().max())


class Workers:
    """Worker processes that take the same steps, one exchange after the other."""

    def __init__(self, opened: contextlib.ExitStack) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            store_address = f"127.0.0.1:{free.getsockname()[1]}"
        arguments = (json.dumps([index, WORKERS]) for index in range(WORKERS))
        self._peers = [opened.enter_context(start_peer(_HERE, each)) for each in arguments]
        for peer in self._peers:
            peer.send_line(json.dumps([self._peers[0].address, store_address]))

    def take(self, kind: str, shape: Shape, steps: int, shards: list[str]) -> list[Took]:
        for peer in self._peers:
            peer.send_line(json.dumps([kind, shape, steps, shards]))
        return [Took(*json.loads(peer.read_line())) for peer in self._peers]


@contextlib.contextmanager
def _workers() -> Iterator[Workers]:
    with contextlib.ExitStack() as opened:
        yield Workers(opened)


_shared_workers = SharedSetup(_workers)


def workers() -> contextlib.AbstractContextManager[Workers]:
    """The workers of a run, shared by its rows."""
    return _shared_workers.open()


@contextlib.contextmanager
def exchanged(kind: str, sizes: Any, steps: int) -> Iterator[WholeTurn]:
    """`kind`: workers, shards, plain, torchrec table, torchrec row; `sizes`: of the Shape. Units: steps.
    Time: that of the slower worker."""
    shape = Shape(*sizes)
    with (
        workers() as together,
        shard_processes(shape.schema_source(), WORKERS if kind == "shards" else 0) as shards,
    ):
        addresses = [shard.address for shard in shards]

        def turn() -> TurnResult:
            took = together.take(kind, shape, steps, addresses)
            figures = {
                "sums differ by": max(one.differs for one in took),
                "ids a step": sum(one.ids for one in took) / steps,
            }
            if sent := max(one.sent_bytes for one in took):
                figures["MB sent a worker and step"] = sent / steps / 1e6
            return TurnResult(steps, max(one.wall_s for one in took), figures)

        yield WholeTurn(turn, warm_up=turn)


_STEPS = 13
OURS, PLAIN, TABLE, ROW = (
    "rows at the workers",
    "every id as often as it comes",
    "TorchRec, by tables",
    "TorchRec, by rows",
)


def _against(results: Mapping[str, SubjectResult]) -> dict[str, float]:
    best = min(results[name].cost_us for name in (TABLE, ROW))
    return {"the better TorchRec, in times of ours": best / results[OURS].cost_us}


def _row(zipf: float, valency: int) -> Row:
    size = ([8, 20_000, 32, 512, valency, zipf], _STEPS)
    return Row(
        name=f"8 tables of 20 000 rows of width 32, 512 examples a worker, {valency} ids each, Zipf {zipf:g}",
        unit="steps",
        shows="cost",
        subjects=(
            Subject(OURS, f"{_HERE}:exchanged", ("workers", *size)),
            Subject("the same rows at two shards", f"{_HERE}:exchanged", ("shards", *size), "stage"),
            Subject(TABLE, f"{_HERE}:exchanged", ("torchrec table", *size), "peer"),
            Subject(ROW, f"{_HERE}:exchanged", ("torchrec row", *size), "peer"),
            Subject(PLAIN, f"{_HERE}:exchanged", ("plain", *size), "peer"),
        ),
        derives=_against,
    )


BENCHMARK = Benchmark(
    name="placement-exchange",
    summary="What does a step cost where the workers hold the rows themselves?",
    rows=(_row(1.05, 3), _row(1.05, 20), _row(0.6, 3)),
    slice_s=0.0,
    rounds=3,
    run_setup="benchmarks.placement_exchange:workers",
    interpretation="""\
Two worker processes, gloo over loopback, one torch thread each. All exchanges start from equal rows; "sums
differ by" compares their pooled sums with ours after 16 updates, and the target is at most 1e-5. "Rows at
the workers" (`param_server/row_exchange.py`) pulls and pushes each unique row once, in checksummed frames;
"rows at two shards" is the same code with two more processes on the same cores. "Every id as often as it
comes" is torch's `all_to_all_single` without deduplication and keys. TorchRec's sharded collection uses
FBGEMM's fused update and returns pooled sums, fewer bytes than rows if lists are long; its bytes are not
counted.""",
)


def main() -> None:
    index, workers = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    place = TorchRendezvous("127.0.0.1:0", device="cpu", timeout_s=_TIMEOUT_S)
    with contextlib.ExitStack() as opened:
        opened.callback(place.close)
        print(place.address, file=answers, flush=True)
        first, store_address = json.loads(sys.stdin.readline())
        host, port = parse_address(store_address)
        store = c10d.TCPStore(
            host, port, is_master=index == 0, timeout=datetime.timedelta(seconds=_TIMEOUT_S)
        )
        dist.init_process_group("gloo", store=store, rank=index, world_size=workers)
        opened.callback(dist.destroy_process_group)
        worker = ExchangeWorker(index, workers, place, first, opened)
        for line in sys.stdin:
            kind, shape, steps, shards = json.loads(line)
            print(json.dumps(worker.take(kind, Shape(*shape), steps, shards)), file=answers, flush=True)


if __name__ == "__main__":
    main()
