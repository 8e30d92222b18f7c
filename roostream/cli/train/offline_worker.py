"""What a run of `roostream train` is made of, whether one process has all of it or several have a part each."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.home import Home
from param_server.client import Client
from param_server.config import ShardConfig
from param_server.key_value_store import RocksDbStore
from param_server.main import build_shard
from param_server.precompile import precompile
from param_server.row_exchange import RowExchange
from param_server.server import Shard
from roostream.cli.train.config import TrainConfig
from roostream.errors import UnavailableError
from roostream.models.build import load_model_config
from roostream.runtime import program
from roostream.runtime.checkpoint_store import CheckpointStore, open_store
from roostream.runtime.clock import SystemClock
from roostream.runtime.controller_agent import ControllerAgent
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.runtime.kafka.topics import SAMPLES, all_partitions
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.transport import Transport
from roostream.schema.registry import open_registry, register
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from roostream.schema.settings import from_dict
from roostream.warehouse.readers.config import ReadersConfig
from roostream.warehouse.readers.remote_rows import ReadersLink, RemoteSessionOpener
from roostream.wire import roo_pb2 as pb
from roostream.wire.decode import Decoder
from trainer.config import LoopConfig
from trainer.deployment_identity import DeploymentIdentity
from trainer.device.numerics import set_numerics
from trainer.loop import LoopDependencies, TrainLoop
from trainer.pipeline.pipelined_feed import connect_feed
from trainer.pipeline.stage_timer import StageTimer
from trainer.predictions import Prediction
from trainer.process_group import (
    SINGLE_WORKER,
    DualRendezvous,
    Rendezvous,
    SingleWorkerGroup,
    TorchRendezvous,
)
from trainer.record_source import RecordSource
from trainer.rows import Rows, ShardRows
from trainer.sessions.phased_source import PhasedSource
from trainer.sessions.session_source import local_rows, open_session
from trainer.worker import Worker

NUM_BUCKETS = 64
_READ_AHEAD = 2
_NOWHERE = "127.0.0.1:1"  # nobody dials


class NoOutputs:
    """See `SafeOutputs`: nobody is told of predictions; dead letters are counted by the loop."""

    def begin(self) -> None: ...

    def refused(self) -> str:
        return ""

    def flush(self) -> None: ...

    def interrupt(self) -> None: ...

    def prediction(self, prediction: Prediction) -> None: ...

    def dead_letter(self, letter: pb.DeadLetter) -> None: ...


class OfflineParts:
    """Of one run, by its settings."""

    def __init__(self, config: TrainConfig, settings: LoopConfig) -> None:
        self.config, self.settings, self.home, self.clock = (
            config,
            settings,
            Home(Path(config.home)),
            SystemClock(),
        )
        self.schema: Schema = load_schema(Path(config.schema))
        self.model = load_model_config(config.model)
        self.store: CheckpointStore = open_store(str(self.home.store))
        register(self.store, self.schema)
        self.identity = DeploymentIdentity(
            schema=self.schema,
            registry=open_registry(self.store),
            kafka={},
            num_shards=config.num_owners,
            num_buckets=NUM_BUCKETS,
            num_partitions=config.partitions,
            seed=config.seed,
        )

    def segments_of(self, owner: int) -> Path:
        """Where it has its rows, whichever process it is in."""
        return self.home.root / f"shard-{owner}" / "segments"

    def shard(self, index: int, opened: contextlib.ExitStack) -> Shard:
        """An owner of rows; nothing is restored yet."""
        blobs = RocksDbStore(self.segments_of(index))
        config = ShardConfig(
            schema=self.config.schema,
            store=str(self.home.store),
            controller=_NOWHERE,
            home=str(self.segments_of(index).parent),
            index=index,
            num_shards=self.config.num_owners,
            seed=self.config.seed,
            partitions=self.config.partitions,
        )
        shard = build_shard(config, blobs)
        blobs.open()
        opened.callback(blobs.close)
        opened.callback(shard.leave)
        return shard

    def worker(
        self,
        rows: Rows,
        read_by: RemoteSessionOpener | None,
        opened: contextlib.ExitStack,
        index: int = 0,
        team: Rendezvous = SINGLE_WORKER,
    ) -> Worker:
        set_numerics(self.settings)
        stages, outputs = StageTimer(self.clock), NoOutputs()
        source, rows, feed = connect_feed(
            lambda: self._source(stages, read_by),
            rows,
            stages,
            staleness=0,
            read_ahead=0 if self.settings.exact else _READ_AHEAD,
        )
        opened.callback(source.close)
        wiring = LoopDependencies(
            source=source, rows=rows, outputs=outputs, clock=self.clock, feed=feed, stages=stages
        )
        loop = TrainLoop(self.settings, self.schema, self.model, wiring)
        opened.callback(loop.feed.close)
        return Worker(loop, outputs, self.store, self.identity, index, team)

    def _source(self, stages: StageTimer, read_by: RemoteSessionOpener | None) -> PhasedSource:
        """Behind the session comes nothing."""
        partitions = all_partitions((SAMPLES,), self.config.partitions)
        nothing = RecordSource(
            MemoryConsumer(partitions),
            Decoder(self.schema, self.identity.registry),
            self.clock,
            max_wait_ms=0,
        )
        horizon_ms = self.settings.dedupe_horizon_ms
        return PhasedSource(
            nothing,
            lambda told: open_session(
                told, self.schema, partitions, horizon_ms, self.clock, stages, read_by or local_rows
            ),
        )


REDUCE_S = 30.0
_SILENT_S = 20.0  # without an answer of the controller, whose process ends this one
_JOIN_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """What its process is told."""

    train: dict[str, Any]  # fields of TrainConfig
    loop: dict[str, Any]  # of LoopConfig
    index: int
    controller: str
    readers: str = ""  # who tells what to read, by readers; "" = each worker reads for itself
    shards: Sequence[str] = ()  # none: the workers hold the rows


def work(task: WorkerTask, stop: program.Stop) -> None:
    """Until `stop` is set. Raises UnavailableError: no controller answers."""
    parts = OfflineParts(from_dict(TrainConfig, task.train), from_dict(LoopConfig, task.loop))
    ended = threading.Event()
    with contextlib.ExitStack() as opened:
        place = TorchRendezvous("127.0.0.1:0", device=parts.settings.device, timeout_s=REDUCE_S)
        opened.callback(place.close)
        members: list[ControllerAgent] = []
        team: Rendezvous = place
        if task.shards:
            shards = [SocketTransport(address) for address in task.shards]
            for transport in shards:
                opened.callback(transport.close)
            client: Client | RowExchange = Client(parts.schema, shards, worker=task.index)
        else:
            shard = parts.shard(task.index, opened)
            precompile()
            client = RowExchange(shard, SingleWorkerGroup())
            team = DualRendezvous(place, client)
            members.append(_shard_member(task, shard, ended))
        opened.callback(client.close)
        worker: Worker = parts.worker(
            ShardRows(client), _read_by(task, parts, lambda: worker.incarnation), opened, task.index, team
        )
        members.append(
            ControllerAgent(
                _dials(task.controller),
                "worker",
                task.index,
                worker.submit,
                worker.report,
                ended,
                hear=worker.hear,
            )
        )

        def end() -> None:
            worker.group.interrupt()
            worker.close()
            ended.set()
            for member in members:
                member.join(_JOIN_S)

        opened.callback(end)
        for member in members:
            member.start()
        _train(worker, members[-1], stop)


def _train(worker: Worker, member: ControllerAgent, stop: program.Stop) -> None:
    while not stop.is_set():
        worker.serve_inbox()
        worker.turn()
        if member.silent_s > _SILENT_S:
            raise UnavailableError(f"the controller has not answered for {member.silent_s:.0f} s")


def _shard_member(task: WorkerTask, shard: Shard, ended: threading.Event) -> ControllerAgent:
    return ControllerAgent(_dials(task.controller), "shard", task.index, shard.execute, shard.stats, ended)


def _dials(address: str) -> Any:
    def dial() -> Transport:
        return SocketTransport(address)

    return dial


def _read_by(task: WorkerTask, parts: OfflineParts, incarnation: Any) -> RemoteSessionOpener | None:
    if not task.readers:
        return None
    link = ReadersLink(
        controller=_dials(task.readers), dial=SocketTransport, worker=task.index, incarnation=incarnation
    )
    return RemoteSessionOpener(link, ReadersConfig(by="programs"), parts.clock)


def main() -> None:
    task = WorkerTask(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    program.leave(program.run(f"worker {task.index}", lambda stop: work(task, stop)))


if __name__ == "__main__":
    main()
