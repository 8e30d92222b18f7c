"""Ways to exchange rows between workers that own them. Each does the same work: pooled sums in the forward
pass, and one row-wise Adagrad step with the gradients of all workers in the backward pass.

Letters: W workers, T tables (each with one feature), E examples of a worker, L ids of a batch, U unique ones,
D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from param_server.initial_rows import initial_rows
from roostream.models.embedding_ops import pool_bags
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.lookup import Lookup, StackLookup, insert
from trainer.rows import PushTimes, Rows

RATE, EPSILON, SCALE = 0.05, 1e-8, 0.05
_BATCHES = 8


class Shape(NamedTuple):
    """What a step is of."""

    tables: int
    ids_a_table: int
    width: int
    examples: int  # a worker
    valency: int  # in the mean
    zipf: float

    @property
    def schema(self) -> Schema:
        rule = {
            "name": "rowwise_adagrad",
            "learning_rate": RATE,
            "epsilon": EPSILON,
            "initial_accumulator": 0.0,
        }
        tables = {f"t{n}": {"dim": self.width, "init_scale": SCALE, "rule": rule} for n in range(self.tables)}
        return schema_from_dict({"tables": tables, "label": [{"name": "click", "action": "click"}]})

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
    made = []
    for _ in range(_BATCHES):
        length_TE = random.integers(1, 2 * shape.valency, size[:2])
        id_TL = [
            random.choice(shape.ids_a_table, int(n), p=frequency / frequency.sum())
            for n in length_TE.sum(axis=1)
        ]
        made.append(Batch(id_TL, length_TE, 0.1 * torch.from_numpy(random.standard_normal(size, np.float32))))
    return made


class Way(Protocol):
    """One worker's side of it; all take their steps together."""

    @property
    def sent_bytes(self) -> int:
        """To others so far; 0 = not counted."""

    def step(self, batch: Batch) -> Tensor:
        """[T, E, D]: the pooled sums before the update."""


class Asked:
    """Of rows at shards or at the workers: each unique key once, by the project's own code."""

    def __init__(self, shape: Shape, rows: Rows) -> None:
        self.rows, self.tables, self.num_steps = rows, shape.table_ids(), 0
        (self.stack,) = shape.schema.stacks

    @property
    def sent_bytes(self) -> int:
        return int(getattr(getattr(self.rows, "client", None), "sent_bytes", 0))

    def step(self, batch: Batch) -> Tensor:
        lookup, index_L = self._found(batch)
        rows_UD = self.rows.pull(lookup)[self.stack].requires_grad_()
        out_TED = pool_bags(rows_UD, torch.from_numpy(index_L), batch.ends, torch.ones(len(index_L))).view_as(
            batch.gradient_TED
        )
        torch.autograd.backward(out_TED, batch.gradient_TED)
        assert rows_UD.grad is not None
        self.num_steps += 1
        self.rows.push(lookup, {self.stack: rows_UD.grad}, PushTimes(step=self.num_steps, time_ms=0))
        return out_TED.detach()

    def _found(self, batch: Batch) -> tuple[Lookup, np.ndarray]:
        """As `roostream.wire.lookup.build_lookup` does it."""
        total = sum(map(len, batch.id_TL))
        slots = np.full(1 << max(4, (2 * total - 1).bit_length()), -1, np.int32)
        table_U, id_U, index_L = (
            np.empty(total, np.uint32),
            np.empty(total, np.int64),
            np.empty(total, np.int64),
        )
        count = at = 0
        for table, ids in zip(self.tables, batch.id_TL, strict=True):
            count = insert(ids, table, slots, table_U, id_U, count, index_L[at : at + len(ids)])
            at += len(ids)
        return Lookup({self.stack: StackLookup(table_U[:count].copy(), id_U[:count].copy(), {})}), index_L


class PlainExchange:
    """Tensors of rows by number, id mod W, and torch's own all-to-all of every id as often as it comes."""

    def __init__(self, shape: Shape) -> None:
        self.workers, self.index = dist.get_world_size(), dist.get_rank()
        own = [
            torch.from_numpy(shape.first_rows(table)[self.index :: self.workers].copy())
            for table in shape.table_ids()
        ]
        self.base_T = np.cumsum([0, *(len(rows) for rows in own)])[:-1]
        self.rows_ND, self.state_N = torch.cat(own), torch.zeros(sum(map(len, own)))
        self.max_T = [-(-(shape.ids_a_table - worker) // self.workers) for worker in range(self.workers)]
        self.sent_bytes = 0

    def step(self, batch: Batch) -> Tensor:
        id_L, table_L = (
            np.concatenate(batch.id_TL),
            np.repeat(np.arange(len(batch.id_TL)), [len(ids) for ids in batch.id_TL]),
        )
        owner_L = id_L % self.workers
        order_L = torch.from_numpy(np.argsort(owner_L, kind="stable"))
        place_L = (
            id_L // self.workers + table_L * np.array(self.max_T)[owner_L]
        )  # of the owner's tables behind each other
        sizes = np.bincount(owner_L, minlength=self.workers)
        wanted = self._swapped(torch.from_numpy(sizes), [1] * self.workers, [1] * self.workers)
        mine, theirs = sizes.tolist(), wanted.tolist()
        place_M = self._swapped(torch.from_numpy(place_L)[order_L], mine, theirs)
        got_LD = self._swapped(self.rows_ND[place_M], theirs, mine)
        rows_LD = torch.empty_like(got_LD).index_copy_(0, order_L, got_LD).requires_grad_()
        bags_BD = F.embedding_bag(
            torch.arange(len(id_L)), rows_LD, batch.ends, mode="sum", include_last_offset=True
        )
        out_TED = bags_BD.view_as(batch.gradient_TED)
        torch.autograd.backward(out_TED, batch.gradient_TED)
        assert rows_LD.grad is not None
        self._update(place_M, self._swapped(rows_LD.grad[order_L], mine, theirs))
        return out_TED.detach()

    def _update(self, place_M: Tensor, gradient_MD: Tensor) -> None:
        place_U, index_M = torch.unique(place_M, return_inverse=True)
        gradient_UD = torch.zeros(len(place_U), gradient_MD.shape[1]).index_add_(0, index_M, gradient_MD)
        self.state_N[place_U] += gradient_UD.square().mean(dim=1)
        self.rows_ND[place_U] -= RATE * gradient_UD / (self.state_N[place_U].sqrt() + EPSILON)[:, None]

    def _swapped(self, sent: Tensor, sizes: list[int], wanted: list[int]) -> Tensor:
        got = sent.new_empty(sum(wanted), *sent.shape[1:])
        dist.all_to_all_single(got, sent.contiguous(), wanted, sizes)
        self.sent_bytes += (
            (sum(sizes) - sizes[self.index]) * sent.element_size() * int(np.prod(sent.shape[1:]))
        )
        return got


class TorchRecSharded:
    """TorchRec's sharded collection with FBGEMM's fused row-wise Adagrad, by a plan that is written by
    hand."""

    sent_bytes = 0

    def __init__(self, shape: Shape, kind: str) -> None:
        """`kind`: "table" | "row"."""
        import torchrec
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed import comm_ops, sharding_plan
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.types import ShardingEnv

        comm_ops.set_gradient_division(False)  # sums, as everyone's here
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
        found = self.module(lists).wait().to_dict()
        out_TED = torch.stack([found[name] for name in self.names])  # by name: their order is the plan's
        torch.autograd.backward(out_TED, batch.gradient_TED)
        return out_TED.detach()

    def _put(self, name: str, rows_ND: Tensor) -> None:
        """This worker's piece of them."""
        weights = self.module.state_dict()[f"embedding_bags.{name}.weight"]
        for shard in weights.local_shards():
            first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            shard.tensor.detach().copy_(rows_ND[first : first + rows])
