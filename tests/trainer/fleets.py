"""Several training loops in lock-step, as actors, over records in memory and one shared set of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.clock import Clock, FakeClock
from roostream.runtime.kafka.topics import Partition
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.wire.lookup import Lookup
from roostream.wire.records import Record
from tests.trainer import samples
from tests.trainer.actors import Actor, InMemoryRendezvous, ReductionHub, wait_until
from tests.trainer.fake_shard import FakeRows, FakeShard
from tests.trainer.loops import Built, build
from tests.trainer.memory_store import MemoryStore
from trainer.lockstep import LockStep
from trainer.loop import Snapshot
from trainer.process_group import GroupSpec
from trainer.rows import PushTimes, Rows, ShardRows


def partitions_of(worker: int, workers: int, num_partitions: int) -> tuple[Partition, ...]:
    return tuple(("samples", p) for p in range(num_partitions) if p % workers == worker)


@dataclasses.dataclass
class WorkerCut:
    """The snapshot of one worker for commit `seq`."""

    seq: int
    snapshot: Snapshot


class Fleet:
    """Workers that train from a snapshot, or from the beginning. `rows(worker)` returns a worker's `Rows`."""

    def __init__(
        self,
        records: Sequence[Record],
        workers: int,
        rows: Callable[[int], Rows],
        *,
        num_partitions: int = 2,
        at: Snapshot | None = None,
        incarnation: int = 1,
        **settings: Any,
    ) -> None:
        self.workers, self.requested_cuts, self.clock = workers, [0] * workers, FakeClock(samples.T0)
        self.reduction_hub = ReductionHub(self.clock)
        assigned = [partitions_of(worker, workers, num_partitions) for worker in range(workers)]
        self.built: list[Built] = [
            build(records, partitions=partitions, **settings) for partitions in assigned
        ]
        ends = {(r.topic, r.partition): r.offset + 1 for r in records}
        self.ends = {partition: ends.get(partition, 0) for partitions in assigned for partition in partitions}
        for worker, built in enumerate(self.built):
            built.loop.rows = rows(worker)
            built.loop.rows.set_incarnation(incarnation, workers)
            if at is not None:
                built.loop.restore(at)
        group_members = [InMemoryRendezvous(self.reduction_hub, worker) for worker in range(workers)]
        self.steps = [
            LockStep(built.loop, rendezvous.join(GroupSpec(incarnation, worker, workers, "")))
            for worker, (built, rendezvous) in enumerate(zip(self.built, group_members, strict=True))
        ]
        self.actors = [Actor() for _ in range(workers)]
        self.cuts: list[WorkerCut | None] = [None] * workers
        self.num_trained = 0

    def turn(self, worker: int) -> None:
        """Continue a worker's paused turn, or start its next one, unless it is cut."""
        actor = self.actors[worker]
        if actor.busy:
            actor.resume()
        elif self.cuts[worker] is None:
            actor.do(lambda: self._turn(worker))

    def _turn(self, worker: int) -> None:
        agreed = self.steps[worker].turn(cut=self.requested_cuts[worker])
        self.num_trained += agreed.trains and worker == 0
        if agreed.cut:
            self.cuts[worker] = WorkerCut(agreed.cut, self.built[worker].loop.snapshot())

    def round(self, *workers: int) -> None:
        for worker in workers or range(self.workers):
            self.turn(worker)

    def run(self, max_rounds: int = 400) -> Fleet:
        """Run until every record is trained."""
        for _ in range(max_rounds):
            if self.progress == self.ends:
                return self
            self.round()
        raise AssertionError(self.progress)

    def cut(self, seq: int = 1) -> Snapshot:
        """Request a cut from all workers, and return their merged snapshot."""
        self.requested_cuts = [seq] * self.workers
        for _ in range(100):
            if all(self.cuts):
                break
            self.round()
        return self.merged_snapshot()

    def merged_snapshot(self) -> Snapshot:
        assert all(self.cuts), self.cuts
        snapshots = [cut.snapshot for cut in self.cuts if cut]
        assert len({s.step for s in snapshots}) == len({s.watermark_ms for s in snapshots}) == 1
        partitions = {partition: part for s in snapshots for partition, part in s.partitions.items()}
        return dataclasses.replace(snapshots[0], partitions=partitions)

    @property
    def progress(self) -> dict[Partition, int]:
        return {
            partition: at for built in self.built for partition, at in built.loop.partitions.progress.items()
        }

    @property
    def predicted(self) -> list[int]:
        return sorted(p.sample_id for built in self.built for p in built.predicted)

    def weights(self) -> list[dict[str, Tensor]]:
        return [
            {k: v.detach().clone() for k, v in built.loop.model.state_dict().items()} for built in self.built
        ]


def fake_shard() -> FakeShard:
    shard = FakeShard(0, samples.schema(), MemoryStore(), {}, FakeClock(samples.T0))
    shard.restored, shard.incarnation = True, 1
    return shard


def start_incarnation(shard: FakeShard, incarnation: int) -> None:
    """Do what RESTORE does to a shard whose rows already are those of the manifest."""
    shard.incarnation, shard.seen, shard.held = incarnation, set(), {}


def shared_rows(shard: FakeShard) -> Callable[[int], Rows]:
    """Return a function that gives each worker its client of one shared shard."""

    def rows(worker: int) -> Rows:
        return ShardRows(FakeRows(samples.schema(), [InMemoryTransport(shard.handle)], worker))  # type: ignore[arg-type]

    return rows


class Float64Rows:
    """The rows of all workers in float64, with Adagrad. Adds up the workers' pushes of a step as a shard
    does."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.workers = clock, 1
        self.values: dict[tuple[int, int], Tensor] = {}
        self.squares: dict[tuple[int, int], Tensor] = {}
        self._held: list[dict[tuple[int, int], Tensor]] = []

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        self.workers = workers

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        return {
            name: torch.stack(values)
            if (values := [self._value(key) for key in _keys(lookup, name)])
            else torch.empty(0)
            for name in lookup.stacks
        }

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        held = self._held
        held.append(
            {
                key: g
                for name, gradient_UD in gradients.items()
                for key, g in zip(_keys(lookup, name), gradient_UD, strict=False)
            }
        )
        if len(held) == self.workers:
            self._held = []
            for key in dict.fromkeys(key for part in held for key in part):
                self._apply(key, sum(part[key] for part in held if key in part), times.clip_row_norm)  # type: ignore[arg-type]
        else:
            wait_until(lambda: self._held is not held, self.clock, "the others' push")

    def save(self) -> None: ...

    def _apply(self, key: tuple[int, int], gradient_D: Tensor, max_norm: float) -> None:
        norm = float(gradient_D.norm())
        gradient_D = gradient_D * (min(1.0, max_norm / norm) if max_norm and norm else 1.0)
        self.squares[key] = self.squares.get(key, torch.full_like(gradient_D, 0.1)) + gradient_D**2
        self.values[key] = self._value(key) - 0.05 * gradient_D / self.squares[key].sqrt()

    def _value(self, key: tuple[int, int]) -> Tensor:
        if key not in self.values:
            table, id_ = key
            dim = next(t.dim for t in samples.schema().tables if t.id == table)
            generator = torch.Generator().manual_seed(1000 * table + id_)
            self.values[key] = torch.rand(dim, generator=generator, dtype=torch.float64) * 0.1 - 0.05
        return self.values[key].clone()


def _keys(lookup: Lookup, stack: str) -> list[tuple[int, int]]:
    keys = lookup.stacks[stack]
    return list(zip(keys.table_U.tolist(), keys.id_U.tolist(), strict=True))
