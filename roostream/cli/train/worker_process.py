"""One of several workers of `roostream train`, in a process of its own: `python -m roostream.cli.train.worker_process FILE`.

Where workers hold rows, each has a shard in it, with its own side of the controller: it is restored, frozen and written as any
shard, and its process is one member of each role. FILE (JSON) is written by `WorkerProcesses`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from param_server.client import Client
from param_server.precompile import precompile
from param_server.row_exchange import RowExchange
from param_server.server import Shard
from roostream.cli.train.config import TrainConfig
from roostream.cli.train.offline_parts import OfflineParts
from roostream.errors import UnavailableError
from roostream.runtime import program
from roostream.runtime.controller_agent import ControllerAgent
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.transport import Transport
from roostream.schema.settings import from_dict
from roostream.warehouse.readers.config import ReadersConfig
from roostream.warehouse.readers.remote_rows import ReadersLink, RemoteSessionOpener
from trainer.config import LoopConfig
from trainer.dual_process_group import DualRendezvous
from trainer.process_group import Rendezvous, SingleWorkerGroup, TorchRendezvous
from trainer.rows import ShardRows
from trainer.worker import Worker

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
            worker.reduction.interrupt()
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
