"""The parts of a `roostream train` run, and the program of one worker: `python -m
roostream.cli.train.offline_worker FILE`.

`TrainingParts` builds shards and workers, in the process of `roostream train` or in worker programs. With
`rows = torchrec`, a worker program also has a shard with its own controller agent, and is restored, frozen
and written like any shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.home import Home
from param_server.client import Client
from param_server.config import ShardConfig
from param_server.key_value_store import RocksDbStore
from param_server.main import build_shard
from param_server.placement.profiles import Profiler, ProfileRecorder
from param_server.precompile import precompile
from param_server.server import Shard
from roostream.cli.train.config import TrainConfig
from roostream.errors import UnavailableError
from roostream.models.build import load_model_config
from roostream.runtime import program
from roostream.runtime.checkpoint_store import CheckpointStore
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
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from trainer.chunks import ChunkPart
from trainer.config import LoopConfig
from trainer.deployment_identity import DeploymentIdentity
from trainer.device.numerics import set_numerics
from trainer.feed import connect_feed
from trainer.loop import LoopDependencies, TrainLoop
from trainer.pipeline.stage_timer import StageTimer
from trainer.predictions import Prediction
from trainer.process_group import (
    SINGLE_WORKER,
    DualRendezvous,
    Rendezvous,
    TorchRendezvous,
)
from trainer.record_source import RecordSource
from trainer.row_home import OwnShard
from trainer.rows import Rows, ShardRows
from trainer.sessions.session_source import PhasedSource, local_rows, open_session
from trainer.worker import Worker

if TYPE_CHECKING:
    from trainer.torchrec_plan import Kind

NUM_BUCKETS = 64
_READ_AHEAD = 2
_UNUSED_ADDRESS = "127.0.0.1:1"
_REDUCE_TIMEOUT_S = 30.0
_CONTROLLER_TIMEOUT_S = 20.0
_JOIN_S = 5.0


class DiscardedOutputs:
    """A `DurableOutputs`: predictions and dead letters are not written; the loop counts dead letters."""

    def begin(self) -> None: ...

    def refused(self) -> str:
        return ""

    def flush(self) -> None: ...

    def interrupt(self) -> None: ...

    def prediction(self, prediction: Prediction) -> None: ...

    def dead_letter(self, letter: pb.DeadLetter) -> None: ...


class TrainingParts:
    """Builds the shards and workers of one run from its settings."""

    def __init__(self, config: TrainConfig, settings: LoopConfig) -> None:
        self.config, self.settings = config, settings
        self.home, self.clock = Home(Path(config.home)), SystemClock()
        self.schema: Schema = load_schema(config.schema_path)
        self.model = load_model_config(config.model)
        self.store: CheckpointStore = self.home.open_store()
        register(self.store, self.schema)
        self.identity = DeploymentIdentity(
            schema=self.schema,
            registry=open_registry(self.store, own=self.schema),
            kafka={},
            num_shards=config.num_owners,
            num_buckets=NUM_BUCKETS,
            num_partitions=config.partitions,
            seed=config.seed,
        )

    def segments_of(self, owner: int) -> Path:
        """Directory of an owner's rows."""
        return self.home.root / f"shard-{owner}" / "segments"

    def shard(self, index: int, opened: contextlib.ExitStack) -> Shard:
        """An owner of rows; the controller restores it later."""
        segments = RocksDbStore(self.segments_of(index))
        config = ShardConfig(
            schema=str(self.config.schema_path),
            store=str(self.home.store),
            controller=_UNUSED_ADDRESS,
            home=str(self.segments_of(index).parent),
            index=index,
            num_shards=self.config.num_owners,
            seed=self.config.seed,
            partitions=self.config.partitions,
        )
        shard = build_shard(config, segments)
        segments.open()
        opened.callback(segments.close)
        opened.callback(shard.leave)
        return shard

    def worker(
        self,
        rows: Rows,
        opener: RemoteSessionOpener | None,
        opened: contextlib.ExitStack,
        index: int = 0,
        rendezvous: Rendezvous = SINGLE_WORKER,
        on_batch: Callable[[Batch], None] = lambda batch: None,
    ) -> Worker:
        """A worker that trains the session. `opener`: opens sessions read by reader programs; None = it reads
        files itself. `on_batch`: called with every batch that was scored."""
        set_numerics(self.settings)
        stages, outputs = StageTimer(self.clock), DiscardedOutputs()
        source, rows, feed = connect_feed(
            lambda: self._source(stages, opener),
            rows,
            stages,
            staleness=0,
            read_ahead=0 if self.settings.exact else _READ_AHEAD,
        )
        opened.callback(source.close)
        counted_share = self.config.profile_share if index == 0 else 0.0
        profiles = ProfileRecorder(Profiler(counted_share, self.config.seed), self.store, self.clock)

        def on_scored(part: ChunkPart) -> None:
            profiles.observe(loop.num_steps, part.batch, part.lookup)
            on_batch(part.batch)

        dependencies = LoopDependencies(
            source=source,
            rows=rows,
            outputs=outputs,
            clock=self.clock,
            feed=feed,
            stages=stages,
            on_scored=on_scored,
        )
        loop = TrainLoop(self.settings, self.schema, self.model, dependencies)
        opened.callback(loop.feed.close)
        worker = Worker(loop, outputs, self.store, self.identity, index, rendezvous)
        worker.on_write = profiles.save
        return worker

    def _source(self, stages: StageTimer, opener: RemoteSessionOpener | None) -> PhasedSource:
        """A source with the session, and an empty stream after it."""
        partitions = all_partitions((SAMPLES,), self.config.partitions)
        stream = RecordSource(
            MemoryConsumer(partitions),
            Decoder(self.schema, self.identity.registry),
            self.clock,
            max_wait_ms=0,
            reopen=MemoryConsumer,
        )
        horizon_ms = self.settings.dedupe_horizon_ms
        return PhasedSource(
            stream,
            lambda session: open_session(
                session, self.schema, partitions, horizon_ms, self.clock, stages, opener or local_rows
            ),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """The contents of a worker program's FILE (JSON)."""

    train: dict[str, Any]  # fields of TrainConfig
    loop: dict[str, Any]  # fields of LoopConfig
    index: int
    controller: str  # address
    readers: str = ""  # address of the reader master; "" = the worker reads files itself
    shards: Sequence[str] = ()  # addresses; empty = the workers own the rows
    # Table → kind and workers (`TablePlacement`); a table that it lacks is spread by rows.
    placement: Mapping[str, tuple[Kind, Sequence[int]]] = dataclasses.field(default_factory=dict)


def run_worker(task: WorkerTask, stop: program.Stop) -> None:
    """Train until `stop` is set. Raises UnavailableError: the controller does not answer."""
    parts = TrainingParts(from_dict(TrainConfig, task.train), from_dict(LoopConfig, task.loop))
    ended = threading.Event()

    def dial() -> Transport:
        return SocketTransport(task.controller)

    with contextlib.ExitStack() as opened:
        peers = TorchRendezvous("127.0.0.1:0", device=parts.settings.device, timeout_s=_REDUCE_TIMEOUT_S)
        opened.callback(peers.close)
        rendezvous: Rendezvous = peers
        agents: list[ControllerAgent] = []
        on_batch: Callable[[Batch], None] = lambda batch: None
        if task.shards:
            transports = [SocketTransport(address) for address in task.shards]
            for transport in transports:
                opened.callback(transport.close)
            client = Client(parts.schema, transports, worker=task.index)
            opened.callback(client.close)
            rows: Rows = ShardRows(client)
        else:
            from trainer.torchrec_plan import TablePlacement
            from trainer.torchrec_rows import TorchRecRows

            shard = parts.shard(task.index, opened)
            precompile()
            placement = {
                table: TablePlacement(kind, tuple(ranks)) for table, (kind, ranks) in task.placement.items()
            }
            held = TorchRecRows(
                parts.schema,
                OwnShard(shard),
                lambda _: placement,
                parts.settings.device,
                on_progress=lambda: worker.note_progress(),
            )
            rows, rendezvous, on_batch = held, DualRendezvous(peers, held), held.note_batch

            def stats() -> dict[str, Any]:
                exchanged = {"exchanged_bytes": held.sent_bytes, "impression_bytes": held.impression_bytes}
                return {**shard.stats(), **exchanged}

            agents.append(ControllerAgent(dial, "shard", task.index, shard.execute, stats, ended))
        opener = None
        if task.readers:
            link = ReadersLink(
                controller=lambda: SocketTransport(task.readers),
                dial=SocketTransport,
                worker=task.index,
                incarnation=lambda: worker.incarnation,
            )
            opener = RemoteSessionOpener(link, ReadersConfig(by="programs"), parts.clock)
        worker: Worker = parts.worker(rows, opener, opened, task.index, rendezvous, on_batch)
        agents.append(
            ControllerAgent(
                dial, "worker", task.index, worker.submit, worker.report, ended, on_received=worker.hear
            )
        )

        def end() -> None:
            worker.group.interrupt()
            worker.close()
            ended.set()
            for agent in agents:
                agent.join(_JOIN_S)

        opened.callback(end)
        for agent in agents:
            agent.start()
        while not stop.is_set():
            worker.serve_inbox()
            worker.turn()
            if (silent_s := agents[-1].silent_s) > _CONTROLLER_TIMEOUT_S:
                raise UnavailableError(f"the controller has not answered for {silent_s:.0f} s")


def main() -> None:
    """Run the worker that the file on the command line describes."""
    task = WorkerTask(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    program.leave(program.run(f"worker {task.index}", lambda stop: run_worker(task, stop)))


if __name__ == "__main__":
    main()
